{{- /* kvlane.yaml: what the chart derives, over the further keys of `config`. */ -}}
{{- define "kvlane.config" -}}
{{- $v := .Values }}
{{- $listen := dict "address" (printf ":%d" (int64 $v.extProcPort)) "health" (printf ":%d" (int64 $v.grpcHealthPort)) }}
{{- if eq $v.mode "sidecar" }}
{{- $_ := set $listen "address" (include "kvlane.socket" .) }}
{{- else if $v.tls.secretName }}
{{- $_ := set $listen "cert_file" "/etc/kvlane-tls/tls.crt" }}
{{- $_ := set $listen "key_file" "/etc/kvlane-tls/tls.key" }}
{{- if $v.tls.requireClients }}
{{- $_ := set $listen "client_ca_file" "/etc/kvlane-tls/ca.crt" }}
{{- end }}
{{- end }}
{{- $worker := deepCopy $v.modelServers.worker }}
{{- $_ := set $worker "engine" $v.modelServers.type }}
{{- if $v.modelServers.ranks }}
{{- $_ := set $worker "ranks" (int64 $v.modelServers.ranks) }}
{{- end }}
{{- $events := dict }}
{{- range $key := list "endpoint" "replay" "topic" }}
{{- with get $v.modelServers.kvEvents $key }}{{ $_ := set $events $key . }}{{ end }}
{{- end }}
{{- if $events }}
{{- $_ := set $worker "events" $events }}
{{- end }}
{{- $kubernetes := dict "namespace" (include "kvlane.modelNamespace" .) "worker" $worker }}
{{- $pools := $v.inferencePool.extraPools }}
{{- with include "kvlane.pool" . }}{{ $pools = prepend $pools . }}{{ end }}
{{- if $pools }}
{{- $_ := set $kubernetes "pools" $pools }}
{{- else }}
{{- $ports := list }}
{{- range $v.modelServers.targetPorts }}{{ $ports = append $ports (int64 .number) }}{{ end }}
{{- $_ := set $kubernetes "selector" $v.modelServers.matchLabels }}
{{- $_ := set $kubernetes "ports" $ports }}
{{- end }}
{{- if $v.modelServers.rankPerPort }}{{ $_ := set $kubernetes "rank_per_port" true }}{{ end }}
{{- with $v.inferencePool.objectives }}{{ $_ := set $kubernetes "objectives" . }}{{ end }}
{{- if $v.modelServers.neverAsk }}{{ $_ := set $kubernetes "never_ask" true }}{{ end }}
{{- with $v.modelServers.roleLabels }}{{ $_ := set $kubernetes "role_labels" . }}{{ end }}
{{- $drain := include "kvlane.drain" . | int64 }}
{{- if eq $v.mode "sidecar" }}{{ $drain = add $v.drainQuietSeconds 5 }}{{ end }}
{{- $c := deepCopy $v.config }}
{{- $_ := set $c "listen" $listen }}
{{- $_ := set $c "admin" (dict "address" (printf ":%d" (int64 $v.metricsPort))) }}
{{- $_ := set $c "drain" (printf "%ds" (int64 $drain)) }}
{{- $_ := set $c "drain_quiet" (printf "%ds" (int64 $v.drainQuietSeconds)) }}
{{- $_ := set $c "limits" (set (default dict $c.limits) "max_body" (int64 $v.maxBodyBytes)) }}
{{- $_ := set $c "workers" (set (default dict $c.workers) "kubernetes" $kubernetes) }}
{{- if $v.warmStart.enabled }}
{{- $peers := dict "addresses" (list (printf "%s-replicas.%s.svc.%s:%d" (include "kvlane.fullname" .) .Release.Namespace $v.clusterDomain (int64 $v.extProcPort))) "timeout" (printf "%ds" (int64 $v.warmStart.timeoutSeconds)) }}
{{- with $v.warmStart.serverName }}
{{- $_ := set $peers "ca_file" "/etc/kvlane-tls/ca.crt" }}
{{- $_ := set $peers "server_name" . }}
{{- end }}
{{- $_ := set $c "index" (merge (dict "key_file" "/etc/kvlane-key/key" "peers" $peers) (default dict $c.index)) }}
{{- end }}
{{- if include "kvlane.fleetKey" . }}
{{- $_ := set $c "index" (merge (dict "key_file" "/etc/kvlane-fleet/key") (default dict $c.index)) }}
{{- end }}
{{- with include "kvlane.fleet" . }}
{{- $fleet := dict "mode" . "name" (default (printf "%s-%s" $.Release.Namespace (include "kvlane.fullname" $)) $v.fleet.name) }}
{{- $tls := dict }}
{{- if $v.fleet.tls.secretName }}
{{- $_ := set $tls "ca_file" "/etc/kvlane-fleet-tls/ca.crt" }}
{{- if or (eq . "embedded") $v.fleet.external.clientCertificate }}
{{- $_ := set $tls "cert_file" "/etc/kvlane-fleet-tls/tls.crt" }}
{{- $_ := set $tls "key_file" "/etc/kvlane-fleet-tls/tls.key" }}
{{- end }}
{{- end }}
{{- $way := dict }}
{{- if eq . "embedded" }}
{{- $way = dict "listen" (printf ":%d" (int64 $v.fleet.port)) "routes" (list (printf "%s.%s.svc.%s:%d" (include "kvlane.fleetService" $) $.Release.Namespace $v.clusterDomain (int64 $v.fleet.port))) "secret_file" "/etc/kvlane-fleet/secret" }}
{{- else }}
{{- $way = dict "url" $v.fleet.external.url }}
{{- if eq $v.fleet.external.auth "credentials" }}{{ $_ := set $way "credentials_file" "/etc/kvlane-nats/nats.creds" }}
{{- else if eq $v.fleet.external.auth "token" }}{{ $_ := set $way "token_file" "/etc/kvlane-nats/token" }}
{{- else if eq $v.fleet.external.auth "password" }}
{{- $_ := set $way "user" $v.fleet.external.user }}
{{- $_ := set $way "password_file" "/etc/kvlane-nats/password" }}
{{- end }}
{{- end }}
{{- with $tls }}{{ $_ := set $way "tls" . }}{{ end }}
{{- if $v.fleet.persist.enabled }}
{{- $persist := dict "enabled" true "max_bytes" (int64 $v.fleet.persist.maxBytes) "ttl" (printf "%dh" (int64 $v.fleet.persist.ttlHours)) }}
{{- if eq . "embedded" }}{{ $_ := set $persist "folder" "/var/lib/kvlane" }}{{ end }}
{{- $_ := set $fleet "persist" $persist }}
{{- end }}
{{- $_ := set $c "fleet" (set $fleet . $way) }}
{{- end }}
{{- with $v.models }}{{ $_ := set $c "models" . }}{{ end }}
{{- if eq $v.mode "gateway" }}
{{- $envoy := dict "message_timeout" $v.messageTimeout "stall_timeout" $v.stallTimeout "fail_closed" (and (eq $v.provider.name "envoy-gateway") (include "kvlane.failOpen" (list $ $v.provider.envoyGateway.failOpen) | empty)) }}
{{- if include "kvlane.observes" . }}{{ $_ := set $envoy "first_token" true }}{{ end }}
{{- $_ := set $c "envoy" $envoy }}
{{- else }}
{{- $envoy := dict "ingress" (printf "0.0.0.0:%d" (int64 $v.proxy.port)) "admin" "127.0.0.1:9901" "message_timeout" $v.messageTimeout "stall_timeout" $v.stallTimeout "upload_timeout" $v.proxy.uploadTimeout "max_heap" (int64 $v.proxy.maxHeapBytes) }}
{{- $_ := set $envoy "connection_age" (include "kvlane.connectionAge" .) }}
{{- $_ := set $envoy "alternates" true }}
{{- $_ := set $envoy "fail_closed" (include "kvlane.failOpen" (list $ $v.proxy.failOpen) | empty) }}
{{- $_ := set $envoy "first_token" $v.proxy.firstToken }}
{{- $_ := set $envoy "access_log" (include "kvlane.accessLog" . | eq "true") }}
{{- $_ := set $envoy "request_body" $v.proxy.requestBody }}
{{- $_ := set $envoy "response_body" $v.proxy.responseBody }}
{{- with include "kvlane.prefill" . }}{{ $_ := set $envoy "prefill" . }}{{ end }}
{{- $_ := set $c "envoy" $envoy }}
{{- end }}
{{- toYaml $c }}
{{- end }}

