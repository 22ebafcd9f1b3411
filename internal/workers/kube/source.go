package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/workers"
)

// Options of a Source.
type Options struct {
	Client     *Client
	Kubernetes *config.Kubernetes
	// Set stores a pool's workers, as workers.Registry.Set does.
	Set func(source string, list []workers.Entry)
	// Ask queries the engine at an address; nil: engines are not queried.
	Ask func(ctx context.Context, address string) (workers.Facts, error)
	// Models makes workers serve the models that their engines list. Leave it false if only one model is configured: a
	// request for an adapter that was just loaded would not find a worker.
	Models bool
	// SetObjectives receives the priorities of the InferenceObjectives by name, after the first list and on changes. It
	// must not change the map. Required with Kubernetes.Objectives.
	SetObjectives func(priorities map[string]int)
	Log           zerolog.Logger
}

// Source lists the pods of pools as workers until Close. It is safe for concurrent use.
type Source struct {
	opts      Options
	namespace string
	ctx       context.Context
	stop      context.CancelFunc
	wg        sync.WaitGroup

	current    atomic.Pointer[[]workers.Pool] // what Pools returns
	mu         sync.Mutex                     // guards the rest
	pools      []*pool
	objectives map[string][]*Objective // by API group
	failing    map[string]string       // what cannot be followed, and why
}

// pool is an InferencePool or the selector of the configuration.
type pool struct {
	src *Source
	// name is "" for a selector.
	name string
	log  zerolog.Logger

	// These two are used only by the goroutine that follows the pool.
	endWatch context.CancelFunc
	watching string // selector

	// publishing is held by publish, so that an older list never replaces a newer one. due reports that a call of
	// publish waits for it and will publish all changes made before.
	publishing sync.Mutex
	due        atomic.Bool

	// The rest is guarded by src.mu.
	spec    *Pool // nil until seen, and while the pool does not exist
	listed  bool  // pools were listed
	pods    []*Pod
	synced  bool // pods were listed
	asked   map[endpoint]*question
	members []string // addresses of the last published list, sorted; replaced, never changed
	warned  map[endpoint]string
	known   map[endpoint]described
}

// described caches a result of describe. It is valid while the pod, the engine's facts and the
// index of the port are unchanged.
type described struct {
	pod   *Pod
	facts *workers.Facts
	place int

	worker    config.Worker
	left, err error
}

// endpoint is one port of one incarnation of a pod.
type endpoint struct {
	uid  types.UID
	port int
}

// question is the query of an engine.
type question struct {
	facts  *workers.Facts // nil until answered
	cancel context.CancelFunc
	now    chan struct{} // signals that the pod is ready, so that the engine can answer
}

const (
	firstAsk = 250 * time.Millisecond
	lastAsk  = 5 * time.Second
	// askAgain is the interval of queries for an engine's models: adapters are loaded and unloaded.
	askAgain = time.Minute
)

// Start starts following the pools.
func Start(ctx context.Context, o Options) *Source {
	s := &Source{opts: o, namespace: cmp.Or(o.Kubernetes.Namespace, o.Client.Namespace()), objectives: map[string][]*Objective{}, failing: map[string]string{}}
	s.ctx, s.stop = context.WithCancel(ctx)
	names := o.Kubernetes.Pools
	for _, name := range names {
		p := s.newPool(name)
		one := collection{from: o.Client.of[poolVersion], resource: "inferencepools", namespace: s.namespace, fields: fields.OneTermEqualSelector("metadata.name", name).String(), failed: s.failed("InferencePool " + p.title())}
		s.wg.Go(func() { follow(s.ctx, one, p.poolChanged) })
	}
	if len(names) == 0 {
		p := s.newPool("")
		p.listed = true
		both := []string{labels.SelectorFromSet(o.Kubernetes.Selector).String(), o.Kubernetes.LabelSelector}
		p.follow(strings.Join(slices.DeleteFunc(both, func(one string) bool { return one == "" }), ","))
	}
	for _, version := range objectiveVersions {
		if slices.Contains(o.Kubernetes.Objectives, version.Group) {
			all := collection{from: o.Client.of[version], resource: "inferenceobjectives", namespace: s.namespace, failed: s.failed("InferenceObjectives of " + version.Group)}
			s.wg.Go(func() { follow(s.ctx, all, func(all []*Objective) { s.publishObjectives(version.Group, all, names) }) })
		}
	}
	return s
}

