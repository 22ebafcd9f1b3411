// Package config is Kvlane's YAML (or JSON) file: its types, defaults, strict decoding
// and validation. Every problem is reported with its place.
package config

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/kvlane/kvlane/routing"
)

// Config is the whole configuration file.
type Config struct {
	Listen  Listen   `yaml:"listen" jsonschema_description:"Where Envoy reaches Kvlane: ext_proc, xDS and access log share one socket."`
	Admin   Admin    `yaml:"admin" jsonschema_description:"Metrics, health and debug pages."`
	Envoy   Envoy    `yaml:"envoy" jsonschema_description:"The standalone Envoy: what 'kvlane envoy-config' prints."`
	Limits  Limits   `yaml:"limits" jsonschema_description:"Bounds on requests."`
	Models  []Model  `yaml:"models" jsonschema_description:"Models with their tokenizers. Requests for other models are routed by load."`
	Workers Workers  `yaml:"workers" jsonschema_description:"Where the engines are."`
	Tenants Tenants  `yaml:"tenants" jsonschema_description:"Separation of the KV caches of tenants. See docs/threat-model.md."`
	Routing Routing  `yaml:"routing" jsonschema_description:"How the target of a request is chosen."`
	Flow    Flow     `yaml:"flow" jsonschema_description:"Queue for requests whose best targets are busy: order, fairness and bounds. See docs/flow.md."`
	SLO     SLO      `yaml:"slo" jsonschema_description:"Targets for the time to the first token. See docs/slo.md."`
	Index   Index    `yaml:"index" jsonschema_description:"The KV index."`
	Fleet   Fleet    `yaml:"fleet" jsonschema_description:"Several replicas that share bookings and conversations, and so route as one."`
	Disagg  Disagg   `yaml:"disagg" jsonschema_description:"Prefill/decode disaggregation."`
	Explain Explain  `yaml:"explain" jsonschema_description:"What is stored and shown about decisions."`
	Log     Log      `yaml:"log" jsonschema_description:"Logging."`
	Drain   Duration `yaml:"drain" jsonschema_description:"How long Kvlane serves after SIGTERM. Responses in FULL_DUPLEX_STREAMED that are still running then are cut. See drain_quiet for an earlier end."`
	Quiet   Duration `yaml:"drain_quiet" jsonschema_description:"After SIGTERM, stop once no request has arrived for this long. Set it above the gateway's endpoint-removal delay."`
}

// Listen is the gRPC side.
type Listen struct {
	Address  string `yaml:"address" jsonschema_description:"'unix:/path' or 'host:port'. TLS and plaintext are served on the same port."`
	CertFile string `yaml:"cert_file" jsonschema_description:"PEM certificate for TLS, reloaded when it changes. Empty: a self-signed certificate is generated."`
	KeyFile  string `yaml:"key_file" jsonschema_description:"PEM key of cert_file."`
	ClientCA string `yaml:"client_ca_file" jsonschema_description:"PEM certificates of the CAs that sign clients' certificates, reloaded when it changes. If set, ext_proc, xDS, access log, pushed events and copies of the index need TLS with such a certificate; listen.health does not. Empty: every client of the port may use it."`
	MinTLS   string `yaml:"tls_min_version" jsonschema:"enum=VersionTLS12,enum=VersionTLS13" jsonschema_description:"Oldest version of TLS that is served. An Envoy that verifies Kvlane must allow version 1.3 for VersionTLS13 (tls_maximum_protocol_version), as the bootstrap of envoy-config does."`
	Events   string `yaml:"events" jsonschema_description:"Additional 'host:port' for relays that push events, which listen.address then does not accept; empty: they use listen.address."`
	Health   string `yaml:"health" jsonschema_description:"Additional address that serves only gRPC health, for probes; empty: none."`
}

// Admin configures the HTTP port for operators and monitoring.
type Admin struct {
	Address   string `yaml:"address" jsonschema_description:"'host:port' of /metrics, /healthz, /readyz and /debug."`
	TokenFile string `yaml:"token_file" jsonschema_description:"File with the token that everything below /debug/ needs as 'Authorization: Bearer TOKEN', read at each request. Empty: /debug/pprof and POST requests are served to the same machine only (kubectl port-forward counts as such), the other pages to everyone."`
}

