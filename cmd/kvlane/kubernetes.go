package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"
	"k8s.io/klog/v2"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/gateway"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/internal/workers/kube"
)

// kubernetes is the source of workers in a cluster.
type kubernetes struct {
	options kube.Options
	asker   *workers.Asker
	client  *kube.Client
	source  atomic.Pointer[kube.Source] // nil until start

	objectives atomic.Int64

	mu     sync.Mutex
	synced time.Time // zero until every pool and its pods were listed
}

func newKubernetes(c *config.Config, log zerolog.Logger) (*kubernetes, error) {
	section := c.Workers.Kubernetes
	var access kube.Access
	var err error
	if section.Kubeconfig != "" {
		access, err = kube.Kubeconfig(section.Kubeconfig)
	} else {
		access, err = kube.InCluster()
	}
	if err != nil {
		return nil, err
	}
	klog.SetSlogLogger(slog.New(zerolog.NewSlogHandler(log))) // client-go's own
	client, err := kube.NewClient(access)
	if err != nil {
		return nil, err
	}
	k := &kubernetes{client: client, options: kube.Options{Client: client, Kubernetes: section, Log: log, Models: len(c.Models) > 1}}
	if !section.NeverAsk {
		k.asker = workers.NewAsker(c.Workers.Health.Timeout.Std())
		k.options.Ask = k.asker.Ask
	}
	return k, nil
}

func (k *kubernetes) start(set func(string, []workers.Entry), setObjectives func(map[string]int)) {
	k.options.Set = set
	k.options.SetObjectives = func(priorities map[string]int) {
		k.objectives.Store(int64(len(priorities)))
		setObjectives(priorities)
	}
	k.source.Store(kube.Start(context.Background(), k.options))
}

func (k *kubernetes) close() {
	if source := k.source.Load(); source != nil {
		source.Close()
	}
	if k.asker != nil {
		k.asker.Close()
	}
	k.client.Close()
}

// waiting returns which pools or pods are not listed yet, and since when all of them are.
func (k *kubernetes) waiting() (since time.Time, why string) {
	source := k.source.Load()
	if source == nil {
		return time.Time{}, "pools are not known yet"
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.synced.IsZero() {
		return k.synced, "" // the workers stay if the API server goes away later
	}
	if why := source.Waiting(); why != "" {
		return time.Time{}, why
	}
	k.synced = time.Now()
	return k.synced, ""
}

// list returns what a method of the source lists, nothing while there is no source. k may be nil.
func (k *kubernetes) list(of func(*kube.Source) []string) []string {
	if k == nil || k.source.Load() == nil {
		return nil
	}
	return of(k.source.Load())
}

// collect emits metrics of the pools.
func (k *kubernetes) collect(emit observe.Emit) {
	if len(k.options.Kubernetes.Objectives) > 0 {
		emit("objectives", "InferenceObjectives that are known (workers.kubernetes.objectives).", float64(k.objectives.Load()))
	}
	missing := k.list((*kube.Source).Missing)
	for _, p := range k.pools() {
		if p.Name == "" {
			continue // a selector
		}
		pool, exists := p.Namespace+"/"+p.Name, 1.0
		if slices.Contains(missing, pool) {
			exists = 0
		}
		emit("pool_exists", "1 for an InferencePool that exists, 0 for one that is configured and does not.", exists, "pool", pool)
	}
}

func (k *kubernetes) pools() []workers.Pool {
	if source := k.source.Load(); source != nil {
		return source.Pools()
	}
	return nil
}

// gate refuses requests for other pools.
func (k *kubernetes) gate(next extproc.Handler, m *observe.Metrics) extproc.Handler {
	return &gateway.Gate{Next: next, Pools: k.pools, Refused: func(r *extproc.Request) {
		api, _ := body.Detect(r.Method, r.Path)
		m.Requests.WithLabelValues(api.String(), "rejected").Inc()
		m.Rejected.WithLabelValues("503", "kvlane_other_pool").Inc()
	}}
}

// poolFlags describe a pool on the command line, with the flag names of the Gateway API
// inference extension's endpoint pickers.
type poolFlags struct {
	conformance     bool
	pool, namespace string
	bind            string
	port, health    int
	metrics         int
	certs, minTLS   string
	selector        string
	ports           []int
	ignored         []string // flags without effect that were given, each with the reason
}

// ignoredFlags are flags of GAIE's and llm-d's endpoint pickers without effect here, by reason. Those in valued take a value.
var ignoredFlags = []struct{ why, valued, switches string }{
	{"logs are JSON, with times in RFC 3339 and without stack traces", "zap-encoder zap-time-encoding zap-stacktrace-level", ""},
	{"log.level sets it", "zap-log-level v", "zap-devel"},
	{"pools are of inference.networking.k8s.io", "pool-group", ""},
	{"TLS and plaintext are served on one port", "", "secure-serving"},
	{"certificates are always reloaded", "", "enable-cert-reload"},
	{"gRPC health is always served", "", "health-checking"},
	{"all replicas are active", "", "ha-enable-leader-election"},
	{"profiles are for this machine or holders of admin.token_file", "", "enable-pprof"},
	{"/metrics needs no token", "", "metrics-endpoint-auth"},
	{"OTEL_EXPORTER_OTLP_ENDPOINT turns it on", "", "tracing"},
	{"workers.scrape sets it", "refresh-metrics-interval", ""},
	{"routing.report_ttl sets it", "metrics-staleness-threshold", ""},
	{"the engine's kind and the worker's address say where its metrics are", "model-server-metrics-path model-server-metrics-port kv-cache-usage-percentage-metric total-queued-requests-metric total-running-requests-metric cache-info-metric", ""},
	{"models[].adapters lists adapters", "lora-info-metric", ""},
	{"engines are asked over plain HTTP", "model-server-metrics-scheme", "model-server-metrics-https-insecure-skip-verify"},
	{"metrics are always current and complete", "refresh-prometheus-metrics-interval", "enable-grpc-stream-metrics"},
	{"a request's subset of endpoints is always kept", "", "disable-endpoint-subset-filter"},
	{"kvlane explain shows costs", "", "emit-endpoint-scores"},
	{"/debug/decisions shows decisions", "", "enable-plugin-state-debug"},
	{"workers.kubernetes.worker.engine sets it", "engine-label-key", ""},
	{"limits.max_body sets it", "grpc-max-recv-msg-size grpc-max-send-msg-size", ""},
	{"drain sets it", "drain-timeout", ""},
	{"there are no plugins", "", "allow-experimental-plugins"},
	{"the cipher suites are those of Go", "tls-cipher-suites", ""},
	{"the admin port has no TLS: bound who reaches it (networkPolicy of the chart)", "metrics-cert-dir metrics-client-ca-file", ""},
}

// portFlag is a port number.
type portFlag int

func (p *portFlag) String() string { return strconv.Itoa(int(*p)) }

func (p *portFlag) Set(text string) error {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return errors.New("want a port from 1 to 65535")
	}
	*p = portFlag(n)
	return nil
}