// failed returns a function that stores why something cannot be followed and logs new reasons; nil clears it.
func (s *Source) failed(what string) func(error) {
	return func(err error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		before := s.failing[what]
		if delete(s.failing, what); err == nil {
			return
		}
		advice := "it is tried again"
		switch {
		case apierrors.IsForbidden(err):
			advice = "let Kvlane's service account get, list and watch it (rbac of the chart)"
		case apierrors.IsNotFound(err):
			advice = "install its CustomResourceDefinition"
		}
		err = observe.Certificate(err, "the certificate authority or the server's name of workers.kubernetes.kubeconfig (in a pod: of its service account)")
		s.failing[what] = fmt.Sprintf("%s: %v: %s", what, err, advice)
		if s.failing[what] != before {
			s.opts.Log.Warn().Str("of", what).Err(err).Msg("list or watch ended: " + advice)
		}
	}
}

// Failing returns why the API server does not list or watch something, sorted.
func (s *Source) Failing() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Values(s.failing))
}

// publishObjectives stores the objectives of an API group and passes the priorities of all groups to SetObjectives. pools are
// those whose objectives count; none: all.
func (s *Source) publishObjectives(group string, all []*Objective, pools []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.objectives[group] = all
	priorities := map[string]int{}
	for _, group := range s.opts.Kubernetes.Objectives {
		for _, o := range s.objectives[group] {
			if _, taken := priorities[o.Name]; !taken && (len(pools) == 0 || slices.Contains(pools, o.Spec.PoolRef.Name)) {
				priorities[o.Name] = o.Spec.Priority
			}
		}
	}
	s.opts.SetObjectives(priorities)
}

func (s *Source) newPool(name string) *pool {
	p := &pool{src: s, name: name, asked: map[endpoint]*question{}, warned: map[endpoint]string{}, known: map[endpoint]described{}}
	p.log = s.opts.Log.With().Str("pool", p.title()).Logger()
	s.mu.Lock()
	s.pools = append(s.pools, p)
	s.refresh()
	s.mu.Unlock()
	return p
}

func (p *pool) title() string {
	if p.name == "" {
		return p.src.namespace + "/selector"
	}
	return p.src.namespace + "/" + p.name
}

// Close stops following. The last lists stay in effect.
func (s *Source) Close() {
	s.stop()
	s.wg.Wait()
}

// Waiting returns what has not been listed yet, "" once every pool was looked up and the pods of existing pools are
// known. At least one pool must exist; other pools that do not exist (Missing) are not waited for.
func (s *Source) Waiting() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	missing, exists := "", false
	for _, p := range s.pools {
		switch {
		case !p.listed:
			return "InferencePool " + p.title() + " is not known yet"
		case p.missing():
			missing = cmp.Or(missing, p.title())
		case !p.synced:
			return "pods of " + p.title() + " are not known yet"
		default:
			exists = true
		}
	}
	if !exists {
		return "there is no InferencePool " + missing
	}
	return ""
}

// Missing returns the pools that were looked up and do not exist, as "namespace/name".
func (s *Source) Missing() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for _, p := range s.pools {
		if p.missing() {
			out = append(out, p.title())
		}
	}
	return out
}

// missing reports whether the pool was looked up and does not exist. The caller holds src.mu.
func (p *pool) missing() bool { return p.listed && p.name != "" && p.spec == nil }