// Envoy describes the standalone Envoy.
type Envoy struct {
	Ingress        string   `yaml:"ingress" jsonschema_description:"Where clients connect."`
	Admin          string   `yaml:"admin" jsonschema_description:"Envoy's own admin listener."`
	Paths          []string `yaml:"paths" jsonschema:"minItems=1" jsonschema_description:"Paths that clients reach; others are answered 404. 'default' stands for the inference paths of vLLM, SGLang and TensorRT-LLM (not /metrics, /reset_prefix_cache, /server_info, adapters and the like), '*' at the end for everything below. '/*' opens every path of the engines."`
	Replicas       []string `yaml:"replicas" jsonschema_description:"Addresses of all replicas of Kvlane (host:port, names allowed), for an Envoy in front of several. A conversation stays with one replica while it is ready, if a header (routing.conversation_headers) has its id. Empty: only listen.address."`
	Prefill        string   `yaml:"prefill" jsonschema_description:"Listener through which Kvlane sends prefill requests; empty: they go directly to the worker."`
	Alternates     bool     `yaml:"alternates" jsonschema_description:"Envoy accepts a list of endpoints (the bootstrap of envoy-config does): split requests name a second decode worker, in case the first refuses connections. Leave it off behind gateways, which accept exactly one endpoint."`
	FailClosed     *bool    `yaml:"fail_closed" jsonschema_description:"Answer 503 if no worker was picked (Kvlane is down or late, or knows no eligible worker) instead of using the least busy worker. Absent: true with tenants.salt_header and tenants.required, because such requests have no salt."`
	FirstToken     bool     `yaml:"first_token" jsonschema_description:"Observe the first chunk of each response: prefill load is released then, not at the response headers."`
	AccessLog      bool     `yaml:"access_log" jsonschema_description:"Receive the outcome of each request through Envoy's access log."`
	MessageTimeout Duration `yaml:"message_timeout" jsonschema_description:"How long Envoy waits for Kvlane while a request is queued, tokenized or prefilled; Kvlane extends Envoy's timeout to it."`
	StallTimeout   Duration `yaml:"stall_timeout" jsonschema_description:"How long Envoy waits for a Kvlane that does not ask for more time, before it continues without. It is the delay of each request while Kvlane hangs. Keep it well above the scheduling pauses of a busy machine."`
	UploadTimeout  Duration `yaml:"upload_timeout" jsonschema_description:"How long a client may take to send a request. Where requests may queue or be prefilled, message_timeout is added, as Envoy's timer runs until Kvlane has decided."`
	MaxHeap        Bytes    `yaml:"max_heap" jsonschema_description:"Heap size near which Envoy sheds load: first the requests with the largest bodies, then new ones. Keep it a quarter below Envoy's memory limit."`
	ConnectionAge  Duration `yaml:"connection_age" jsonschema_description:"Maximum age of client connections, so that they move away from an Envoy that will stop; running responses are completed first. 0s: no limit."`
	CertFile       string   `yaml:"client_cert_file" jsonschema_description:"PEM certificate with which Envoy connects to Kvlane over TLS, as listen.client_ca_file demands. Envoy reads it at its start."`
	KeyFile        string   `yaml:"client_key_file" jsonschema_description:"PEM key of client_cert_file."`
	CAFile         string   `yaml:"ca_file" jsonschema_description:"PEM certificates of the CAs that sign Kvlane's certificate; needed with client_cert_file."`
	ServerName     string   `yaml:"server_name" jsonschema_description:"Name that Kvlane's certificate must have; needed with client_cert_file."`
	RequestBody    string   `yaml:"request_body" jsonschema:"enum=BUFFERED,enum=FULL_DUPLEX_STREAMED" jsonschema_description:"Processing mode of request bodies in the bootstrap. BUFFERED is the cheapest and fails open. Kvlane supports every mode that a gateway uses."`
	ResponseBody   string   `yaml:"response_body" jsonschema:"enum=NONE,enum=STREAMED,enum=FULL_DUPLEX_STREAMED" jsonschema_description:"Processing mode of response bodies. NONE costs nothing per token; the others are needed to compare predicted with observed cached tokens."`
}

// FailsClosed reports whether Envoy answers 503 where no worker was picked.
func (c *Config) FailsClosed() bool {
	if own := c.Envoy.FailClosed; own != nil {
		return *own
	}
	return c.Tenants.SaltHeader != "" && c.Tenants.Required
}

// Limits bound requests.
type Limits struct {
	MaxBody         Bytes          `yaml:"max_body" jsonschema_description:"Largest request body; larger ones are answered 413."`
	Bodies          BodiesInFlight `yaml:"bodies_in_flight" jsonschema_description:"Bounds of the request bodies, from the headers of their requests until the decision; requests beyond them are answered 503 with Retry-After. Bodies above 512 KiB leave the last eighth of the bytes to others. Bodies that have been arriving for more than 2 s (0.25 s where their number is the limit) then give up their place, the oldest first. Bodies that Envoy buffers for more than 2 s are bounded together by the same number of bytes, by their announced lengths."`
	PerAddress      int            `yaml:"requests_per_address" jsonschema:"minimum=0" jsonschema_description:"Open requests of one client by its address (an IPv6 /56), from their headers until the end of the answer; further ones are answered 429 with Retry-After. The address is Envoy's source.address: where a balancer or gateway hides the clients' addresses, all of its clients are one, as are phones and rented servers of one IPv6 /56. Each replica counts for itself. Requests whose address Envoy does not send are not bounded. 0: no limit."`
	MaxStreams      int            `yaml:"max_streams" jsonschema:"minimum=0,maximum=1000000" jsonschema_description:"Concurrent ext_proc streams (requests with their responses) per connection; Envoy opens more connections. 0: no limit."`
	DecisionTimeout Duration       `yaml:"decision_timeout" jsonschema_description:"How long a decision may wait for a processor and compute tokens; after that the request is routed by load (kvlane_degraded_total, reason deadline). 0s: no limit."`
	UnknownModel    string         `yaml:"unknown_model" jsonschema:"enum=refuse,enum=route" jsonschema_description:"What to do with a request for a model that no worker lists, if all workers list theirs. refuse: 404, or 400 if it names no model and no model is served by all workers. route: any worker."`
	MediaURLs       []string       `yaml:"media_urls" jsonschema_description:"What engines may fetch images, audio and video from, by the URLs in requests: any; data, which is data: URLs only; or hosts as in the URLs, in lower case, with their port if the URLs have one. Other URLs are answered 400. data: URLs always pass. Empty: data with tenants.salt_header, else any."`
	RefuseEarly     bool           `yaml:"refuse_early" jsonschema_description:"Answer requests whose prompt cannot be built (because of the shape of the messages, the chat template or the context length) with the status that the engine would answer, instead of forwarding them. The engine checks types and values of other fields."`
}

