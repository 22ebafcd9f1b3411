{{- /* Combinations that the schema cannot see and that would not work. */ -}}
{{- define "kvlane.refuse" -}}
{{- $v := .Values }}
{{- $gateway := eq $v.mode "gateway" }}
{{- $pool := include "kvlane.pool" . }}
{{- $service := include "kvlane.routesToService" . }}

{{- range $key := list "listen" "admin" "envoy" "drain" "drain_quiet" "models" "fleet" }}
{{- if hasKey $v.config $key }}
{{- fail (printf "config.%s: the chart writes this key itself; use the values for ports, drainSeconds, drainQuietSeconds, models, messageTimeout, proxy and fleet" $key) }}
{{- end }}
{{- end }}
{{- if hasKey (default dict $v.config.limits) "max_body" }}
{{- fail "config.limits.max_body: use maxBodyBytes, which also sets the limit of Envoy" }}
{{- end }}
{{- if hasKey (default dict $v.config.workers) "kubernetes" }}
{{- fail "config.workers.kubernetes: the chart writes this key itself; use modelServers and inferencePool" }}
{{- end }}
{{- if $v.warmStart.enabled }}
{{- if eq $v.mode "sidecar" }}
{{- fail "warmStart.enabled: not in mode sidecar, where Kvlane serves on a socket that other pods do not reach" }}
{{- end }}
{{- if not $v.warmStart.secretName }}
{{- fail "warmStart.secretName: required with warmStart.enabled" }}
{{- end }}
{{- if and $v.warmStart.serverName (not $v.tls.secretName) }}
{{- fail "warmStart.serverName: needs tls.secretName, with ca.crt" }}
{{- end }}
{{- range $key := list "key" "key_file" "peers" }}
{{- if hasKey (default dict $v.config.index) $key }}
{{- fail (printf "config.index.%s: the chart writes this key itself with warmStart.enabled" $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (eq (include "kvlane.fleet" .) "embedded") $v.fleet.persist.enabled (not $v.fleet.persist.volume) }}
{{- fail "fleet.persist.volume: required with fleet.persist.enabled and mode embedded" }}
{{- end }}
{{- if eq (include "kvlane.fleet" .) "external" }}
{{- $external := $v.fleet.external }}
{{- if not $external.url }}
{{- fail "fleet.external.url: required with fleet.mode external" }}
{{- end }}
{{- if ne (eq $external.auth "none") (empty $external.secretName) }}
{{- fail "fleet.external: auth and secretName go together" }}
{{- end }}
{{- if ne (eq $external.auth "password") (not (empty $external.user)) }}
{{- fail "fleet.external: user goes with auth password" }}
{{- end }}
{{- if and $external.clientCertificate (not $v.fleet.tls.secretName) }}
{{- fail "fleet.external.clientCertificate: needs fleet.tls.secretName" }}
{{- end }}
{{- end }}
{{- if hasKey $v.modelServers.worker "engine" }}{{ fail "modelServers.worker.engine: use modelServers.type" }}{{ end }}
{{- if hasKey $v.modelServers.worker "ranks" }}{{ fail "modelServers.worker.ranks: use modelServers.ranks" }}{{ end }}
{{- if hasKey $v.modelServers.worker "events" }}{{ fail "modelServers.worker.events: use modelServers.kvEvents" }}{{ end }}
{{- if and (eq $v.mode "sidecar") (include "kvlane.pushed" .) }}
{{- fail "modelServers.kvEvents.endpoint push: not in mode sidecar, where Kvlane serves on a socket that engines do not reach; give the engines' own endpoint" }}
{{- end }}
{{- $ranks := int64 $v.modelServers.ranks }}
{{- $events := $v.modelServers.kvEvents }}
{{- if and $events.replay (not $events.endpoint) }}
{{- fail "modelServers.kvEvents.replay: needs modelServers.kvEvents.endpoint" }}
{{- end }}
{{- $tcp := "^tcp://(.+):([0-9]+)$" }}
{{- if and (regexMatch $tcp $events.endpoint) (regexMatch $tcp $events.replay) }}
{{- $first := regexReplaceAll $tcp $events.endpoint "${2}" | int64 }}
{{- $other := regexReplaceAll $tcp $events.replay "${2}" | int64 }}
{{- $span := max 1 $ranks | int64 }}
{{- $same := eq (regexReplaceAll $tcp $events.endpoint "${1}") (regexReplaceAll $tcp $events.replay "${1}") }}
{{- if and $same (lt $first (add $other $span)) (lt $other (add $first $span)) }}
{{- fail (printf "modelServers.kvEvents.replay: each rank has a port, and the %d from %d on meet those of endpoint, from %d on" $span $other $first) }}
{{- end }}
{{- end }}
{{- if eq (default "" $v.modelServers.worker.rank_by) "port" }}
{{- if and (lt $ranks 1) (not $v.modelServers.rankPerPort) }}
{{- fail "modelServers.worker.rank_by port: needs modelServers.ranks" }}
{{- end }}
{{- range $i, $a := $v.modelServers.targetPorts }}
{{- range $j, $b := $v.modelServers.targetPorts }}
{{- if and (ne $i $j) (le (int64 $a.number) (int64 $b.number)) (lt (int64 $b.number) (add (int64 $a.number) $ranks)) }}
{{- fail (printf "modelServers.targetPorts: with rank_by port the %d ranks of port %d have the ports up to %d, and %d is one of them" $ranks (int64 $a.number) (sub (add (int64 $a.number) $ranks) 1) (int64 $b.number)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- range $key := list "securityContext" "podSecurityContext" }}
{{- if not (kindIs "map" (get $v $key)) }}
{{- fail (printf "%s: must not be null; {} is none" $key) }}
{{- end }}
{{- end }}
{{- if and $v.monitoring.rules.enabled (not $v.monitoring.prometheus.enabled) (not $v.monitoring.rules.job) }}
{{- fail "monitoring.rules: without monitoring.prometheus.enabled say in monitoring.rules.job which label job the series have; else KvlaneAbsent would fire for ever" }}
{{- end }}
{{- if hasKey $v.modelServers.worker "address" }}{{ fail "modelServers.worker.address: it is filled in from each pod" }}{{ end }}

{{- if and (not $gateway) (include "kvlane.createPool" .) }}
{{- fail (printf "inferencePool.create: not in mode %s, where Envoy is the chart's own and needs no pool; set it to false or use mode gateway" $v.mode) }}
{{- end }}
{{- if and (not $gateway) (ne $v.provider.name "none") }}
{{- fail (printf "provider.name %s: only in mode gateway; in mode %s the chart brings its own Envoy" $v.provider.name $v.mode) }}
{{- end }}
{{- if and $v.provider.istio.envoyFilter.enabled (ne $v.provider.name "istio") }}
{{- fail (printf "provider.istio.envoyFilter.enabled: of provider.name %s nothing of Istio's is made; set provider.name to istio" $v.provider.name) }}
{{- end }}
{{- if and $service (include "kvlane.createPool" .) }}
{{- fail "inferencePool.create: this provider routes to the Service of the model servers, not to an InferencePool; leave it null or false" }}
{{- end }}
{{- if and $gateway (not $service) (not $pool) }}
{{- fail "inferencePool: mode gateway needs a pool; let the chart create one, or name one that exists in inferencePool.name" }}
{{- end }}
{{- with $v.inferencePool.extraPools }}
{{- if or (not $gateway) $service }}
{{- fail "inferencePool.extraPools: only where a gateway routes to InferencePools; what tells a request's pool is the Service through which the gateway asks, and here there is one way for all" }}
{{- end }}
{{- if has $pool . }}
{{- fail (printf "inferencePool.extraPools: %s is the first pool already" $pool) }}
{{- end }}
{{- end }}
{{- if and (include "kvlane.createPool" .) (not $v.modelServers.matchLabels) }}
{{- fail "modelServers.matchLabels: required, an InferencePool selects its pods by labels" }}
{{- end }}
{{- if and (not $pool) (not $v.modelServers.matchLabels) }}
{{- fail "modelServers.matchLabels: required where no InferencePool selects the pods" }}
{{- end }}
{{- if and $service (not $v.modelServers.service.name) (not (include "kvlane.createModelService" .)) }}
{{- fail "modelServers.service: this provider routes to a Service of the model servers; name one that exists, or leave create null" }}
{{- end }}
{{- if include "kvlane.createModelService" . }}
{{- $name := include "kvlane.modelService" . }}
{{- $full := include "kvlane.fullname" . }}
{{- $ours := list $full (printf "%s-admin" $full) (printf "%s-extproc" $full) (printf "%s-replicas" $full) (include "kvlane.fleetService" .) }}
{{- range $v.inferencePool.extraPools }}{{ $ours = append $ours (include "kvlane.poolService" (dict "root" $ "pool" .)) }}{{ end }}
{{- if has $name $ours }}
{{- fail (printf "modelServers.service.name: %s is the name of a Service of Kvlane's own" $name) }}
{{- end }}
{{- end }}
{{- if and (include "kvlane.createModelService" .) (not $v.modelServers.matchLabels) }}
{{- fail "modelServers.matchLabels: required for the Service of the model servers; or name one that exists in modelServers.service.name" }}
{{- end }}
{{- if and (or $pool $service) (ne (include "kvlane.modelNamespace" .) .Release.Namespace) }}
{{- fail "modelServers.namespace: an InferencePool, its pods and its picker share one namespace, and so do a gateway's Service and its policies; install the chart there" }}
{{- end }}
{{- if and (not $gateway) (eq $v.modelServers.protocol "h2c") }}
{{- fail "modelServers.protocol h2c: the chart's Envoy speaks HTTP/1.1 to model servers" }}
{{- end }}
{{- if and $v.modelServers.rankPerPort $v.modelServers.ranks }}
{{- fail "modelServers.rankPerPort and modelServers.ranks: with a port for each rank their number is that of targetPorts; leave ranks at 0" }}
{{- end }}
{{- if and $v.modelServers.rankPerPort (eq (len $v.modelServers.targetPorts) 1) (or (not $pool) (include "kvlane.createPool" .)) }}
{{- fail "modelServers.rankPerPort: needs a targetPort for each rank, and there is one" }}
{{- end }}

{{- if and $v.httpRoute.create (not $v.httpRoute.inferenceGatewayName) }}
{{- fail "httpRoute.inferenceGatewayName: required with httpRoute.create" }}
{{- end }}
{{- if $service }}
{{- if eq $v.provider.name "envoy-gateway" }}
{{- if $pool }}
{{- fail "inferencePool.name: provider envoy-gateway routes to a Service and cannot say for which pool it asks, so that Kvlane would refuse its requests; leave the name empty and give the pods' labels in modelServers.matchLabels" }}
{{- end }}
{{- if not $v.httpRoute.create }}
{{- fail "httpRoute.create: provider envoy-gateway needs it, its policies are attached to the route" }}
{{- end }}
{{- if and $v.provider.envoyGateway.failOpen (eq $v.provider.envoyGateway.requestBody "FullDuplexStreamed") }}
{{- fail "provider.envoyGateway.failOpen: Envoy Gateway refuses it with requestBody FullDuplexStreamed; set one of them otherwise" }}
{{- end }}
{{- $namespace := default .Release.Namespace $v.httpRoute.inferenceGatewayNamespace }}
{{- if and $v.provider.envoyGateway.clientTrafficPolicy (ne $namespace .Release.Namespace) }}
{{- fail "provider.envoyGateway.clientTrafficPolicy: the Gateway is in another namespace, where the policy has to be; set it to false and put the policy there" }}
{{- end }}
{{- else if gt (len $v.modelServers.targetPorts) 1 }}
{{- fail "modelServers.targetPorts: with an EnvoyFilter one; of a route to several ports Istio makes several clusters and draws one before the pick, which is then followed only by chance. Use an InferencePool" }}
{{- else if not (or $v.provider.istio.envoyFilter.workloadSelector $v.httpRoute.inferenceGatewayName) }}
{{- fail "provider.istio.envoyFilter.workloadSelector: required unless httpRoute.inferenceGatewayName names the gateway" }}
{{- end }}
{{- end }}
{{- with $v.tls.certManager }}
{{- if and .enabled (not (and $v.tls.secretName .issuerRef.name)) }}
{{- fail "tls.certManager: needs tls.secretName, which it fills, and issuerRef.name" }}
{{- end }}
{{- end }}
{{- with $v.modelServers.scaledObject }}
{{- if and .enabled (not (and .targetName .model .serverAddress)) }}
{{- fail "modelServers.scaledObject: needs targetName, model and serverAddress" }}
{{- end }}
{{- if and .enabled (le (dig "flow" "max_requests" 0 $v.config | int64) 0) }}
{{- fail "modelServers.scaledObject: scales by the queue; set config.flow.max_requests above 0" }}
{{- end }}
{{- if and .enabled (eq (int64 .minReplicas) 0) (le (include "kvlane.milliseconds" (dig "flow" "zero_workers" "0s" $v.config) | float64) 0.0) }}
{{- fail "modelServers.scaledObject.minReplicas 0: without config.flow.zero_workers requests are refused, not kept, while there is no pod" }}
{{- end }}
{{- end }}
{{- if and $v.proxy.autoscaling.enabled (ne $v.mode "standalone") }}
{{- fail (printf "proxy.autoscaling.enabled: in mode %s Envoy has no Deployment of its own; use autoscaling" $v.mode) }}
{{- end }}
{{- if and $v.tls.requireClients (not $v.tls.secretName) }}
{{- fail "tls.requireClients: needs tls.secretName, with ca.crt" }}
{{- end }}
{{- if and $v.tls.requireClients (eq $v.mode "standalone") (not (and $v.tls.clientSecretName $v.tls.serverName)) }}
{{- fail "tls.requireClients: in mode standalone Envoy needs tls.clientSecretName and tls.serverName" }}
{{- end }}
{{- if and $v.tls.requireClients $v.warmStart.enabled (not $v.warmStart.serverName) }}
{{- fail "tls.requireClients: replicas need warmStart.serverName to reach each other over TLS" }}
{{- end }}
{{- if and $v.tls.clientSecretName (not (and (eq $v.mode "standalone") $v.tls.secretName $v.tls.serverName)) }}
{{- fail "tls.clientSecretName: is for mode standalone, with tls.secretName and tls.serverName" }}
{{- end }}
{{- if and $v.tls.secretName (eq $v.mode "sidecar") }}
{{- fail "tls.secretName: in mode sidecar ext_proc is a Unix socket, without TLS" }}
{{- end }}
{{- if and $gateway $v.monitoring.envoy.enabled }}
{{- fail "monitoring.envoy.enabled: not in mode gateway, where Envoy is not the chart's" }}
{{- end }}
{{- $index := dig "index" "max_bytes" "1GiB" $v.config }}
{{- $limit := dig "limits" "memory" "" $v.resources }}
{{- if gt (include "kvlane.bytes" $index | int64) (include "kvlane.bytes" $limit | default "9223372036854775807" | int64) }}
{{- fail (printf "resources.limits.memory %v: config.index.max_bytes may grow to %v, and the kernel would kill Kvlane; make one smaller or the other larger" $limit $index) }}
{{- end }}
{{- range $key, $own := dict "" (ternary (list "kvlane" "envoy") (list "kvlane") (eq $v.mode "sidecar")) "proxy." (list "envoy") }}
{{- $of := ternary $v $v.proxy (eq $key "") }}
{{- range concat $of.initContainers $of.extraContainers }}
{{- if has .name $own }}{{ fail (printf "%sinitContainers and %sextraContainers: the name %s is taken" $key $key .name) }}{{ end }}
{{- $own = append $own .name }}
{{- end }}
{{- end }}
{{- if and (ne $v.mode "standalone") (or $v.proxy.initContainers $v.proxy.extraContainers) }}
{{- fail (printf "proxy.initContainers and proxy.extraContainers: in mode %s Envoy has no pod of its own; use initContainers and extraContainers" $v.mode) }}
{{- end }}
{{- if and (not $gateway) (lt (int64 $v.proxy.port) 1024) }}
{{- fail "proxy.port: below 1024 needs a right that the container does not have; service.port may be 80" }}
{{- end }}
{{- $ports := list $v.grpcHealthPort $v.metricsPort }}
{{- if ne $v.mode "sidecar" }}{{ $ports = append $ports $v.extProcPort }}{{ end }}
{{- if not $gateway }}{{ $ports = concat $ports (list $v.proxy.port 9901) }}{{ end }}
{{- if eq $v.mode "standalone" }}{{ $ports = append $ports $v.proxy.readinessPort }}{{ end }}
{{- if $v.monitoring.envoy.enabled }}{{ $ports = append $ports $v.monitoring.envoy.port }}{{ end }}
{{- if eq (include "kvlane.fleet" .) "embedded" }}{{ $ports = append $ports $v.fleet.port }}{{ end }}
{{- $numbers := list }}{{- /* of one type: of a file they are not what they are of --set */ -}}
{{- range $ports }}
{{- if lt (int64 .) 1024 }}{{ fail (printf "port %d: below 1024 needs a right that the containers do not have" (int64 .)) }}{{ end }}
{{- $numbers = append $numbers (int64 .) }}
{{- end }}
{{- if ne (len $numbers) (len ($numbers | uniq)) }}
{{- fail "ports: extProcPort, grpcHealthPort, metricsPort, fleet.port and, where the chart brings Envoy, proxy.port, proxy.readinessPort, monitoring.envoy.port and 9901 must differ" }}
{{- end }}

{{- if regexMatch "^[0-9]" (include "kvlane.fullname" .) }}
{{- fail (printf "release name %s: names of Services begin with a letter; set fullnameOverride" .Release.Name) }}
{{- end }}

{{- $wait := dig "routing" "wait" dict $v.config | default dict }}
{{- $message := include "kvlane.milliseconds" $v.messageTimeout | float64 }}
{{- if gt (int64 (default 0 $wait.max_requests)) 0 }}
{{- if ge (include "kvlane.milliseconds" (default "10s" $wait.timeout) | float64) $message }}
{{- fail (printf "config.routing.wait.timeout: must be shorter than messageTimeout (%s), after which Envoy waits no more" $v.messageTimeout) }}
{{- end }}
{{- end }}
{{- $flow := default dict $v.config.flow }}
{{- if gt (int64 (default 0 $flow.max_requests)) 0 }}
{{- $waits := list (default "30s" $flow.timeout) (default "0s" $flow.zero_workers) }}
{{- range $flow.bands }}
{{- $waits = append $waits (default "0s" .timeout) }}
{{- end }}
{{- range $waits }}
{{- if ge (include "kvlane.milliseconds" . | float64) $message }}
{{- fail (printf "config.flow: a wait of %s must be shorter than messageTimeout (%s), after which Envoy waits no more" . $v.messageTimeout) }}
{{- end }}
{{- end }}
{{- end }}
{{- $disagg := default dict $v.config.disagg }}
{{- if $disagg.connector }}
{{- $timeout := default "2m" $disagg.timeout }}
{{- $attempts := default 2 $disagg.attempts | int64 }}
{{- if gt (mulf (include "kvlane.milliseconds" $timeout | float64) $attempts) $message }}
{{- fail (printf "messageTimeout %s: prefill legs may take longer, config.disagg.attempts (%d) times config.disagg.timeout (%s)" $v.messageTimeout $attempts $timeout) }}
{{- end }}
{{- end }}

{{- if $v.terminationGracePeriodSeconds }}
{{- $needed := include "kvlane.neededGrace" . | int64 }}
{{- if lt (int64 $v.terminationGracePeriodSeconds) $needed }}
{{- fail (printf "terminationGracePeriodSeconds %d: the pod would be killed while it drains; it needs %d (or null), or smaller drainSeconds" (int64 $v.terminationGracePeriodSeconds) $needed) }}
{{- end }}
{{- end }}
{{- if and (ne $v.mode "sidecar") (le (include "kvlane.drain" . | int64) (int64 $v.drainQuietSeconds)) }}
{{- fail "drainQuietSeconds: must be less than drainSeconds" }}
{{- end }}

{{- if and (eq $v.strategy.type "RollingUpdate") (has (toString $v.strategy.maxSurge) (list "0" "0%")) (has (toString $v.strategy.maxUnavailable) (list "0" "0%")) }}
{{- fail "strategy: with maxSurge 0 and maxUnavailable 0 no pod could ever be replaced" }}
{{- end }}
{{- $pdb := $v.podDisruptionBudget }}
{{- if and (not (kindIs "invalid" $pdb.minAvailable)) (not (kindIs "invalid" $pdb.maxUnavailable)) }}
{{- fail "podDisruptionBudget: give minAvailable or maxUnavailable, the other null" }}
{{- end }}
{{- $fleets := list (dict "of" "Kvlane" "pods" (include "kvlane.pods" . | int64)) }}
{{- if eq $v.mode "standalone" }}{{ $fleets = append $fleets (dict "of" "Envoy" "pods" (int64 $v.proxy.replicas)) }}{{ end }}
{{- range $fleets }}
{{- if include "kvlane.pdb" (dict "budget" $pdb "pods" .pods) }}
{{- if and (kindIs "invalid" $pdb.minAvailable) (kindIs "invalid" $pdb.maxUnavailable) }}
{{- fail "podDisruptionBudget: needs minAvailable or maxUnavailable" }}
{{- end }}
{{- $stay := 0 }}
{{- if regexMatch "^[0-9]+%$" (toString $pdb.minAvailable) }}
{{- $stay = divf (mulf (trimSuffix "%" $pdb.minAvailable | float64) .pods) 100 | ceil }}
{{- else if regexMatch "^[0-9]+$" (toString $pdb.minAvailable) }}
{{- $stay = $pdb.minAvailable }}
{{- end }}
{{- if or (has (toString $pdb.maxUnavailable) (list "0" "0%")) (and $stay (ge (int64 $stay) .pods)) }}
{{- fail (printf "podDisruptionBudget: with %d pods of %s it never lets one go, and no node could be drained" .pods .of) }}
{{- end }}
{{- end }}
{{- end }}
{{- if $v.autoscaling.enabled }}
{{- if gt (int64 $v.autoscaling.minReplicas) (int64 $v.autoscaling.maxReplicas) }}
{{- fail "autoscaling: minReplicas is more than maxReplicas" }}
{{- end }}
{{- if not (or $v.autoscaling.targetCPUUtilizationPercentage $v.autoscaling.targetStreamsPerPod $v.autoscaling.metrics) }}
{{- fail "autoscaling: needs targetCPUUtilizationPercentage, targetStreamsPerPod or metrics" }}
{{- end }}
{{- if and $v.autoscaling.targetCPUUtilizationPercentage (not (dig "requests" "cpu" "" $v.resources)) }}
{{- fail "autoscaling.targetCPUUtilizationPercentage: is a share of resources.requests.cpu, which is not given" }}
{{- end }}
{{- if and $v.autoscaling.targetCPUUtilizationPercentage (eq $v.mode "sidecar") (not (dig "requests" "cpu" "" $v.proxy.resources)) }}
{{- fail "autoscaling.targetCPUUtilizationPercentage: is a share of all requests of the pod; proxy.resources.requests.cpu is not given" }}
{{- end }}
{{- end }}

{{- $others := list }}
{{- range $key := list "dns" "file" }}
{{- if dig "workers" $key "" $v.config }}{{ $others = append $others (printf "config.workers.%s" $key) }}{{ end }}
{{- end }}
{{- if and $v.networkPolicy.enabled $v.networkPolicy.egress $others (not $v.networkPolicy.extraEgress) }}
{{- fail (printf "networkPolicy.extraEgress: the chart does not know where the workers of %s are; allow their addresses here" (join " and " $others)) }}
{{- end }}

{{- /* A key twice in a map is no YAML. */ -}}
{{- $selector := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" }}
{{- $ours := concat $selector (list "helm.sh/chart" "app.kubernetes.io/version" "app.kubernetes.io/managed-by") }}
{{- $taken := concat $ours (keys $v.commonLabels) }}
{{- range $map := list (list "podLabels" $v.podLabels $selector) (list "commonLabels" $v.commonLabels $ours) (list "monitoring.prometheus.extraLabels" $v.monitoring.prometheus.extraLabels $taken) (list "monitoring.dashboard.labels" $v.monitoring.dashboard.labels $taken) }}
{{- range $key, $_ := index $map 1 }}
{{- if has $key (index $map 2) }}{{ fail (printf "%s: the label %s is set already" (first $map) $key) }}{{ end }}
{{- end }}
{{- end }}

{{- $annotations := list "kubectl.kubernetes.io/default-container" "checksum/config" "checksum/envoy" }}
{{- range $key, $_ := $v.podAnnotations }}
{{- if has $key $annotations }}{{ fail (printf "podAnnotations: the annotation %s is set already" $key) }}{{ end }}
{{- end }}
{{- $names := list "POD_NAME" "POD_NAMESPACE" }}
{{- range $v.env }}
{{- if has .name $names }}{{ fail (printf "env: %s is set already" .name) }}{{ end }}
{{- $names = append $names .name }}
{{- end }}
{{- $names = list "config" "tmp" "socket" "key" "tls" "envoy" "fleet" "fleet-tls" "nats" "store" "model-hub" }}
{{- range concat $v.tokenizerVolumes $v.volumes }}
{{- if has .name $names }}{{ fail (printf "volumes, tokenizerVolumes: the name %s is taken" .name) }}{{ end }}
{{- $names = append $names .name }}
{{- end }}

{{- $mounts := list }}
{{- range $v.tokenizerVolumes }}
{{- $sources := list }}
{{- range $key, $_ := . }}{{ if not (has $key (list "name" "mountPath" "subPath")) }}{{ $sources = append $sources $key }}{{ end }}{{ end }}
{{- if ne (len $sources) 1 }}
{{- fail (printf "tokenizerVolumes %s: needs one source, has %s" .name (join ", " $sources | default "none")) }}
{{- end }}
{{- $mounts = append $mounts .mountPath }}
{{- end }}
{{- range $v.volumeMounts }}{{ $mounts = append $mounts .mountPath }}{{ end }}
{{- $all := concat $mounts (list "/etc/kvlane" "/tmp" "/run/kvlane" "/etc/kvlane-tls" "/etc/kvlane-key" "/etc/kvlane-fleet" "/etc/kvlane-fleet-tls" "/etc/kvlane-nats" "/var/lib/kvlane" "/var/lib/kvlane-hub") }}
{{- if ne (len $all) (len ($all | uniq)) }}
{{- fail "tokenizerVolumes and volumeMounts: a mountPath is used twice, or is the chart's own" }}
{{- end }}
{{- range $v.extraArgs }}
{{- $flag := regexFind "^--?[^=]+" . | trimAll "-" }}
{{- if has $flag (list "config" "listen" "admin" "bind" "grpc-port" "grpc-health-port" "pool-name" "pool-namespace") }}
{{- fail (printf "extraArgs: --%s would contradict the chart's objects; use the values for ports, pool and configuration" $flag) }}
{{- end }}
{{- end }}

{{- $called := list }}
{{- range $model := $v.models }}
{{- if not $model.name }}{{ fail "models: each needs a name" }}{{ end }}
{{- range concat (list $model.name) (default list $model.aliases) (default list $model.adapters) }}
{{- if has . $called }}{{ fail (printf "models: the name %s is given twice" .) }}{{ end }}
{{- $called = append $called . }}
{{- end }}
{{- range $key := list "tokenizer" "chat_template" }}
{{- $path := get $model $key }}
{{- if and $path (not (and (eq $key "tokenizer") (or (hasPrefix "builtin:" $path) (hasPrefix "hf:" $path)))) }}
{{- $found := false }}
{{- range $mounts }}{{ if or (eq $path .) (hasPrefix (printf "%s/" (trimSuffix "/" .)) $path) }}{{ $found = true }}{{ end }}{{ end }}
{{- if not $found }}
{{- fail (printf "models: %s of %s is %s, where nothing is mounted; mount it with tokenizerVolumes" $key $model.name $path) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