// Asking names a ready pod whose engine has not answered yet, "" if there is none.
func (s *Source) Asking() string {
	if s.opts.Ask == nil {
		return ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.pools {
		for _, pod := range p.pods {
			for _, port := range p.ports() {
				q := p.asked[endpoint{pod.UID, port}]
				if pod.Status.PodIP != "" && pod.Status.unready() == "" && (q == nil || q.facts == nil) {
					return "the engine of pod " + pod.Name + " is being asked"
				}
			}
		}
	}
	return ""
}

// poolChanged applies the pool's specification.
func (p *pool) poolChanged(all []*Pool) {
	p.src.mu.Lock()
	p.listed = true
	if len(all) == 0 {
		if p.spec != nil {
			p.log.Warn().Msg("InferencePool deleted: its workers are removed")
		} else {
			p.log.Warn().Msg("no such InferencePool yet")
		}
		p.spec, p.pods, p.synced = nil, nil, false
		p.src.mu.Unlock()
		p.unfollow()
		p.publish()
		return
	}
	p.spec = all[0]
	p.src.refresh()
	selector := labels.SelectorFromSet(p.spec.Spec.Selector.MatchLabels).String()
	p.src.mu.Unlock()
	if selector != p.watching {
		p.follow(selector)
	} else {
		p.publish() // the ports may have changed
	}
}

// follow watches the pods of selector in place of the previous one. Calls do not overlap.
func (p *pool) follow(selector string) {
	p.unfollow()
	p.watching = selector
	ctx, cancel := context.WithCancel(p.src.ctx)
	p.endWatch = cancel
	pods := collection{from: p.src.opts.Client.of[podVersion], resource: "pods", namespace: p.src.namespace, labels: selector, failed: p.src.failed("pods of " + p.title())}
	p.src.wg.Go(func() {
		follow(ctx, pods, func(all []*Pod) {
			p.src.mu.Lock()
			if ctx.Err() == nil {
				p.pods, p.synced = all, true
			}
			p.src.mu.Unlock()
			p.publish()
		})
	})
}

func (p *pool) unfollow() {
	if p.endWatch != nil {
		p.endWatch()
		p.endWatch, p.watching = nil, ""
		p.src.failed("pods of " + p.title())(nil)
	}
}

// ports returns the HTTP ports of a pod.
func (p *pool) ports() []int {
	if p.name == "" {
		return p.src.opts.Kubernetes.Ports
	}
	if p.spec == nil {
		return nil
	}
	out := make([]int, len(p.spec.Spec.TargetPorts))
	for i, t := range p.spec.Spec.TargetPorts {
		out[i] = t.Number
	}
	return out
}

// publish passes the pool's current workers to Set.
func (p *pool) publish() {
	if p.due.Swap(true) {
		return
	}
	p.publishing.Lock()
	defer p.publishing.Unlock()
	p.due.Store(false)
	p.src.mu.Lock()
	list := p.entries()
	p.members = make([]string, len(list))
	for i := range list {
		p.members[i] = list[i].Address
	}
	slices.Sort(p.members)
	p.src.refresh()
	p.src.mu.Unlock()
	if p.src.ctx.Err() == nil {
		p.src.opts.Set("kubernetes:"+p.title(), list)
	}
}

func (p *pool) entries() []workers.Entry {
	k, ports := p.src.opts.Kubernetes, p.ports()
	var list []workers.Entry
	taken, alive := map[string]bool{}, map[endpoint]bool{}
	for _, pod := range newestFirst(p.pods) {
		if pod.Status.PodIP == "" || pod.Status.over() || taken[pod.Status.PodIP] {
			continue
		}
		taken[pod.Status.PodIP] = true
		for i, port := range ports {
			at := endpoint{pod.UID, port}
			alive[at] = true
			e := workers.Entry{Identity: string(pod.UID), Draining: pod.DeletionTimestamp != nil, Unready: pod.Status.unready()}
			facts := p.ask(at, pod, &e)
			d := p.known[at]
			if d.pod != pod || d.facts != facts || d.place != i {
				d = described{pod: pod, facts: facts, place: i}
				d.worker, d.left, d.err = describe(k, pod, port, i, facts)
				p.known[at] = d
			}
			if errors.Is(d.err, errNotWorker) {
				continue
			}
			p.warn(at, pod.Name, d.left, d.err)
			if d.err != nil {
				continue
			}
			e.Worker = d.worker
			list = append(list, e)
		}
	}
	for at, q := range p.asked {
		if !alive[at] {
			q.cancel()
			delete(p.asked, at)
		}
	}
	maps.DeleteFunc(p.warned, func(at endpoint, _ string) bool { return !alive[at] })
	maps.DeleteFunc(p.known, func(at endpoint, _ described) bool { return !alive[at] })
	keepLast(list)
	return list
}

// keepLast keeps pods that are being deleted in service while no other pod of their role is
// ready, as kube-proxy does with terminating endpoints: better than refusing the request.
func keepLast(list []workers.Entry) {
	fresh := map[string]bool{}
	for i := range list {
		if e := &list[i]; !e.Draining && e.Unready == "" {
			fresh[e.Role] = true
		}
	}
	for i := range list {
		if e := &list[i]; e.Unready == "" && !fresh[e.Role] {
			e.Draining = false
		}
	}
}

// warn logs once which parts of a pod's description were ignored, or why the pod was left out.
func (p *pool) warn(at endpoint, pod string, left, err error) {
	text, advice := "", "labels or annotations not understood"
	if both := errors.Join(left, err); both != nil {
		text = observe.ClipTo(both.Error(), observe.MaxText)
	}
	if err != nil {
		advice = "left out: cannot be a worker"
	}
	if p.warned[at] != text && text != "" {
		p.log.Warn().Str("pod", pod).Int("port", at.port).Str("error", text).Msg(advice)
	}
	p.warned[at] = text
}

// ask returns the engine's answer, nil while there is none; until then a ready pod counts as unready. Engines are
// queried from the start of their container, so that most have answered when the kubelet reports them ready.
func (p *pool) ask(at endpoint, pod *Pod, e *workers.Entry) *workers.Facts {
	if p.src.opts.Ask == nil {
		return nil
	}
	q := p.asked[at]
	if q == nil {
		ctx, cancel := context.WithCancel(p.src.ctx)
		q = &question{cancel: cancel, now: make(chan struct{}, 1)}
		p.asked[at] = q
		address := net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(at.port))
		p.src.wg.Go(func() { p.interview(ctx, q, address) })
	}
	if q.facts == nil && e.Unready == "" {
		e.Unready = "the engine is being asked about itself"
		workers.Poke(q.now)
	}
	return q.facts
}