// AnyMedia reports whether engines may fetch media from everywhere.
func (c *Config) AnyMedia() bool {
	own := c.Limits.MediaURLs
	return slices.Contains(own, "any") || len(own) == 0 && c.Tenants.SaltHeader == ""
}

// FetchesMedia reports whether engines may get this as the URL of a medium. The host is all that precedes a slash and is compared
// as written, so that no parser finds another one.
func (c *Config) FetchesMedia(url string) bool {
	if url == "" || strings.HasPrefix(url, "data:") {
		return true
	}
	scheme, rest, _ := strings.Cut(url, "://")
	host, _, _ := strings.Cut(rest, "/")
	return (scheme == "http" || scheme == "https") && host != "data" && slices.Contains(c.Limits.MediaURLs, host)
}

// BodiesInFlight bounds the request bodies in memory.
type BodiesInFlight struct {
	Bytes Bytes `yaml:"bytes" jsonschema_description:"Memory of all bodies together, including buffers. A single body is always accepted. Bodies of prefill legs have as much again, and their answers a quarter of it. 0: no limit."`
	Count int   `yaml:"count" jsonschema:"minimum=0" jsonschema_description:"Number of bodies; 0: no limit."`
}

// Tenants separates the KV caches of tenants.
type Tenants struct {
	SaltHeader   string `yaml:"salt_header" jsonschema_description:"Request header that names the tenant. A gateway must set it after it has authenticated the client. Kvlane derives the request's cache_salt from it, so that engines share no KV blocks between tenants, and removes the header. Empty: no separation."`
	Header       string `yaml:"header" jsonschema_description:"Request header that names the tenant for flow.fairness, with the trust and the removal of salt_header but without separate caches. Not one that engines, Envoy or Kvlane use, such as authorization. Empty: salt_header."`
	Required     bool   `yaml:"required" jsonschema_description:"Applies to salt_header only: answer 403 to prompts without salt_header, and 400 to prompts that the engine cannot salt (such as /v1/messages of vLLM). If false, such prompts share one cache."`
	TrustIngress bool   `yaml:"trust_ingress" jsonschema_description:"The header of requests that reach Envoy is set by a proxy in front of it, which clients cannot bypass. If false, the bootstrap of envoy-config removes it, and a filter after strip-steering has to set it."`
}

const routingKey = "x-smg-routing-key"

// Headers returns the names, in lower case, that only Kvlane may read: the tenant's, the header in which newer vLLM reads
// a salt, in preference to the body's, and that by which SGLang may prefer requests to others.
func (t *Tenants) Headers() []string {
	var all []string
	if t.SaltHeader != "" {
		all = []string{t.SaltHeader, "x-cache-salt", routingKey}
	}
	if t.Header != "" && t.Header != t.SaltHeader {
		all = append(all, t.Header)
	}
	return all
}

// Name returns the header that names the tenant, "" for none.
func (t *Tenants) Name() string { return cmp.Or(t.Header, t.SaltHeader) }

// Stripped returns the names in Headers that Envoy removes from clients' requests. routing.conversation_headers may have the routing key.
func (t *Tenants) Stripped() []string {
	return slices.DeleteFunc(t.Headers(), func(name string) bool {
		return name == routingKey || t.TrustIngress && (name == t.SaltHeader || name == t.Header)
	})
}

// Owns reports whether a header is one of Headers.
func (t *Tenants) Owns(name string) bool { return slices.Contains(t.Headers(), name) }