{{- /* Envoy's form of "host:port" or "unix:/path". */ -}}
{{- define "kvlane.envoyAddress" -}}
{{- if hasPrefix "unix:" . -}}
{pipe: {path: {{ trimPrefix "unix:" . | quote }}}}
{{- else -}}
{{- $port := regexFind "[0-9]+$" . -}}
{socket_address: {address: {{ trimSuffix (printf ":%s" $port) . | quote }}, port_value: {{ $port }}}}
{{- end }}
{{- end }}

{{- /* The headers that name a tenant and that clients must not set, as in config.Tenants.Stripped. */ -}}
{{- define "kvlane.tenantHeaders" -}}
{{- $t := dig "tenants" (dict) .Values.config }}
{{- with $t.salt_header }}
{{- if not $t.trust_ingress }}
- {{ . }}
{{- end }}
- x-cache-salt
{{- end }}
{{- if and $t.header (ne $t.header (default "" $t.salt_header)) (not $t.trust_ingress) }}
- {{ $t.header }}
{{- end }}
{{- end }}

{{- /* Envoy's bootstrap: the arguments of "kvlane.bootstrap" as package envoy makes them. */ -}}
{{- /* Regular expression of proxy.paths; empty for every path. */ -}}
{{- define "kvlane.paths" -}}
{{- $paths := list }}
{{- range .Values.proxy.paths }}{{ $paths = eq . "default" | ternary (concat $paths (include "kvlane.inferencePaths" $ | fromYamlArray)) (append $paths .) }}{{ end }}
{{- if not (has "/*" $paths) }}
{{- range $i, $p := $paths }}{{ if $i }}|{{ end }}{{ trimSuffix "*" $p | regexQuoteMeta }}{{ if hasSuffix "*" $p }}.*{{ end }}{{ end }}
{{- end }}
{{- end }}

