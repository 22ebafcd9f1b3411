{{- define "kvlane.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- /* Prefix of object names, short enough for the suffixes and for the hash that a ReplicaSet adds. One that was shortened has
    a hash, so that two releases differ where their names do; a release's name may have dots, a Service's may not. */ -}}
{{- define "kvlane.fullname" -}}
{{- $name := include "kvlane.name" . }}
{{- if .Values.fullnameOverride }}
{{- $name = .Values.fullnameOverride }}
{{- else if contains $name .Release.Name }}
{{- $name = .Release.Name }}
{{- else }}
{{- $name = printf "%s-%s" .Release.Name $name }}
{{- end }}
{{- $name = replace "." "-" $name }}
{{- if gt (len $name) 40 }}
{{- $name = printf "%s-%s" ($name | trunc 31 | trimSuffix "-") ($name | sha256sum | trunc 8) }}
{{- end }}
{{- $name }}
{{- end }}

{{- define "kvlane.selector" -}}
app.kubernetes.io/name: {{ include "kvlane.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "kvlane.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "kvlane.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Name of an image, as of the keys below `image`, with `global`. */ -}}
{{- define "kvlane.image" -}}
{{- $repository := .repository }}
{{- with default .registry .global.imageRegistry }}{{ $repository = printf "%s/%s" . $repository }}{{ end }}
{{- if .digest }}{{ $repository }}@{{ .digest }}{{ else }}{{ $repository }}:{{ .tag }}{{ end }}
{{- end }}

{{- define "kvlane.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "kvlane.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "kvlane.modelNamespace" -}}
{{- default .Release.Namespace .Values.modelServers.namespace }}
{{- end }}

{{- /* "true" if the gateway routes to the Service of the model servers. */ -}}
{{- define "kvlane.routesToService" -}}
{{- if eq .Values.mode "gateway" }}
{{- if eq .Values.provider.name "envoy-gateway" }}true
{{- else if and (eq .Values.provider.name "istio") .Values.provider.istio.envoyFilter.enabled }}true
{{- end }}
{{- end }}
{{- end }}

{{- /* "true" if the gateway has an entry that observes the first piece of each answer. */ -}}
{{- define "kvlane.observes" -}}
{{- $provider := .Values.provider }}
{{- if include "kvlane.routesToService" . }}
{{- if ternary $provider.envoyGateway.firstToken $provider.istio.envoyFilter.firstToken (eq $provider.name "envoy-gateway") }}true{{ end }}
{{- end }}
{{- end }}

{{- /* "true" if the chart makes the InferencePool. */ -}}
{{- define "kvlane.createPool" -}}
{{- $pool := .Values.inferencePool }}
{{- if kindIs "bool" $pool.create }}
{{- if $pool.create }}true{{ end }}
{{- else if and (eq .Values.mode "gateway") (not (include "kvlane.routesToService" .)) (not $pool.name) }}true
{{- end }}
{{- end }}

{{- /* Name of the InferencePool, "" without one. */ -}}
{{- define "kvlane.pool" -}}
{{- if .Values.inferencePool.name }}
{{- .Values.inferencePool.name }}
{{- else if include "kvlane.createPool" . }}
{{- include "kvlane.fullname" . }}
{{- end }}
{{- end }}

{{- /* Service of the model servers, "" if nothing needs one. */ -}}
{{- define "kvlane.modelService" -}}
{{- $service := .Values.modelServers.service }}
{{- if $service.name }}
{{- $service.name }}
{{- else if or $service.create (include "kvlane.routesToService" .) }}
{{- printf "%s-models" (include "kvlane.fullname" .) }}
{{- end }}
{{- end }}

{{- define "kvlane.createModelService" -}}
{{- $service := .Values.modelServers.service }}
{{- if kindIs "bool" $service.create }}
{{- if $service.create }}true{{ end }}
{{- else if and (include "kvlane.routesToService" .) (not $service.name) }}true
{{- end }}
{{- end }}

{{- /* Service by which others reach ext_proc. */ -}}
{{- define "kvlane.extProcService" -}}
{{- include "kvlane.fullname" . }}{{ if eq .Values.mode "standalone" }}-extproc{{ end }}
{{- end }}

{{- /* Service that an extra pool names as its picker: one for each, by which a request's pool is told. With a hash where the
    pool's name is not the end of a Service's name. */ -}}
{{- define "kvlane.poolService" -}}
{{- $name := printf "%s-pool-%s" (include "kvlane.fullname" .root) .pool }}
{{- if or (contains "." $name) (gt (len $name) 63) }}
{{- printf "%s-%s" ($name | replace "." "-" | trunc 54 | trimSuffix "-") (.pool | sha256sum | trunc 8) }}
{{- else }}
{{- $name }}
{{- end }}
{{- end }}

{{- define "kvlane.extProcHost" -}}
{{- printf "%s.%s.svc.%s" (include "kvlane.extProcService" .) .Release.Namespace .Values.clusterDomain }}
{{- end }}

{{- define "kvlane.socket" -}}
unix:/run/kvlane/kvlane.sock
{{- end }}

{{- /* Envoy's listener for prefill legs: only where Envoy shares a socket's folder with Kvlane. */ -}}
{{- define "kvlane.prefill" -}}
{{- if and (eq .Values.mode "sidecar") (dig "disagg" "connector" "" .Values.config) }}unix:/run/kvlane/prefill.sock{{ end }}
{{- end }}

{{- /* Seconds that Kvlane serves on after SIGTERM. Answers that pass through it need their time. */ -}}
{{- define "kvlane.drain" -}}
{{- $full := eq .Values.proxy.responseBody "FULL_DUPLEX_STREAMED" }}
{{- if eq .Values.mode "gateway" }}
{{- $full = not (include "kvlane.routesToService" .) }}
{{- if eq .Values.provider.name "envoy-gateway" }}{{ $full = eq .Values.provider.envoyGateway.requestBody "FullDuplexStreamed" }}{{ end }}
{{- end }}
{{- default (ternary 600 120 $full) .Values.drainSeconds | int64 }}
{{- end }}

{{- /* Whether requests pass while Kvlane is down: of (root, the value); as config.Config.FailsClosed. */ -}}
{{- define "kvlane.failOpen" -}}
{{- $t := dig "tenants" (dict) (index . 0).Values.config }}
{{- $v := index . 1 }}
{{- if kindIs "bool" $v | ternary $v (not (and $t.salt_header (dig "required" true $t))) }}true{{ end }}
{{- end }}

{{- /* "true" if Envoy tells Kvlane the outcome of requests: by itself where the one that it tells is the one that decided. */ -}}
{{- define "kvlane.accessLog" -}}
{{- if kindIs "bool" .Values.proxy.accessLog }}
{{- if .Values.proxy.accessLog }}true{{ end }}
{{- else if eq .Values.mode "sidecar" }}true
{{- end }}
{{- end }}

{{- /* Seconds until the kubelet may kill a pod with Kvlane. */ -}}
{{- define "kvlane.neededGrace" -}}
{{- if eq .Values.mode "sidecar" }}
{{- add .Values.proxy.drainSeconds .Values.drainQuietSeconds 15 }}
{{- else }}
{{- add (include "kvlane.drain" . | int64) 10 }}
{{- end }}
{{- end }}

{{- define "kvlane.grace" -}}
{{- default (include "kvlane.neededGrace" .) .Values.terminationGracePeriodSeconds | int64 }}
{{- end }}

{{- /* Half of Envoy's time is for busy clients to leave it, half for their last answers. */ -}}
{{- define "kvlane.connectionAge" -}}
{{ div (int64 .Values.proxy.drainSeconds) 2 }}s
{{- end }}

{{- /* Where Prometheus' series of this release are; jobLabel of the monitors makes it so. */ -}}
{{- define "kvlane.series" -}}
namespace="{{ .Release.Namespace }}",job="{{ default .Release.Name .Values.monitoring.rules.job }}"
{{- end }}

{{- /* "true" if pods of the model servers send their KV events to Kvlane. */ -}}
{{- define "kvlane.pushed" -}}
{{- if hasPrefix "push:" .Values.modelServers.kvEvents.endpoint }}true{{ end }}
{{- end }}

{{- /* A duration of kvlane.yaml, such as 1m30s, in milliseconds. */ -}}
{{- define "kvlane.milliseconds" -}}
{{- $units := dict "h" 3600000.0 "m" 60000.0 "s" 1000.0 "ms" 1.0 "us" 0.001 "µs" 0.001 "ns" 0.000001 }}
{{- $sum := 0.0 }}
{{- range regexFindAll "[0-9.]+(ms|us|µs|ns|h|m|s)" (toString .) -1 }}
{{- $sum = addf $sum (mulf (regexFind "^[0-9.]+" . | float64) (get $units (regexReplaceAll "^[0-9.]+" . ""))) }}
{{- end }}
{{- $sum }}
{{- end }}

{{- /* Whether requests may queue or be prefilled. */ -}}
{{- define "kvlane.holds" -}}
{{- or (not (empty (dig "disagg" "connector" "" .Values.config))) (gt (int64 (dig "routing" "wait" "max_requests" 0 .Values.config)) 0) (gt (int64 (dig "flow" "max_requests" 0 .Values.config)) 0) -}}
{{- end }}

{{- define "kvlane.pdb" -}}
{{- $enabled := .budget.enabled }}
{{- if kindIs "bool" $enabled }}{{ if $enabled }}true{{ end }}
{{- else if gt (int64 .pods) 1 }}true
{{- end }}
{{- end }}

{{- /* Fewest pods of Kvlane. */ -}}
{{- define "kvlane.pods" -}}
{{- if .Values.autoscaling.enabled }}{{ .Values.autoscaling.minReplicas }}{{ else }}{{ .Values.replicas }}{{ end }}
{{- end }}

{{- /* How several pods share what they know: "" if they do not, or if there is one. */ -}}
{{- define "kvlane.fleet" -}}
{{- if and (ne .Values.fleet.mode "off") (or .Values.autoscaling.enabled (gt (int64 .Values.replicas) 1)) }}{{ .Values.fleet.mode }}{{ end }}
{{- end }}

{{- define "kvlane.fleetService" -}}
{{ include "kvlane.fullname" . }}-fleet
{{- end }}

{{- /* "true" if the key of the hash is the fleet's: nothing else gives one. */ -}}
{{- define "kvlane.fleetKey" -}}
{{- $index := default dict .Values.config.index }}
{{- if and (include "kvlane.fleet" .) (not (or .Values.warmStart.enabled $index.key $index.key_file)) }}true{{ end }}
{{- end }}

{{- /* Secret of the fleet, "" if nothing needs one. */ -}}
{{- define "kvlane.fleetSecret" -}}
{{- if or (eq (include "kvlane.fleet" .) "embedded") (include "kvlane.fleetKey" .) }}
{{- default (printf "%s-fleet" (include "kvlane.fullname" .)) .Values.fleet.secretName }}
{{- end }}
{{- end }}

{{- /* Headers of conversations, by which Envoy chooses among pods that share. */ -}}
{{- define "kvlane.conversations" -}}
{{- $keys := list }}
{{- if include "kvlane.fleet" . }}
{{- range dig "routing" "conversation_headers" (include "kvlane.conversationHeaders" . | fromYamlArray) .Values.config }}
{{- $keys = append $keys (dict "Key" (lower .)) }}
{{- end }}
{{- end }}
{{- toYaml $keys }}
{{- end }}

{{- /* Spread of a component's pods: evenly over zones and nodes, but a pod is never left unscheduled for it. The label
    pod-template-hash keeps a roll-out from counting the pods that it replaces. */ -}}
{{- define "kvlane.spread" -}}
{{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: ScheduleAnyway
  matchLabelKeys: [pod-template-hash]
  labelSelector:
    matchLabels:
      {{- include "kvlane.selector" $.root | nindent 6 }}
      app.kubernetes.io/component: {{ $.component }}
{{- end }}
{{- end }}

{{- /* What all pods have in common. */ -}}
{{- define "kvlane.podBase" -}}
{{- with concat .Values.global.imagePullSecrets .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.dnsPolicy }}
dnsPolicy: {{ . }}
{{- end }}
{{- with .Values.dnsConfig }}
dnsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* What the pods of both components have in common. */ -}}
{{- define "kvlane.placement" -}}
{{ include "kvlane.podBase" .root }}
topologySpreadConstraints:
  {{- if .root.Values.topologySpreadConstraints }}
  {{- toYaml .root.Values.topologySpreadConstraints | nindent 2 }}
  {{- else }}
  {{- include "kvlane.spread" . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "kvlane.strategy" -}}
type: {{ .Values.strategy.type }}
{{- if eq .Values.strategy.type "RollingUpdate" }}
rollingUpdate:
  maxSurge: {{ .Values.strategy.maxSurge }}
  maxUnavailable: {{ .Values.strategy.maxUnavailable }}
{{- end }}
{{- end }}

{{- /* "true" if health and metrics have a Service of their own: the one in front is for clients, or for the world. */ -}}
{{- define "kvlane.adminService" -}}
{{- if or (eq .Values.mode "sidecar") (and (eq .Values.mode "gateway") (ne .Values.service.type "ClusterIP")) }}true{{ end }}
{{- end }}

{{- /* Ports of a Service of Kvlane. kubernetes.io/h2c: gateways speak HTTP/2 to it. */ -}}
{{- define "kvlane.extProcPorts" -}}
{{ include "kvlane.extProcPort" . }}
{{ include "kvlane.probePorts" . }}
{{- end }}

{{- define "kvlane.extProcPort" -}}
- {name: grpc-ext-proc, port: {{ .Values.extProcPort }}, targetPort: grpc-ext-proc, protocol: TCP, appProtocol: kubernetes.io/h2c}
{{- end }}

{{- define "kvlane.probePorts" -}}
- {name: grpc-health, port: {{ .Values.grpcHealthPort }}, targetPort: grpc-health, protocol: TCP, appProtocol: kubernetes.io/h2c}
- {name: http-metrics, port: {{ .Values.metricsPort }}, targetPort: http-metrics, protocol: TCP, appProtocol: http}
{{- end }}