// Model is a served model.
type Model struct {
	Name           string   `yaml:"name" jsonschema_description:"Name that clients send."`
	Aliases        []string `yaml:"aliases" jsonschema_description:"Further names of the same model."`
	Adapters       []string `yaml:"adapters" jsonschema_description:"LoRA adapters, which clients request as model."`
	Tokenizer      string   `yaml:"tokenizer" jsonschema_description:"Folder with tokenizer.json, tokenizer_config.json and so on, 'hf:Org/Model@revision' of a model hub, or 'builtin:qwen3'. Empty: the model is routed by load."`
	TokenizerLock  string   `yaml:"tokenizer_lock" jsonschema_description:"Hash over the files of an 'hf:' tokenizer, 'sha256:…', which kvlane check prints. With other files the model is routed by load."`
	Engine         string   `yaml:"engine" jsonschema:"enum=vllm,enum=sglang,enum=trtllm" jsonschema_description:"Engine whose request formats are followed."`
	ChatTemplate   string   `yaml:"chat_template" jsonschema_description:"File with a chat template that replaces the tokenizer's."`
	ToolParser     bool     `yaml:"tool_parser" jsonschema_description:"vLLM runs with --enable-auto-tool-choice and --tool-call-parser. Set it to false for a vLLM without these flags, which refuses requests with tools."`
	HideTools      bool     `yaml:"hide_tools_when_none" jsonschema_description:"vLLM runs with --exclude-tools-when-tool-choice-none."`
	TrustTemplates bool     `yaml:"trust_request_templates" jsonschema_description:"Requests may contain a chat_template (vLLM with --trust-request-chat-template). If false, such templates are not run: vLLM refuses the request; for other engines it is routed by load."`
	Multimodal     *bool    `yaml:"multimodal" jsonschema_description:"The model accepts images, audio or video; if false, such requests are refused. Absent: decided by the tokenizer folder's config.json, or else by the chat template."`
	MaxModelLen    int      `yaml:"max_model_len" jsonschema:"minimum=0" jsonschema_description:"Context length of the engine in tokens; 0: what all its engines name in GET /v1/models, if they do."`
	EngineModel    string   `yaml:"engine_model" jsonschema_description:"What vLLM's --model is, a path or a name: part of its hashes of images. Empty: asked of the workers (root in GET /v1/models)."`
	EAGLE          bool     `yaml:"eagle" jsonschema_description:"vLLM runs with EAGLE, MTP, DFlash or DSpark (--speculative-config), and without disable_eagle_block_drop: it computes the last block of what it has cached again."`
	CacheBytes     Bytes    `yaml:"cache_bytes" jsonschema_description:"Memory for cached tokenizations of earlier prompts."`
	HandIDs        *bool    `yaml:"hand_ids" jsonschema_description:"Forward the token ids of chats, completions, messages and responses to workers that were found to answer with them as without (see docs/tokens.md), so that they do not tokenize again. Absent: those of prompts of 256 tokens or more, unless there are prefill pools."`
	Check          Check    `yaml:"check" jsonschema_description:"Comparison with the engine's own tokenizer."`
	SLO            ModelSLO `yaml:"slo" jsonschema_description:"Latency targets of the model's requests. See docs/slo.md."`
	Disagg         Rule     `yaml:"disagg" jsonschema_description:"Overrides of routing.disagg for this model, whose workers form their own prefill and decode pools."`
}

// Rule overrides routing.disagg for the pools of a model; nil fields do not.
type Rule struct {
	Mode             *string  `yaml:"mode" jsonschema:"enum=off,enum=threshold,enum=conditional,enum=cost" jsonschema_description:"See routing.disagg.mode."`
	Threshold        *int64   `yaml:"threshold" jsonschema_description:"See routing.disagg.threshold."`
	WholePrompt      *bool    `yaml:"whole_prompt" jsonschema_description:"See routing.disagg.whole_prompt."`
	MaxLocalPrefill  *int64   `yaml:"max_local_prefill" jsonschema_description:"See routing.disagg.max_local_prefill."`
	K                *float64 `yaml:"k" jsonschema_description:"See routing.disagg.k."`
	Resident         *float64 `yaml:"resident" jsonschema_description:"See routing.disagg.resident."`
	TransferFixed    *float64 `yaml:"transfer_fixed" jsonschema_description:"See routing.disagg.transfer_fixed."`
	TransferPerToken *float64 `yaml:"transfer_per_token" jsonschema_description:"See routing.disagg.transfer_per_token."`
	LocalBelow       *int64   `yaml:"local_below" jsonschema_description:"See routing.disagg.local_below."`
	SameZone         *bool    `yaml:"same_zone" jsonschema_description:"See routing.disagg.same_zone."`
}

// Check is the comparison with the engine's tokenizer.
type Check struct {
	Disabled bool     `yaml:"disabled" jsonschema_description:"Never compare."`
	Every    int      `yaml:"every" jsonschema:"minimum=1" jsonschema_description:"Compare one request in this many."`
	Retry    Duration `yaml:"retry" jsonschema_description:"How soon to check again after a difference, or an engine that did not answer."`
	Timeout  Duration `yaml:"timeout" jsonschema_description:"Timeout of one comparison or remote rendering."`
	MaxBody  Bytes    `yaml:"max_body" jsonschema_description:"Largest request body that is compared; up to 12 bodies are stored per worker."`
	Renderer string   `yaml:"renderer" jsonschema_description:"URL of a vLLM renderer that computes token ids where the tokenizer cannot."`
}

// Workers are the sources of workers.
type Workers struct {
	Static     []Worker    `yaml:"static" jsonschema_description:"A fixed list."`
	File       string      `yaml:"file" jsonschema_description:"YAML file with a list of workers, reloaded when it changes."`
	DNS        []DNS       `yaml:"dns" jsonschema_description:"DNS names whose addresses are workers."`
	Kubernetes *Kubernetes `yaml:"kubernetes" jsonschema_description:"Pods of an InferencePool or of a label selector."`
	Health     Health      `yaml:"health" jsonschema_description:"Health checks of engines."`
	Scrape     Duration    `yaml:"scrape" jsonschema_description:"How often engines' /metrics are read; 0: never."`
}

// PushEndpoint is the endpoint of a worker whose events are pushed by relays over gRPC.
const PushEndpoint = "push:"