func kubernetesFlags(f *flag.FlagSet) *poolFlags {
	k := &poolFlags{}
	f.BoolVar(&k.conformance, "conformance", false, "obey test-epp-endpoint-selection and answer with x-conformance-test-served-endpoint: for conformance tests only")
	f.StringVar(&k.pool, "pool-name", "", "`InferencePool` instead of workers.kubernetes.pools")
	f.StringVar(&k.namespace, "pool-namespace", "", "`namespace` instead of workers.kubernetes.namespace")
	f.Var((*portFlag)(&k.port), "grpc-port", "`port` instead of that of listen.address")
	f.Var((*portFlag)(&k.health), "grpc-health-port", "`port` instead of that of listen.health")
	f.StringVar(&k.bind, "bind", "", "`IP` on which --grpc-port and --grpc-health-port listen; empty: all")
	f.Var((*portFlag)(&k.metrics), "metrics-port", "`port` instead of that of admin.address")
	f.StringVar(&k.certs, "cert-path", "", "`folder` with tls.crt and tls.key, instead of listen.cert_file and listen.key_file")
	f.Func("tls-min-version", "VersionTLS12 or VersionTLS13, instead of listen.tls_min_version; `version`s before 1.2 are never served", func(text string) error {
		if !slices.Contains([]string{"VersionTLS10", "VersionTLS11", "VersionTLS12", "VersionTLS13"}, text) {
			return errors.New("want VersionTLS12 or VersionTLS13")
		}
		k.minTLS = max(text, "VersionTLS12")
		return nil
	})
	f.StringVar(&k.selector, "endpoint-selector", "", "pods by `labels`, such as 'app in (a,b),tier=c', instead of workers.kubernetes.selector and label_selector")
	f.Func("endpoint-target-ports", "`ports` of a pod, with --endpoint-selector", func(text string) error {
		for one := range strings.SplitSeq(text, ",") {
			var port portFlag
			if err := port.Set(one); err != nil {
				return err
			}
			k.ports = append(k.ports, int(port))
		}
		return nil
	})
	for name, say := range map[string]func(string) string{"config-file": func(file string) string { return advice(os.ReadFile(file)) }, "config-text": func(text string) string { return advice([]byte(text), nil) }} {
		f.Func(name, "EndpointPickerConfig, taken and ignored: the log names the nearest `configuration`", func(value string) error {
			k.ignored = append(k.ignored, "--"+name+" has no effect: "+say(value)+" (docs/kubernetes.md, Coming from another endpoint picker)")
			return nil
		})
	}
	for _, other := range ignoredFlags {
		usage, note := "taken and ignored: "+other.why, func(name string) func(string) error {
			return func(string) error {
				k.ignored = append(k.ignored, "--"+name+" has no effect: "+other.why)
				return nil
			}
		}
		for name := range strings.FieldsSeq(other.valued) {
			f.Func(name, usage, note(name))
		}
		for name := range strings.FieldsSeq(other.switches) {
			f.BoolFunc(name, usage, note(name))
		}
	}
	return k
}