{{- define "kvlane.envoyConfig" -}}
{{- $p := .Values.proxy }}
{{- $duplex := eq $p.requestBody "FULL_DUPLEX_STREAMED" }}
{{- $clusters := list (dict "Name" "model_servers" "FailClosed" (include "kvlane.failOpen" (list . $p.failOpen) | empty)) }}
{{- $prefill := include "kvlane.prefill" . }}
{{- if $prefill }}{{ $clusters = append $clusters (dict "Name" "prefill_servers" "FailClosed" true) }}{{ end }}
{{- $kvlane := include "kvlane.socket" . }}
{{- if eq .Values.mode "standalone" }}
{{- $kvlane = printf "%s:%d" (include "kvlane.extProcHost" .) (int64 .Values.extProcPort) }}
{{- end }}
{{- include "kvlane.bootstrap" (dict
  "Ingress" (printf "0.0.0.0:%d" (int64 $p.port))
  "Admin" "127.0.0.1:9901"
  "Kvlane" $kvlane
  "ByName" (eq .Values.mode "standalone")
  "Replicas" (eq .Values.mode "standalone")
  "HashReplicas" (and (eq .Values.mode "standalone") (or $p.firstToken (include "kvlane.fleet" .)))
  "Conversations" (include "kvlane.conversations" . | fromYamlArray)
  "Readiness" (ternary (printf "0.0.0.0:%d" (int64 $p.readinessPort)) "" (eq .Values.mode "standalone"))
  "Metrics" (ternary (printf "0.0.0.0:%d" (int64 .Values.monitoring.envoy.port)) "" .Values.monitoring.envoy.enabled)
  "Prefill" $prefill
  "Paths" (include "kvlane.paths" .)
  "MaxBody" (int64 .Values.maxBodyBytes)
  "MessageTimeout" .Values.messageTimeout
  "StallTimeout" (ternary .Values.stallTimeout .Values.messageTimeout (lt (include "kvlane.milliseconds" .Values.stallTimeout | float64) (include "kvlane.milliseconds" .Values.messageTimeout | float64)))
  "RequestTimeout" (printf "%ds" (add (trimSuffix "s" $p.uploadTimeout) (ternary (trimSuffix "s" .Values.messageTimeout) "0" (eq (include "kvlane.holds" .) "true"))))
  "MaxHeap" (int64 $p.maxHeapBytes)
  "ConnectionAge" (include "kvlane.connectionAge" .)
  "CertFile" (ternary "/etc/kvlane-tls/tls.crt" "" (ne .Values.tls.clientSecretName ""))
  "KeyFile" "/etc/kvlane-tls/tls.key"
  "CAFile" "/etc/kvlane-tls/ca.crt"
  "ServerName" .Values.tls.serverName
  "FirstToken" $p.firstToken
  "AccessLog" (include "kvlane.accessLog" .)
  "RequestBody" $p.requestBody
  "ResponseBody" $p.responseBody
  "ModeOverride" (eq (dig "disagg" "usage" "" .Values.config) "prefill")
  "Retries" (not $duplex)
  "StripHeaders" (concat (include "kvlane.stripHeaders" . | fromYamlArray) (include "kvlane.tenantHeaders" . | fromYamlArray))
  "Clusters" $clusters) }}
{{- end }}