// Sources names where workers come from.
func (w *Workers) Sources() string {
	var names []string
	for i := range w.DNS {
		names = append(names, "workers.dns "+w.DNS[i].Name)
	}
	if w.File != "" {
		names = append(names, "workers.file "+w.File)
	}
	if k := w.Kubernetes; k != nil && len(k.Pools) > 0 {
		names = append(names, "workers.kubernetes, pods by the selector of InferencePool "+strings.Join(k.Pools, ", "))
	} else if k != nil {
		labels := slices.DeleteFunc([]string{k.LabelSelector}, func(s string) bool { return s == "" })
		for _, key := range slices.Sorted(maps.Keys(k.Selector)) {
			labels = append(labels, key+"="+k.Selector[key])
		}
		names = append(names, "workers.kubernetes, pods of kubectl get pods -l '"+strings.Join(labels, ",")+"'")
	}
	return cmp.Or(strings.Join(names, ", "), "the configuration names none")
}

// Worker is one engine process.
type Worker struct {
	Name      string            `yaml:"name" jsonschema_description:"Unique name; empty: the address."`
	Address   string            `yaml:"address" jsonschema_description:"'ip:port' of the engine's HTTP API."`
	Engine    string            `yaml:"engine" jsonschema:"enum=vllm,enum=sglang,enum=trtllm" jsonschema_description:"Engine kind."`
	Role      string            `yaml:"role" jsonschema:"enum=both,enum=prefill,enum=decode" jsonschema_description:"Role of the worker."`
	Models    []string          `yaml:"models" jsonschema_description:"Served models; empty: every model."`
	Ranks     int               `yaml:"ranks" jsonschema:"minimum=0,maximum=1024" jsonschema_description:"Number of data-parallel ranks; 0: none, or the engine chooses."`
	StartRank int               `yaml:"start_rank" jsonschema:"minimum=0,maximum=65535" jsonschema_description:"Global rank of the first local rank (vLLM hybrid load balancing): the header carries the local rank, events the global one."`
	RankBy    string            `yaml:"rank_by" jsonschema:"enum=header,enum=port,enum=none" jsonschema_description:"How a rank is addressed: by the header X-data-parallel-rank, by its own port (port + rank), or not at all."`
	BlockSize int               `yaml:"block_size" jsonschema:"minimum=0,maximum=65536" jsonschema_description:"Tokens per KV block of the engine; 0: taken from its events."`
	Events    Events            `yaml:"events" jsonschema_description:"The worker's KV events."`
	Speed     float64           `yaml:"speed" jsonschema:"exclusiveMinimum=0,maximum=1000000" jsonschema_description:"Relative speed: costs are divided by it."`
	Labels    map[string]string `yaml:"labels" jsonschema_description:"Labels, such as zone."`
	Disagg    WorkerDisagg      `yaml:"disagg" jsonschema_description:"Settings of the worker for the prefill/decode connector."`
}

// Events is where a worker publishes.
type Events struct {
	Endpoint string `yaml:"endpoint" jsonschema_description:"ZMQ endpoint of rank 0, e.g. tcp://10.0.0.1:5557 (rank r: port + r), http:// for TensorRT-LLM's poll, or 'push:' for relays that push over gRPC. Empty: no events."`
	Replay   string `yaml:"replay" jsonschema_description:"ZMQ replay endpoint of rank 0 (rank r: port + r)."`
	Topic    string `yaml:"topic" jsonschema_description:"ZMQ topic; empty: all."`
	Bind     bool   `yaml:"bind" jsonschema_description:"Kvlane binds the endpoint and the engine connects to it, as vLLM does if its endpoint has no '*'. Not possible with several replicas."`
}

// WorkerDisagg are the settings of a worker that connectors need.
type WorkerDisagg struct {
	BootstrapPort int    `yaml:"bootstrap_port" jsonschema:"minimum=0,maximum=65535" jsonschema_description:"SGLang and Mooncake bootstrap port of a prefill worker; 0: 8998."`
	ReceiverHost  string `yaml:"receiver_host" jsonschema_description:"LMCache receiver host of a decode worker."`
	InitPorts     []int  `yaml:"receiver_init_ports" jsonschema_description:"LMCache receiver init ports of a decode worker."`
	AllocPorts    []int  `yaml:"receiver_alloc_ports" jsonschema_description:"LMCache receiver alloc ports of a decode worker."`
	QueryPort     int    `yaml:"receiver_query_port" jsonschema:"minimum=0,maximum=65535" jsonschema_description:"LMCache receiver query port of a decode worker; 0: none."`
	ZMQ           string `yaml:"zmq" jsonschema_description:"P2P-NCCL address 'ip:port'."`
	HandshakePort int    `yaml:"handshake_port" jsonschema:"minimum=0,maximum=65535" jsonschema_description:"MoRIIO handshake port; 0: as the prefill engine says, or 6301 for moriio-write, which needs it for both sides."`
	NotifyPort    int    `yaml:"notify_port" jsonschema:"minimum=0,maximum=65535" jsonschema_description:"MoRIIO notify port; 0: as the prefill engine says, or 61005 for moriio-write, which needs it for both sides."`
	EngineID      string `yaml:"engine_id" jsonschema_description:"Engine id of a prefill worker's KV transfers (vLLM's kv_transfer_config), for nixl-push."`
	SideHost      string `yaml:"side_channel_host" jsonschema_description:"Host of the NIXL side channel of a prefill worker; empty: as the engine says, or the worker's address for nixl-push."`
	SidePort      int    `yaml:"side_channel_port" jsonschema:"minimum=0,maximum=65535" jsonschema_description:"Port of rank 0's NIXL side channel of a prefill worker (rank r: port + r), for nixl-push; 0: 5600."`
}