// interview repeats the query until the engine answers. Then it queries only the models, because all other facts change
// only with the process.
func (p *pool) interview(ctx context.Context, q *question, address string) {
	wait := firstAsk
	for {
		f, err := p.src.opts.Ask(ctx, address)
		if ctx.Err() != nil {
			return
		}
		if !p.src.opts.Models {
			f.Models = nil
		}
		if err == nil && p.heard(q, &f) {
			p.publish()
		}
		if q.facts != nil { // only this goroutine writes it
			wait = askAgain
		} else {
			p.log.Debug().Str("address", address).Err(err).Msg("engine did not answer")
			wait = min(2*wait, lastAsk)
		}
		select {
		case <-ctx.Done():
			return
		case <-q.now:
		case <-time.After(wait):
		}
	}
}

// heard stores an answer and reports whether it changed anything.
func (p *pool) heard(q *question, f *workers.Facts) bool {
	p.src.mu.Lock()
	defer p.src.mu.Unlock()
	if q.facts == nil {
		q.facts = f
		return true
	}
	if slices.Equal(q.facts.Models, f.Models) || len(f.Models) == 0 {
		return false
	}
	next := *q.facts
	next.Models = f.Models
	q.facts = &next
	return true
}

// Pools returns all pools as last listed. It takes no lock, because each request calls it and updates of thousands of
// pods hold the lock for long.
func (s *Source) Pools() []workers.Pool { return *s.current.Load() }

// refresh sets what Pools returns. The caller holds mu.
func (s *Source) refresh() {
	out := make([]workers.Pool, len(s.pools))
	for i, p := range s.pools {
		out[i] = workers.Pool{Namespace: s.namespace, Name: p.name, Endpoints: p.members}
		if p.spec != nil {
			out[i].Service, out[i].Port = p.spec.Spec.EndpointPickerRef.Name, p.spec.Spec.EndpointPickerRef.Port.Number
		}
	}
	s.current.Store(&out)
}
