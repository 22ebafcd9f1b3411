{{- /* Made by charts/chartgen from envoy/bootstrap.yaml.tmpl; do not edit. */ -}}
{{- define "kvlane.stripHeaders" -}}
- x-gateway-destination-endpoint
- x-gateway-destination-endpoint-subset
- x-kvlane-endpoint
- x-prefiller-host-port
- x-prefiller-url
- x-encoder-hosts-ports
- x-data-parallel-host-port
- x-kv-cache-source-host-port
- x-data-parallel-rank
- x-envoy-original-path
- x-envoy-original-host
- x-envoy-original-dst-host
{{- end }}
{{- define "kvlane.inferencePaths" -}}
- /v1/chat/completions
- /v1/chat/completions/render
- /v1/completions
- /v1/completions/render
- /v1/responses
- /v1/responses/*
- /v1/messages
- /v1/messages/count_tokens
- /v1/embeddings
- /v1/models
- /v1/models/*
- /v1/audio/transcriptions
- /v1/audio/translations
- /v1/audio/speech
- /v1/realtime
- /generate
- /inference/v1/generate
- /tokenize
- /v1/tokenize
- /detokenize
- /v1/detokenize
- /pooling
- /classify
- /v1/classify
- /score
- /v1/score
- /rerank
- /v1/rerank
- /v2/rerank
- /v2/embed
{{- end }}
{{- define "kvlane.conversationHeaders" -}}
- x-dynamo-session-id
- x-session-id
- x-claude-code-session-id
- thread-id
- session-id
- session_id
- x-opencode-session-id
- x-opencode-session
- x-litellm-session-id
- x-correlation-id
- x-session-affinity
- x-multi-turn-session-id
{{- end }}
{{- define "kvlane.bootstrap" -}}
# Envoy in front of Kvlane. Written by `kvlane envoy-config`; every value that is not Envoy's default says why.
node: {id: kvlane, cluster: kvlane}
admin: {address: {{include "kvlane.envoyAddress" .Admin}}, ignore_global_conn_limit: true}
dynamic_resources:
  ads_config: {api_type: GRPC, transport_api_version: V3, grpc_services: [{envoy_grpc: {cluster_name: kvlane,
    retry_policy: {retry_back_off: {base_interval: 0.1s, max_interval: 1s}}}}]}   # the defaults ask a Kvlane that was away anew only after up to 30 s
layered_runtime: {layers: [{name: static, static_layer: {http.max_requests_per_io_cycle: 1{{if .Paths}}, re2.max_program_size.error_level: 100000{{end}}}}, {name: admin, admin_layer: {}}]}   # a burst of one connection takes turns with others and with Kvlane's answers; the paths are one expression, for which the default of 100 is too short
overload_manager:
  refresh_interval: 0.25s
  resource_monitors:
  - {name: envoy.resource_monitors.fixed_heap, typed_config: {"@type": type.googleapis.com/envoy.extensions.resource_monitors.fixed_heap.v3.FixedHeapConfig, max_heap_size_bytes: {{.MaxHeap}}}}
  - {name: envoy.resource_monitors.global_downstream_max_connections, typed_config: {"@type": type.googleapis.com/envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig, max_active_downstream_connections: 20000}}
  buffer_factory_config: {minimum_account_to_track_power_of_two: 16}   # from 64 KiB on a request's buffers count below
  actions:
  - {name: envoy.overload_actions.shrink_heap, triggers: [{name: envoy.resource_monitors.fixed_heap, threshold: {value: 0.8}}]}
  - {name: envoy.overload_actions.reset_high_memory_stream, triggers: [{name: envoy.resource_monitors.fixed_heap, scaled: {scaling_threshold: 0.82, saturation_threshold: 0.92}}]}   # the largest first, and all classes before requests are refused
  - {name: envoy.overload_actions.reduce_timeouts, triggers: [{name: envoy.resource_monitors.fixed_heap, scaled: {scaling_threshold: 0.7, saturation_threshold: 0.85}}], typed_config: {"@type": type.googleapis.com/envoy.config.overload.v3.ScaleTimersOverloadActionConfig,
      timer_scale_factors: [{timer: HTTP_DOWNSTREAM_STREAM_IDLE, min_timeout: 20s}]}}   # of requests that stand still: clients that do not read their answers, or wait for an engine
  - {name: envoy.overload_actions.disable_http_keepalive, triggers: [{name: envoy.resource_monitors.fixed_heap, threshold: {value: 0.92}}]}
  - {name: envoy.overload_actions.stop_accepting_requests, triggers: [{name: envoy.resource_monitors.fixed_heap, threshold: {value: 0.95}}]}
  - {name: envoy.overload_actions.stop_accepting_connections, triggers: [{name: envoy.resource_monitors.fixed_heap, threshold: {value: 0.98}}]}
  loadshed_points:   # HTTP/1.1 has no such reset: from here on connections that go on sending are closed, large bodies before small ones
  - {name: envoy.load_shed_points.http1_server_abort_dispatch, triggers: [{name: envoy.resource_monitors.fixed_heap, scaled: {scaling_threshold: 0.97, saturation_threshold: 1}}]}
  - {name: envoy.load_shed_points.http2_server_go_away_and_close_on_dispatch, triggers: [{name: envoy.resource_monitors.fixed_heap, scaled: {scaling_threshold: 0.93, saturation_threshold: 0.98}}]}   # headers of requests that were not looked at yet are no buffers, and one byte in HPACK may stand for 4 kB
static_resources:
  listeners:
  - name: ingress
    address: {{include "kvlane.envoyAddress" .Ingress}}
    per_connection_buffer_limit_bytes: 262144     # of answers that a client does not read, and of one read of a body; 1 MiB by default
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: ingress
          use_remote_address: true                # clients are not trusted: their x-envoy-* headers go, x-forwarded-* is Envoy's
          normalize_path: true                    # Kvlane and the engine are to read the same path
          merge_slashes: true
          path_with_escaped_slashes_action: UNESCAPE_AND_FORWARD   # then normalized; a redirect would make some clients drop the body
          http2_protocol_options: {max_concurrent_streams: 256, initial_stream_window_size: 262144, initial_connection_window_size: 4194304}
          request_headers_timeout: 10s
          request_timeout: {{.RequestTimeout}}   # until the body is here and Kvlane has decided: slow uploads are answered 408
          stream_flush_timeout: 60s               # of a client that does not read the end of its answer
          http_protocol_options: {accept_http_10: true, default_host_for_http_10: kvlane}   # load tools and old health checks still speak it
          stream_idle_timeout: 3600s              # the default of 5 minutes ends requests that queue or prefill for long; near the end of the heap it is 20 s, see above
{{- if .ConnectionAge}}
          common_http_protocol_options: {max_connection_duration: {{.ConnectionAge}}}   # busy clients move to another Envoy before this one stops
          http1_safe_max_connection_duration: true
{{- end}}
          preserve_external_request_id: true      # one id from the client's log to the engine's
          always_set_request_id_in_response: true
{{- if .AccessLog}}
          access_log:                             # outcome, bytes and times of each request, shortly after its end
          - name: envoy.access_loggers.http_grpc
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig
              common_config: {log_name: kvlane, transport_api_version: V3, grpc_service: {envoy_grpc: {cluster_name: kvlane}}, buffer_flush_interval: 0.05s}
{{- end}}
          local_reply_config:                     # what Envoy says by itself has the shape that the API's clients expect; Kvlane's own answers have none of these flags
            mappers:
            - filter: {and_filter: {filters: [
                {response_flag_filter: {flags: [UH, UF, UC, UO, UR, URX, UPE, LR, NC, UT, SI, DT]}},
                {header_filter: {header: {name: ":path", string_match: {prefix: /v1/messages}}}}]}}
              body_format_override: {content_type: application/json, text_format_source: {inline_string: '{"type":"error","error":{"type":"service_unavailable_error","message":"no worker answered this request; try again"}}'}}
            - filter: {response_flag_filter: {flags: [UH, UF, UC, UO, UR, URX, UPE, LR, NC, UT, SI, DT]}}
              body_format_override: {content_type: application/json, text_format_source: {inline_string: '{"error":{"message":"no worker answered this request; try again","type":"service_unavailable_error","param":null,"code":null}}'}}
            - filter: {and_filter: {filters: [
                {status_code_filter: {comparison: {op: EQ, value: {default_value: 413, runtime_key: kvlane.too_large}}}},
                {header_filter: {header: {name: ":path", string_match: {prefix: /v1/messages}}}}]}}
              body_format_override: {content_type: application/json, text_format_source: {inline_string: '{"type":"error","error":{"type":"request_too_large","message":"request body is larger than {{.MaxBody}} bytes"}}'}}
            - filter: {status_code_filter: {comparison: {op: EQ, value: {default_value: 413, runtime_key: kvlane.too_large}}}}
              body_format_override: {content_type: application/json, text_format_source: {inline_string: '{"error":{"message":"request body is larger than {{.MaxBody}} bytes","type":"invalid_request_error","param":null,"code":"request_too_large"}}'}}
          http_filters:
          - name: strip-steering                  # what a client sends never steers, even while Kvlane is down
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation
              mutations: {request_mutations: [{{range $i, $h := .StripHeaders}}{{if $i}}, {{end}}{remove: {{$h}}}{{end}}, {remove_on_match: {key_matcher: {prefix: x-envoy-}}}]}
{{- if .FirstToken}}
          - name: first-token                     # its stream opens at the first piece of the answer; Kvlane leaves it after one message
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service: {envoy_grpc: {cluster_name: kvlane}{{if .HashReplicas}}, initial_metadata: [
                {{range .Conversations}}{key: {{.Key}}, value: "%REQ({{.Key}})%"}, {{end}}{key: x-kvlane-request, value: "%REQ(X-REQUEST-ID)%"}],
                retry_policy: {retry_on: "connect-failure,refused-stream,reset", num_retries: 2, retry_back_off: {base_interval: 0.005s, max_interval: 0.02s},   # another replica decides if one dies
                  retry_host_predicate: [{name: previous, typed_config: {"@type": type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate}}], host_selection_retry_max_attempts: 10}{{end}}}
              observability_mode: true
              failure_mode_allow: true
              processing_mode: {request_header_mode: SKIP, request_body_mode: NONE, request_trailer_mode: SKIP,
                response_header_mode: SKIP, response_body_mode: STREAMED, response_trailer_mode: SKIP}
              response_attributes: [request.id]
{{- end}}
          - name: kvlane
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service: {envoy_grpc: {cluster_name: kvlane}{{if .HashReplicas}}, initial_metadata: [
                {{range .Conversations}}{key: {{.Key}}, value: "%REQ({{.Key}})%"}, {{end}}{key: x-kvlane-request, value: "%REQ(X-REQUEST-ID)%"}],
                retry_policy: {retry_on: "connect-failure,refused-stream,reset", num_retries: 2, retry_back_off: {base_interval: 0.005s, max_interval: 0.02s},   # another replica decides if one dies
                  retry_host_predicate: [{name: previous, typed_config: {"@type": type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate}}], host_selection_retry_max_attempts: 10}{{end}}}
              failure_mode_allow: true            # false would cut running answers when Kvlane dies; failing closed is the fallback policy's part
              message_timeout: {{.StallTimeout}}         # a Kvlane that hangs costs a request so much
              max_message_timeout: {{.MessageTimeout}}   # it asks for more while a request queues, is tokenized, or is prefilled
{{- if .ModeOverride}}
              allow_mode_override: true           # Kvlane asks for the answers whose usage it changes, and for no others
{{- end}}
              processing_mode: {request_header_mode: SEND, request_body_mode: {{.RequestBody}}, request_trailer_mode: SEND,
                response_header_mode: SEND, response_body_mode: {{.ResponseBody}}, response_trailer_mode: SEND}   # trailers SEND: the stream lives until the answer's end
              request_attributes: [request.id, source.address]
              response_attributes: [upstream.address]
              metadata_options: {receiving_namespaces: {untyped: [envoy.lb]}, forwarding_namespaces: {untyped: [envoy.lb, envoy.lb.subset_hint]}}
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: { {{- if .Paths}}safe_regex: {regex: '{{.Paths}}'}{{else}}prefix: /{{end}}, headers: [{name: ":path", string_match: {safe_regex: {regex: '/v1/realtime(\?.*)?'}}},
                  {name: ":method", string_match: {exact: GET}}, {name: upgrade, string_match: {exact: websocket, ignore_case: true}}]}
                typed_per_filter_config:          # Kvlane picks on the headers; what follows has no end and passes unread
                  kvlane: {"@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute, overrides: {processing_mode: {
                    request_header_mode: SEND, request_body_mode: NONE, request_trailer_mode: SKIP, response_header_mode: SEND, response_body_mode: NONE, response_trailer_mode: SEND}}}
{{- if .FirstToken}}
                  first-token: {"@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute, disabled: true}
{{- end}}
                route: {cluster: model_servers, timeout: 0s, idle_timeout: 300s, upgrade_configs: [{upgrade_type: websocket}]}
              - match: {{if .Paths}}{safe_regex: {regex: '{{.Paths}}'}}{{else}}{prefix: /}{{end}}
                request_body_buffer_limit: {{.MaxBody}}   # a larger body is answered 413
                route:
                  cluster: model_servers
                  timeout: 0s                     # the default of 15 s ends long answers
{{- if .Retries}}
                  retry_policy:                   # only where the worker has seen nothing of the request
                    retry_on: "connect-failure,reset-before-request"
                    num_retries: 3
                    retry_host_predicate: [{name: previous, typed_config: {"@type": type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate}}]
                    host_selection_retry_max_attempts: 5
{{- end}}
{{- if .Paths}}
              - match: {prefix: /}                # what else an engine serves is for its operators: caches, adapters, profiles, metrics
                typed_per_filter_config:
                  kvlane: {"@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute, disabled: true}
{{- if .FirstToken}}
                  first-token: {"@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute, disabled: true}
{{- end}}
                response_headers_to_add: [{header: {key: content-type, value: application/json}, append_action: OVERWRITE_IF_EXISTS_OR_ADD}]
                direct_response: {status: 404, body: {inline_string: '{"error":{"message":"this gateway does not serve this path; the operator lists the paths that it serves in envoy.paths","type":"invalid_request_error","param":null,"code":"path_not_served"}}'}}
{{- end}}
{{- if .Prefill}}
  - name: prefill                                 # Kvlane sends prefill legs here; the pick travels in a header that only this socket reads
    address: {{include "kvlane.envoyAddress" .Prefill}}
    ignore_global_conn_limit: true
    bypass_overload_manager: true
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: prefill
          stream_idle_timeout: 0s
          preserve_external_request_id: true
          http_filters:
          - name: pick
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config
              request_rules: [{header: x-kvlane-endpoint, on_header_present: {metadata_namespace: envoy.lb, key: x-gateway-destination-endpoint, type: STRING}, remove: true}]
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{match: {prefix: /}, request_body_buffer_limit: {{.MaxBody}}, route: {cluster: prefill_servers, timeout: 0s}}]
{{- end}}
{{- if .Readiness}}
  - name: readiness                               # of an Envoy that has no endpoints yet the others' work shall not be
    address: {{include "kvlane.envoyAddress" .Readiness}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: readiness
          http_filters:
          - name: readiness
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.health_check.v3.HealthCheck
              pass_through_mode: false
              headers: [{name: ":path", string_match: {exact: /ready}}]
              cluster_min_healthy_percentages: {model_servers: {value: 1}}
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
          route_config: {}
{{- end}}
{{- if .Metrics}}
  - name: metrics                                 # of the admin page nothing else
    address: {{include "kvlane.envoyAddress" .Metrics}}
    ignore_global_conn_limit: true
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: metrics
          http_filters: [{name: envoy.filters.http.router, typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}]
          route_config: {virtual_hosts: [{name: metrics, domains: ["*"], routes: [
            {match: {path: /stats/prometheus, headers: [{name: ":method", string_match: {exact: GET}}]}, route: {cluster: admin}}]}]}
{{- end}}
  clusters:
{{- if .Metrics}}
  - {name: admin, load_assignment: {cluster_name: admin, endpoints: [{lb_endpoints: [{endpoint: {address: {{include "kvlane.envoyAddress" .Admin}}}}]}]}}
{{- end}}
  - name: kvlane
    type: {{if .ByName}}STRICT_DNS{{else}}STATIC{{end}}
    connect_timeout: 1s
{{- if .ByName}}
    dns_refresh_rate: 1s                          # a name with the address of every replica that is ready
    dns_failure_refresh_rate: {base_interval: 1s, max_interval: 2s}
{{- end}}
{{- if .Replicas}}
    load_balancing_policy:
      policies:
{{- if .HashReplicas}}
      - typed_extension_config:                   # a conversation stays with one replica, and so do both streams of a request
          name: envoy.load_balancing_policies.ring_hash
          typed_config: {"@type": type.googleapis.com/envoy.extensions.load_balancing_policies.ring_hash.v3.RingHash}
{{- else}}
      - typed_extension_config:
          name: envoy.load_balancing_policies.least_request
          typed_config: {"@type": type.googleapis.com/envoy.extensions.load_balancing_policies.least_request.v3.LeastRequest}
{{- end}}
{{- end}}
    # A Kvlane that stopped is left after two checks: requests go on without it at once, as if it were away.
    health_checks: [{timeout: 0.5s, interval: 0.2s, no_traffic_interval: 0.2s, unhealthy_threshold: 2, healthy_threshold: 1, grpc_health_check: {service_name: {{if .Replicas}}readiness{{else}}{{if .Retries}}liveness{{else}}readiness{{end}}{{end}}}}]
    common_lb_config: {healthy_panic_threshold: {value: 0}}   # by default a host that is not healthy is asked all the same when there is no other
    circuit_breakers: {thresholds: [{max_connections: 65535, max_pending_requests: 65535, max_requests: 65535{{if .HashReplicas}}, max_retries: 65535{{end}}}]}   # a stream lives as long as its answer; the default of 1024 is soon full
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {connection_keepalive: {interval: 0.3s, timeout: 1.6s}}}   # bounds every stream of a Kvlane that stopped, full duplex and prefill legs too
{{- if .HashReplicas}}
        hash_policy: [{{range .Conversations}}{header: {header_name: {{.Key}}}, terminal: true}, {{end}}{header: {header_name: x-kvlane-request}}]   # the first header that is there
{{- end}}
{{- if .CertFile}}
    transport_socket:
      name: envoy.transport_sockets.tls
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        sni: "{{.ServerName}}"
        common_tls_context:
          alpn_protocols: [h2]
          tls_params: {tls_maximum_protocol_version: TLSv1_3}   # by default Envoy offers at most 1.2 as a client
          tls_certificates: [{certificate_chain: {filename: "{{.CertFile}}"}, private_key: {filename: "{{.KeyFile}}"}}]
          validation_context: {trusted_ca: {filename: "{{.CAFile}}"}, match_typed_subject_alt_names: [{san_type: DNS, matcher: {exact: "{{.ServerName}}"}}]}
{{- end}}
    load_assignment: {cluster_name: kvlane, endpoints: [{lb_endpoints: [{endpoint: {address: {{include "kvlane.envoyAddress" .Kvlane}}}}]}]}
{{- range .Clusters}}
  - name: {{.Name}}
    type: EDS
    connect_timeout: 1s
    per_connection_buffer_limit_bytes: 262144
    ignore_health_on_host_removal: true
    eds_cluster_config: {service_name: model_servers, eds_config: {ads: {}, resource_api_version: V3}}
    circuit_breakers: {thresholds: [{max_connections: 65535, max_pending_requests: 65535, max_requests: 65535, max_retries: 1024}]}
    load_balancing_policy:
      policies:
      - typed_extension_config:
          name: envoy.load_balancing_policies.override_host
          typed_config:
            "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost
            override_host_sources: [{metadata: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint}]}}]   # metadata only: no client can write it
            selected_host_key: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint-served}]}
{{- if .FailClosed}}
            fallback_policy: {policies: [{typed_extension_config: {name: envoy.load_balancing_policies.subset, typed_config: {    # no pick: 503
              "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.subset.v3.Subset, fallback_policy: NO_FALLBACK,
              subset_selectors: [{keys: [no-such-key], fallback_policy: NO_FALLBACK}],
              subset_lb_policy: {policies: [{typed_extension_config: {name: envoy.load_balancing_policies.round_robin, typed_config: {
                "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin}}}]}}}}]}
{{- else}}
            fallback_policy: {policies: [{typed_extension_config: {name: envoy.load_balancing_policies.least_request, typed_config: {    # no pick, or the pick refuses: the least busy worker
              "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.least_request.v3.LeastRequest}}}]}
{{- end}}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        common_http_protocol_options: {idle_timeout: 4s}   # below the engine's keep-alive (5 s), so that no request meets a closing connection
        explicit_http_config: {http_protocol_options: {}}
{{- end}}
{{- end }}