// DNS is a name whose addresses are workers.
type DNS struct {
	Name   string   `yaml:"name" jsonschema_description:"Host name (A/AAAA) to resolve."`
	Port   int      `yaml:"port" jsonschema:"minimum=1,maximum=65535" jsonschema_description:"HTTP port of the engines."`
	Every  Duration `yaml:"every" jsonschema_description:"How often the name is resolved; at least 100ms."`
	Worker Worker   `yaml:"worker" jsonschema_description:"Settings of all workers of the name; the address is filled in. In events and disagg '$ip' stands for the address."`
}

// Kubernetes selects pods.
type Kubernetes struct {
	Pools          []string          `yaml:"pools" jsonschema_description:"Names of InferencePools v1, one or several."`
	Namespace      string            `yaml:"namespace" jsonschema_description:"Namespace of pool and pods; empty: the namespace that Kvlane runs in."`
	Selector       map[string]string `yaml:"selector" jsonschema_description:"Pod labels, without an InferencePool."`
	LabelSelector  string            `yaml:"label_selector" jsonschema_description:"Pods by a selector as kubectl takes it, such as 'app in (a, b), tier != test'; with selector both must fit."`
	Ports          []int             `yaml:"ports" jsonschema_description:"HTTP ports of a pod, with selector or label_selector."`
	Kubeconfig     string            `yaml:"kubeconfig" jsonschema_description:"File; empty: in-cluster."`
	RankPerPort    bool              `yaml:"rank_per_port" jsonschema_description:"The engine has one port per rank: the i-th port of a pod is its rank i."`
	RoleLabels     []string          `yaml:"role_labels" jsonschema_description:"Pod labels that carry a role, in order; empty: kvlane.dev/role and the labels of llm-d and Dynamo."`
	ConnectorHosts []string          `yaml:"connector_hosts" jsonschema_description:"Hosts other than its own address that a pod's annotations (receiver-host, side-channel-host, zmq) may name. Other engines connect to them."`
	Objectives     []string          `yaml:"objectives" jsonschema_description:"API groups (llm-d.ai, inference.networking.x-k8s.io) whose InferenceObjectives (v1alpha2) of the namespace are watched: their priorities, by the names that requests carry (routing.trust_objectives). Those for other pools are left out; routing.objectives and groups that are listed first take precedence."`
	NeverAsk       bool              `yaml:"never_ask" jsonschema_description:"Do not query engines about themselves: use only labels, annotations and 'worker'."`
	Worker         Worker            `yaml:"worker" jsonschema_description:"Settings of all pods; labels and annotations of a pod take precedence. In events and disagg '$ip' stands for the pod's address, in disagg '$pod' for its name."`
}

// Health is how engines are checked.
type Health struct {
	Every    Duration `yaml:"every" jsonschema_description:"Interval; 0: no checks."`
	Timeout  Duration `yaml:"timeout" jsonschema_description:"Timeout of one check; the first check of a worker ends after 1.5 s at most."`
	Failures int      `yaml:"failures" jsonschema:"minimum=1" jsonschema_description:"Consecutive failures until a worker is taken out. A refused connection takes it out immediately."`
}

// Routing is how targets are chosen. The keys of routing.Config are inline.
type Routing struct {
	Preset        string         `yaml:"preset" jsonschema_description:"Named policy, see docs/routing.md; 'policy' overrides single values of it."`
	PrefillPreset string         `yaml:"prefill_preset" jsonschema_description:"Preset of the prefill pool, with disaggregation."`
	DecodePreset  string         `yaml:"decode_preset" jsonschema_description:"Preset of the decode pool, with disaggregation."`
	Shadow        []string       `yaml:"shadow" jsonschema:"maxItems=4" jsonschema_description:"Presets that decide each explained request again without acting; metrics (kvlane_shadow_…) and explanations compare them. Requests that may be split between prefill and decode are left out."`
	Headers       []string       `yaml:"conversation_headers" jsonschema_description:"Headers that carry a conversation id, in order; an id in the body takes precedence."`
	Trusted       bool           `yaml:"trust_overrides" jsonschema_description:"Honour x-kvlane-pin, x-kvlane-exclude, x-kvlane-priority and what trust_objectives honours. Enable it only if untrusted clients cannot send these headers."`
	TrustedNames  bool           `yaml:"trust_objectives" jsonschema_description:"Honour x-llm-d-inference-objective and x-gateway-inference-objective of requests: the name of an objective, whose priority the request has. Clients that can send these headers choose among the priorities that exist."`
	Objectives    map[string]int `yaml:"objectives" jsonschema_description:"Priorities by name of objective, in addition to those of workers.kubernetes.objectives; requests with a priority below 0 may be shed early."`
	Wait          Wait           `yaml:"wait" jsonschema_description:"Queue for requests while all targets are at their limits, instead of an immediate 429. Use flow instead, which also shares capacity between tenants."`
	Speculate     Duration       `yaml:"speculate" jsonschema_description:"How long a forwarded prompt counts as cached before an event confirms it; 0: not at all."`

	routing.Config `yaml:",inline"`
}