// load reads the configuration, which is optional if the command line names a pool.
func (k *poolFlags) load(file string) (c *config.Config, warnings []config.Problem, err error) {
	alone := k.pool != "" || k.selector != ""
	switch {
	case file == "" && !alone:
		return nil, nil, usageError{"needs a FILE, or --pool-name"}
	case file == "":
		empty := config.Default()
		c, k.port = &empty, cmp.Or(k.port, 9002)
	default:
		if c, warnings, err = config.Load(file); err != nil {
			return nil, nil, err
		}
	}
	if c.Workers.Kubernetes == nil && alone {
		c.Workers.Kubernetes = new(config.DefaultKubernetes())
		warnings = slices.DeleteFunc(warnings, func(p config.Problem) bool { return p.Path == "workers" }) // that there are none
	}
	s := c.Workers.Kubernetes
	if k.pool != "" {
		// The ports belong to the selector.
		s.Pools, s.Selector, s.LabelSelector, s.Ports = []string{k.pool}, nil, "", nil
	}
	if k.selector != "" {
		if k.pool != "" || len(k.ports) == 0 {
			return nil, nil, usageError{"--endpoint-selector needs --endpoint-target-ports, and is not for --pool-name"}
		}
		s.Pools, s.Selector, s.LabelSelector, s.Ports = nil, nil, k.selector, k.ports
	}
	if k.namespace != "" {
		if c.Workers.Kubernetes == nil {
			return nil, nil, usageError{"--pool-namespace: there is no workers.kubernetes in the configuration; name the pool with --pool-name"}
		}
		c.Workers.Kubernetes.Namespace = k.namespace
	}
	if err := k.check(c, file); err != nil {
		return nil, nil, err
	}
	for address, port := range map[*string]int{&c.Listen.Address: k.port, &c.Listen.Health: k.health, &c.Admin.Address: k.metrics} {
		if port != 0 {
			*address = net.JoinHostPort(k.bind, strconv.Itoa(port))
		}
	}
	c.Listen.MinTLS = cmp.Or(k.minTLS, c.Listen.MinTLS)
	if k.certs != "" {
		c.Listen.CertFile, c.Listen.KeyFile = filepath.Join(k.certs, "tls.crt"), filepath.Join(k.certs, "tls.key")
	}
	return c, warnings, nil
}

// check validates the values of flags like those of the file.
func (k *poolFlags) check(c *config.Config, file string) error {
	if k.pool == "" && k.namespace == "" && k.selector == "" {
		return nil
	}
	flags := map[string]string{"pools[0]": "--pool-name", "namespace": "--pool-namespace", "label_selector": "--endpoint-selector", "ports": "--endpoint-target-ports"}
	var problems []string
	for _, p := range c.Workers.Kubernetes.Problems() {
		if flag := flags[p.Path]; flag != "" {
			problems = append(problems, flag+": "+p.Message)
		} else {
			p.Path = "workers.kubernetes." + p.Path
			problems = append(problems, config.Place(file, config.ProblemsError{p}).Error())
		}
	}
	if len(problems) > 0 {
		return usageError{strings.Join(problems, "\n")}
	}
	return nil
}

// wrap adds the conformance behaviour to the handler, if it is enabled.
func (k *poolFlags) wrap(s *service, next extproc.Handler) extproc.Handler {
	if !k.conformance {
		return next
	}
	return &gateway.Conformance{Next: next, Endpoints: func() []string {
		var all []string
		if s.kube != nil {
			for _, p := range s.kube.pools() {
				all = append(all, p.Endpoints...)
			}
			return all
		}
		for _, w := range s.registry.Workers() {
			all = append(all, w.Address)
		}
		return all
	}}
}
