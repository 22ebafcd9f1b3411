{{- define "kvlane.ownImage" -}}
{{- include "kvlane.image" (merge (dict "tag" (default .Chart.AppVersion .Values.image.tag) "global" .Values.global) .Values.image) }}
{{- end }}

{{- /* The container of Kvlane. */ -}}
{{- define "kvlane.container" -}}
- name: kvlane
  image: {{ include "kvlane.ownImage" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args:
  - serve
  - --config=/etc/kvlane/kvlane.yaml
  {{- range .Values.extraArgs }}
  - {{ . | quote }}
  {{- end }}
  env:
  - name: POD_NAME
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
  - name: POD_NAMESPACE
    valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
  {{- if and (dig "limits" "memory" "" .Values.resources) (not (has "GOMEMLIMIT" (include "kvlane.envNames" . | fromYamlArray))) }}
  - name: GOMEMLIMIT # the garbage collector works harder before the kernel kills
    {{- with include "kvlane.heapLimit" .Values.resources.limits.memory }}
    value: {{ . | quote }}
    {{- else }}
    valueFrom: {resourceFieldRef: {resource: limits.memory}}
    {{- end }}
  {{- end }}
  {{- if include "kvlane.hub" . }}
  {{- $given := include "kvlane.envNames" . | fromYamlArray }}
  {{- if not (has "HF_HOME" $given) }}
  - {name: HF_HOME, value: /var/lib/kvlane-hub}
  {{- end }}
  {{- if and .Values.modelHub.endpoint (not (has "HF_ENDPOINT" $given)) }}
  - {name: HF_ENDPOINT, value: {{ .Values.modelHub.endpoint | quote }}}
  {{- end }}
  {{- if and .Values.modelHub.tokenSecretName (not (has "HF_TOKEN" $given)) }}
  - name: HF_TOKEN
    valueFrom: {secretKeyRef: {name: {{ .Values.modelHub.tokenSecretName | quote }}, key: {{ .Values.modelHub.tokenSecretKey | quote }}}}
  {{- end }}
  {{- end }}
  {{- with .Values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  ports:
  {{- if ne .Values.mode "sidecar" }}
  - {name: grpc-ext-proc, containerPort: {{ .Values.extProcPort }}, protocol: TCP}
  {{- end }}
  - {name: grpc-health, containerPort: {{ .Values.grpcHealthPort }}, protocol: TCP}
  - {name: http-metrics, containerPort: {{ .Values.metricsPort }}, protocol: TCP}
  {{- if eq (include "kvlane.fleet" .) "embedded" }}
  - {name: tcp-fleet, containerPort: {{ .Values.fleet.port }}, protocol: TCP}
  {{- end }}
  {{- with .Values.extraContainerPorts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  startupProbe: # tokenizers are loaded before the health port is open
    {{- include "kvlane.probe" (dict "root" . "service" "liveness" "path" "/healthz") | nindent 4 }}
    periodSeconds: 1
    failureThreshold: {{ .Values.probes.startupSeconds }}
  livenessProbe:
    {{- include "kvlane.probe" (dict "root" . "service" "liveness" "path" "/healthz") | nindent 4 }}
    periodSeconds: {{ .Values.probes.livenessPeriodSeconds }}
    timeoutSeconds: 3
    failureThreshold: 3
  readinessProbe: # pools known, workers checked, feeds caught up; at once false when draining
    {{- include "kvlane.probe" (dict "root" . "service" "readiness" "path" "/readyz") | nindent 4 }}
    periodSeconds: {{ .Values.probes.readinessPeriodSeconds }}
    timeoutSeconds: 2
    failureThreshold: 2
  {{- if eq .Values.mode "sidecar" }}
  lifecycle: # as long as Envoy in the same pod
    preStop: {sleep: {seconds: {{ .Values.proxy.drainSeconds }}}}
  {{- end }}
  resources:
    {{- toYaml .Values.resources | nindent 4 }}
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  volumeMounts:
  - {name: config, mountPath: /etc/kvlane, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  {{- if eq .Values.mode "sidecar" }}
  - {name: socket, mountPath: /run/kvlane}
  {{- end }}
  {{- if .Values.tls.secretName }}
  - {name: tls, mountPath: /etc/kvlane-tls, readOnly: true}
  {{- end }}
  {{- if .Values.warmStart.enabled }}
  - {name: key, mountPath: /etc/kvlane-key, readOnly: true}
  {{- end }}
  {{- if include "kvlane.fleetSecret" . }}
  - {name: fleet, mountPath: /etc/kvlane-fleet, readOnly: true}
  {{- end }}
  {{- if and (include "kvlane.fleet" .) .Values.fleet.tls.secretName }}
  - {name: fleet-tls, mountPath: /etc/kvlane-fleet-tls, readOnly: true}
  {{- end }}
  {{- if and (eq (include "kvlane.fleet" .) "external") .Values.fleet.external.secretName }}
  - {name: nats, mountPath: /etc/kvlane-nats, readOnly: true}
  {{- end }}
  {{- if and (eq (include "kvlane.fleet" .) "embedded") .Values.fleet.persist.enabled }}
  - {name: store, mountPath: /var/lib/kvlane}
  {{- end }}
  {{- if include "kvlane.hub" . }}
  - {name: model-hub, mountPath: /var/lib/kvlane-hub}
  {{- end }}
  {{- range .Values.tokenizerVolumes }}
  - name: {{ .name | quote }}
    mountPath: {{ .mountPath | quote }}
    readOnly: true
    {{- with .subPath }}
    subPath: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- with .Values.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- /* Whether a tokenizer may come from a model hub; "" if not. */ -}}
{{- define "kvlane.hub" -}}
{{- $used := or .Values.modelHub.enabled .Values.modelHub.existingClaim }}
{{- range .Values.models }}{{ if hasPrefix "hf:" (default "" .tokenizer) }}{{ $used = true }}{{ end }}{{ end }}
{{- if $used }}true{{ end }}
{{- end }}

{{- /* Nine tenths of a memory limit, in bytes: what is not Go's heap needs some too. "" of a quantity in a rarer form. */ -}}
{{- define "kvlane.heapLimit" -}}
{{- with include "kvlane.bytes" . }}{{ mulf (float64 .) 0.9 | int64 }}{{ end }}
{{- end }}

{{- /* Bytes of a quantity of Kubernetes, or a size of kvlane.yaml; "" of one in a rarer form. */ -}}
{{- define "kvlane.bytes" -}}
{{- $units := dict "" 1.0 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 }}
{{- $text := kindIs "string" . | ternary . (printf "%.0f" (float64 .)) }}
{{- if regexMatch "^[0-9]+(\\.[0-9]+)? ?(B|([kMGT]|[KMGT]i)B?)?$" $text }}
{{- mulf (regexFind "^[0-9.]+" $text | float64) (get $units (regexFind "[a-zA-Z]*$" $text | trimSuffix "B")) | int64 }}
{{- end }}
{{- end }}

{{- /* Names in `env`, a list. */ -}}
{{- define "kvlane.envNames" -}}
{{- $names := list }}
{{- range .Values.env }}{{ $names = append $names .name }}{{ end }}
{{- toYaml $names }}
{{- end }}

{{- define "kvlane.probe" -}}
{{- if eq .root.Values.probes.type "grpc" -}}
grpc: {port: {{ .root.Values.grpcHealthPort }}, service: {{ .service }}}
{{- else -}}
httpGet: {port: http-metrics, path: {{ .path }}}
{{- end }}
{{- end }}

{{- define "kvlane.volumes" -}}
- name: config
  configMap: {name: {{ include "kvlane.fullname" . | quote }}}
- name: tmp
  {{- if or .Values.warmStart.enabled (dig "index" "peers" "addresses" list .Values.config) }}
  emptyDir: {} # a copy of the index is written there before another replica gets it
  {{- else }}
  emptyDir: {medium: Memory, sizeLimit: 64Mi}
  {{- end }}
{{- if eq .Values.mode "sidecar" }}
- name: socket
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end }}
{{- if .Values.warmStart.enabled }}
- name: key
  secret: {secretName: {{ .Values.warmStart.secretName | quote }}, defaultMode: 0440, items: [{key: key, path: key}]}
{{- end }}
{{- if .Values.tls.secretName }}
- name: tls
  secret: {secretName: {{ .Values.tls.secretName | quote }}, defaultMode: 0440}
{{- end }}
{{- with include "kvlane.fleetSecret" . }}
- name: fleet
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- if and (include "kvlane.fleet" .) .Values.fleet.tls.secretName }}
- name: fleet-tls
  secret: {secretName: {{ .Values.fleet.tls.secretName | quote }}, defaultMode: 0440}
{{- end }}
{{- if and (eq (include "kvlane.fleet" .) "external") .Values.fleet.external.secretName }}
- name: nats
  secret: {secretName: {{ .Values.fleet.external.secretName | quote }}, defaultMode: 0440}
{{- end }}
{{- if and (eq (include "kvlane.fleet" .) "embedded") .Values.fleet.persist.enabled }}
- name: store
  {{- toYaml .Values.fleet.persist.volume | nindent 2 }}
{{- end }}
{{- if include "kvlane.hub" . }}
- name: model-hub
  {{- with .Values.modelHub.existingClaim }}
  persistentVolumeClaim: {claimName: {{ . | quote }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.modelHub.sizeLimit | quote }}}
  {{- end }}
{{- end }}
{{- range .Values.tokenizerVolumes }}
- {{ omit . "mountPath" "subPath" | toYaml | nindent 2 | trim }}
{{- end }}
{{- with .Values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}