// Wait bounds the queue of requests for which no target has capacity.
type Wait struct {
	Requests int      `yaml:"max_requests" jsonschema:"minimum=0" jsonschema_description:"Maximum length of the queue; 0: no queue. A full queue drops requests of the lowest priority for those of greater priority."`
	Timeout  Duration `yaml:"timeout" jsonschema_description:"Longest wait; after that the request is answered 429. Must be shorter than envoy.message_timeout."`
}

// prepare sets the presets, which single values then override.
func (r *Routing) prepare(value func(key string) (string, bool), bad report) {
	for _, p := range []struct {
		key string
		to  *routing.Policy
	}{{"preset", &r.Policy}, {"prefill_preset", &r.Disagg.Prefill}, {"decode_preset", &r.Disagg.Decode}} {
		name, given := value(p.key)
		if !given {
			continue
		}
		policy, known := routing.Preset(name)
		if !known {
			bad(p.key, "%s", noPreset(name))
			continue
		}
		*p.to = policy
	}
}

func noPreset(name string) string {
	known := routing.Presets()
	return fmt.Sprintf("no preset %q%s", name, cmp.Or(hint(Nearest(name, known)), "; there are "+strings.Join(known, ", ")))
}

// Index bounds the KV index.
type Index struct {
	BlockSize int    `yaml:"block_size" jsonschema:"minimum=1,maximum=1024" jsonschema_description:"Tokens per block of the index."`
	MaxBytes  Bytes  `yaml:"max_bytes" jsonschema_description:"Memory for the index."`
	Key       string `yaml:"key" jsonschema_description:"Key of the block hash; must be the same on replicas that exchange snapshots. Empty: random."`
	KeyFile   string `yaml:"key_file" jsonschema_description:"File with the key, instead of key; surrounding white space is ignored."`
	Peers     Peers  `yaml:"peers" jsonschema_description:"Other replicas, from one of which the index is copied at the start. See docs/feeds.md."`
}

// Peers are the other replicas; a starting replica copies the index from one of them.
type Peers struct {
	Addresses []string `yaml:"addresses" jsonschema_description:"'host:port' of other replicas' listen.address; a name may have many addresses (a headless service). If set, this replica serves copies too, and index.key must be set."`
	Timeout   Duration `yaml:"timeout" jsonschema_description:"How long the start waits for a copy, all peers together; after that it continues with an empty index."`
	CAFile    string   `yaml:"ca_file" jsonschema_description:"PEM certificates of the CAs that sign peers' certificates; empty: plaintext."`
	Name      string   `yaml:"server_name" jsonschema_description:"Name that peers' certificates must have; empty: the host of the address."`
}

// Secret is the key of the block hash, "" for a random one.
func (i *Index) Secret() (string, error) {
	if i.KeyFile == "" {
		return i.Key, nil
	}
	return readSecret("index.key_file", i.KeyFile)
}

// Values of Disagg.Usage.
const (
	UsageOfDecode  = "decode"
	UsageOfPrefill = "prefill"
)

// Disagg configures how prefill requests are sent; routing.disagg decides when.
type Disagg struct {
	Connector  string       `yaml:"connector" jsonschema:"enum=,enum=nixl,enum=nixl-push,enum=mooncake,enum=p2p-nccl,enum=moriio,enum=moriio-write,enum=lmcache,enum=sharedstorage,enum=sglang,enum=trtllm,enum=trtllm-generation-first,enum=sidecar" jsonschema_description:"KV transfer protocol between prefill and decode; empty: no disaggregation. See docs/disaggregation.md."`
	Timeout    Duration     `yaml:"timeout" jsonschema_description:"Timeout of a prefill request."`
	Attempts   int          `yaml:"attempts" jsonschema:"minimum=1" jsonschema_description:"Prefill targets to try before the decode target computes the prompt itself."`
	HeadStart  Duration     `yaml:"head_start" jsonschema_description:"Where prefill and decode run concurrently: how long to wait for an early failure of the prefill request, and try another target, before decode starts."`
	FirstToken string       `yaml:"first_token" jsonschema:"enum=recompute,enum=append" jsonschema_description:"LMCache: what to do with the token that the prefill worker generated. recompute: the decode worker generates it again. append: it is appended to the prompt, and the client's response begins with the second token."`
	Trust      bool         `yaml:"trust_client_params" jsonschema_description:"Keep clients' KV transfer parameters (kv_transfer_params, bootstrap_room, disaggregated_params and the like) in requests. By default they are removed, as they name hosts that engines would fetch from. Enable it only if all clients are trusted, such as a router of your own."`
	Usage      string       `yaml:"usage" jsonschema:"enum=decode,enum=prefill" jsonschema_description:"Which usage the client gets. decode: that of the decode worker, unchanged. prefill: prompt tokens and cached tokens of the prefill worker; Envoy then sends Kvlane the response bodies of split requests only."`
	Workers    WorkerDisagg `yaml:"workers" jsonschema_description:"Defaults for workers that do not set them in their own disagg section."`
}

