{{- /* The container of Envoy. */ -}}
{{- define "kvlane.envoyContainer" -}}
- name: envoy
  image: {{ include "kvlane.image" (merge (dict "global" .Values.global) .Values.proxy.image) | quote }}
  imagePullPolicy: {{ .Values.proxy.image.pullPolicy }}
  command: [/usr/local/bin/envoy]
  args:
  - --config-path
  - /etc/envoy/envoy.yaml
  - --disable-hot-restart # needs shared memory, and pods are replaced instead
  {{- if .Values.proxy.concurrency }}
  - --concurrency
  - {{ .Values.proxy.concurrency | quote }}
  {{- end }}
  {{- range .Values.proxy.extraArgs }}
  - {{ . | quote }}
  {{- end }}
  ports:
  - {name: http, containerPort: {{ .Values.proxy.port }}, protocol: TCP}
  {{- if eq .Values.mode "standalone" }}
  - {name: readiness, containerPort: {{ .Values.proxy.readinessPort }}, protocol: TCP}
  {{- end }}
  {{- if .Values.monitoring.envoy.enabled }}
  - {name: envoy-metrics, containerPort: {{ .Values.monitoring.envoy.port }}, protocol: TCP}
  {{- end }}
  # Envoy opens the port once the clusters are there. Its admin page, which could stop it, is not reachable from outside.
  startupProbe:
    tcpSocket: {port: http}
    periodSeconds: 1
    failureThreshold: 120
  readinessProbe:
    {{- if eq .Values.mode "standalone" }}
    httpGet: {port: readiness, path: /ready} # model servers are known, so pods that know them stay until this one does too
    {{- else }}
    tcpSocket: {port: http} # Kvlane's own readiness counts as well
    {{- end }}
    periodSeconds: {{ .Values.probes.readinessPeriodSeconds }}
  livenessProbe:
    tcpSocket: {port: http}
    periodSeconds: {{ .Values.probes.livenessPeriodSeconds }}
    failureThreshold: 6
  lifecycle: # Envoy ends at once on SIGTERM; until then the pod has left the Service and running answers end
    preStop: {sleep: {seconds: {{ .Values.proxy.drainSeconds }}}}
  resources:
    {{- toYaml .Values.proxy.resources | nindent 4 }}
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  volumeMounts:
  - {name: envoy, mountPath: /etc/envoy, readOnly: true}
  {{- if .Values.tls.clientSecretName }}
  - {name: tls, mountPath: /etc/kvlane-tls, readOnly: true}
  {{- end }}
  {{- if eq .Values.mode "sidecar" }}
  - {name: socket, mountPath: /run/kvlane}
  {{- end }}
{{- end }}