// Explain is what is stored of decisions.
type Explain struct {
	Keep   int  `yaml:"keep" jsonschema:"minimum=0,maximum=100000" jsonschema_description:"Number of recent decisions shown by GET /debug/decisions."`
	Header bool `yaml:"header" jsonschema_description:"Add x-kvlane-target, x-kvlane-matched-tokens, x-kvlane-prefill, x-kvlane-prefill-matched-tokens and x-kvlane-first-turn to responses. For tests only: they tell every client which prompts others have sent."`
}

// Log is logging.
type Log struct {
	Level     string `yaml:"level" jsonschema:"enum=debug,enum=info,enum=warn,enum=error" jsonschema_description:"Lowest level that is logged."`
	Decisions bool   `yaml:"decisions" jsonschema_description:"Log every decision."`
}

// Default returns the configuration of an empty file.
func Default() Config {
	return Config{
		Listen: Listen{Address: "unix:/run/kvlane/kvlane.sock", MinTLS: "VersionTLS12"},
		Admin:  Admin{Address: "127.0.0.1:9090"},
		Envoy: Envoy{
			Ingress:        "127.0.0.1:8080",
			Admin:          "127.0.0.1:9901",
			Paths:          []string{"default"},
			MessageTimeout: Duration(300 * time.Second),
			StallTimeout:   Duration(2 * time.Second),
			UploadTimeout:  Duration(time.Minute),
			MaxHeap:        1536 << 20,
			ConnectionAge:  Duration(time.Minute),
			RequestBody:    "BUFFERED",
			ResponseBody:   "NONE",
		},
		Limits: Limits{
			MaxBody: 32 << 20, Bodies: BodiesInFlight{Bytes: 512 << 20, Count: 10_000}, MaxStreams: 10_000,
			DecisionTimeout: Duration(250 * time.Millisecond), UnknownModel: "refuse",
		},
		Workers: Workers{
			Health: Health{Every: Duration(time.Second), Timeout: Duration(5 * time.Second), Failures: 2},
			Scrape: Duration(time.Second),
		},
		Tenants: Tenants{Required: true},
		Routing: Routing{
			Preset: routing.DefaultPreset, PrefillPreset: routing.DefaultPreset, DecodePreset: "decode",
			// Agents send: Claude Code x-claude-code-session-id; Codex thread-id, and a session-id that all threads of
			// a session share (older versions session_id); opencode its own two and x-session-id; LiteLLM its own.
			Headers: []string{"x-dynamo-session-id", "x-session-id", "x-claude-code-session-id", "thread-id", "session-id", "session_id",
				"x-opencode-session-id", "x-opencode-session", "x-litellm-session-id", "x-correlation-id", "x-session-affinity", "x-multi-turn-session-id"},
			Wait:      Wait{Timeout: Duration(10 * time.Second)},
			Speculate: Duration(5 * time.Second),
			Config:    routing.DefaultConfig(),
		},
		Flow:  defaultFlow(),
		SLO:   SLO{Unmet: string(routing.UnmetRoute)},
		Index: Index{BlockSize: 16, MaxBytes: 1 << 30, Peers: Peers{Timeout: Duration(10 * time.Second)}},
		Fleet: Fleet{
			Mode: FleetOff, Name: "kvlane", SyncTimeout: Duration(5 * time.Second), Embedded: FleetEmbed{Listen: "127.0.0.1:6222"},
			Persist: FleetStore{MaxBytes: 64 << 20, TTL: Duration(24 * time.Hour)},
		},
		Disagg:  Disagg{Timeout: Duration(120 * time.Second), Attempts: 2, HeadStart: Duration(10 * time.Millisecond), FirstToken: "recompute", Usage: UsageOfDecode},
		Explain: Explain{Keep: 256},
		Log:     Log{Level: "info"},
		Drain:   Duration(20 * time.Second),
		Quiet:   Duration(time.Second),
	}
}

func defaultWorker() Worker {
	return Worker{Engine: "vllm", Role: "both", RankBy: "header", Speed: 1}
}

// DefaultKubernetes is the section with all defaults.
func DefaultKubernetes() Kubernetes { return Kubernetes{Worker: defaultWorker()} }

func defaultDNS() DNS { return DNS{Every: Duration(5 * time.Second), Worker: defaultWorker()} }

// DefaultModel returns the defaults of an entry of models.
func DefaultModel() Model {
	return Model{Engine: "vllm", ToolParser: true, CacheBytes: 16 << 20, Check: Check{Every: 1000, Retry: Duration(time.Minute), Timeout: Duration(5 * time.Second), MaxBody: 1 << 20}}
}

// setDefaults sets the defaults of list elements and optional sections, which Default does not contain.
func setDefaults(v reflect.Value) {
	switch p := v.Addr().Interface().(type) {
	case *Worker:
		*p = defaultWorker()
	case *Model:
		*p = DefaultModel()
	case *DNS:
		*p = defaultDNS()
	case *Kubernetes:
		*p = DefaultKubernetes()
	}
}
