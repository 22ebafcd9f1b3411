//go:build linux

package k8s

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
)

// shutdownManager is the helper container of Envoy Gateway's Envoy, which is not run.
const shutdownManager = "gateway-dev"

func imageName(c *container) string {
	name, _, _ := strings.Cut(path.Base(c.Image), ":")
	return name
}

// run starts what a container's image stands for.
func (s *sandbox) run(c *container) error {
	name := imageName(c)
	switch {
	case name == shutdownManager:
		return nil
	case name == "kvlane":
		if err := s.n.has(c); err != nil {
			return err
		}
		return s.runKvlane(c, c.Args)
	case name == "pilot":
		return s.runIstiod(c)
	case name == "lwepp" && s.n.headerOnly.Load():
		return s.runHeaderOnly()
	case name == "lwepp":
		return s.runKvlane(c, append([]string{"serve", "--conformance"}, c.Args...))
	case name == "echo-basic":
		return s.runEcho(c)
	case c.Name == istioProxy:
		return s.runIstioProxy(c)
	case name == "envoy":
		return s.runEnvoy(c)
	}
	return fmt.Errorf("no program for image %s", c.Image)
}

// has returns why the node has no image for a container of Kvlane. Only the test's images
// and those that a page has loaded exist.
func (n *node) has(c *container) error {
	if strings.HasSuffix(c.Image, "kvlane:test") {
		return nil
	}
	loaded, err := os.ReadFile(n.c.images())
	if err != nil && !os.IsNotExist(err) {
		return err
	}
	if !slices.Contains(strings.Fields(string(loaded)), c.Image) {
		return fmt.Errorf("image %s was not loaded", c.Image)
	}
	if c.ImagePullPolicy == "Always" {
		return fmt.Errorf("image %s would be pulled, from where it is not", c.Image)
	}
	return nil
}

// runIstiod runs istiod as its Deployment says, without the parts that serve
// sidecars: webhooks, and xDS with certificates.
func (s *sandbox) runIstiod(c *container) error {
	env := s.environment(c)
	args := append(expand(c.Args, env), "--kubeconfig", s.n.c.kubeconfig, "--httpsAddr", "", "--secureGRPCAddr", "", "--ctrlz_port", "0", "--profile=false")
	return s.spawn(c, "", env, append([]string{filepath.Join(s.n.c.bin, "pilot-discovery")}, args...)...)
}

// runKvlane runs the binary as its image does: nothing in the file system but
// itself and what is mounted, and not as root.
func (s *sandbox) runKvlane(c *container, args []string) error {
	root := filepath.Join(s.dir, c.Name+".root")
	if err := os.MkdirAll(filepath.Join(root, "dev"), 0o755); err != nil {
		return err
	}
	if err := bindFile(s.n.kvlane, filepath.Join(root, "kvlane")); err != nil {
		return err
	}
	if err := unix.Mount("/dev", filepath.Join(root, "dev"), "", unix.MS_BIND, ""); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(root, "etc"), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(root, "etc/resolv.conf"), fmt.Appendf(nil, "nameserver %s\nsearch %s.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5\n", hostIP, s.pod.Metadata.Namespace), 0o644); err != nil {
		return err
	}
	if err := s.account(root); err != nil {
		return err
	}
	if err := s.mount(c, root); err != nil {
		return err
	}
	if len(c.Command) > 0 {
		args = append(append([]string(nil), c.Command[1:]...), args...)
	}
	env := s.environment(c)
	return s.spawn(c, root, env, append([]string{"/kvlane"}, expand(args, env)...)...)
}

// mount binds the container's volumes into root.
func (s *sandbox) mount(c *container, root string) error {
	for _, m := range c.VolumeMounts {
		from, to := filepath.Join(s.dir, "volumes", m.Name, m.SubPath), filepath.Join(root, m.MountPath)
		if strings.HasPrefix(m.MountPath, "/var/run/secrets/kubernetes.io") {
			continue // account has put it there
		}
		st, err := os.Stat(from)
		if err != nil {
			return err
		}
		if st.IsDir() {
			err = os.MkdirAll(to, 0o755)
		} else if err = os.MkdirAll(filepath.Dir(to), 0o755); err == nil {
			err = os.WriteFile(to, nil, 0o644)
		}
		if err != nil {
			return err
		}
		if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m.MountPath, err)
		}
	}
	return nil
}

// bindFile shows a file at another place. A copy could not be run while another
// process that is just starting still holds it open for writing.
func bindFile(from, to string) error {
	if err := os.WriteFile(to, nil, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount %s: %w", from, err)
	}
	return nil
}

// overlay makes a file system that is the machine's, with what is written to it
// kept in dir.
func overlay(dir string) (root string, err error) {
	root = filepath.Join(dir, "root")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755"); err != nil {
		return "", err
	}
	for _, d := range []string{"upper", "work", "root"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			return "", err
		}
	}
	options := fmt.Sprintf("lowerdir=/,upperdir=%s/upper,workdir=%s/work", dir, dir)
	if err := unix.Mount("overlay", root, "overlay", 0, options); err != nil {
		return "", fmt.Errorf("overlay: %w", err)
	}
	for _, d := range []string{"dev", "proc"} {
		if err := unix.Mount("/"+d, filepath.Join(root, d), "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return "", fmt.Errorf("mount %s: %w", d, err)
		}
	}
	return root, nil
}

// runEnvoy runs Envoy on top of the machine's file system, which it needs for its
// libraries.
func (s *sandbox) runEnvoy(c *container) error {
	root, err := overlay(filepath.Join(s.dir, c.Name+".layers"))
	if err != nil {
		return err
	}
	if err := bindFile(s.n.envoy, filepath.Join(root, "envoy.bin")); err != nil {
		return err
	}
	if err := s.mount(c, root); err != nil {
		return err
	}
	env := s.environment(c)
	args := c.Args
	if len(c.Command) > 1 {
		args = append(append([]string(nil), c.Command[1:]...), args...)
	}
	argv := append([]string{"/envoy.bin"}, expand(args, env)...)
	for i := range argv { // Envoy Gateway does not run in a pod here
		argv[i] = strings.ReplaceAll(argv[i], "envoy-gateway."+egNamespace+".svc.cluster.local.", hostIP)
	}
	resolv := filepath.Join(root, "etc/resolv.conf")
	_ = os.Remove(resolv) // it may be a link out of the pod
	if err := os.WriteFile(resolv, fmt.Appendf(nil, "nameserver %s\nsearch %s.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5\n", hostIP, s.pod.Metadata.Namespace), 0o644); err != nil {
		return err
	}
	if !slices.Contains(argv, "--disable-hot-restart") { // it would need shared memory
		argv = append(argv, "--disable-hot-restart")
	}
	return s.spawn(c, root, env, argv...)
}

// istioBootstrap is the bootstrap of a gateway's Envoy: who it is, and where
// istiod is. Everything else comes from there.
const istioBootstrap = `node:
  id: router~%[1]s~%[2]s.%[3]s~%[3]s.svc.cluster.local
  cluster: %[4]s.%[3]s
  metadata: {NAMESPACE: %[3]s, CLUSTER_ID: Kubernetes, ISTIO_VERSION: 1.31.0, SERVICE_ACCOUNT: default, LABELS: %[5]s}
admin: {address: {socket_address: {address: 0.0.0.0, port_value: 15000}}}
dynamic_resources:
  lds_config: {ads: {}, initial_fetch_timeout: 0s, resource_api_version: V3}
  cds_config: {ads: {}, initial_fetch_timeout: 0s, resource_api_version: V3}
  ads_config: {api_type: DELTA_GRPC, transport_api_version: V3, set_node_on_first_message_only: true, grpc_services: [{envoy_grpc: {cluster_name: xds}}]}
static_resources:
  listeners:
  - name: probe
    address: {socket_address: {address: 0.0.0.0, port_value: 15021}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: probe
          route_config: {virtual_hosts: [{name: all, domains: ["*"], routes: [{match: {prefix: /}, direct_response: {status: 200}}]}]}
          http_filters: [{name: envoy.filters.http.router, typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}]
  clusters:
  - name: xds
    type: STATIC
    connect_timeout: 1s
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
    load_assignment: {cluster_name: xds, endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: %[6]s, port_value: 15010}}}}]}]}
`

func (s *sandbox) runIstioProxy(c *container) error {
	s.n.mu.Lock()
	istiod := strings.Join(s.n.names["istiod.istio-system.svc.cluster.local."], "") // it has one address
	s.n.mu.Unlock()
	labels, err := json.Marshal(s.pod.Metadata.Labels)
	if err != nil {
		return err
	}
	file := filepath.Join(s.dir, "envoy.yaml")
	text := fmt.Sprintf(istioBootstrap, s.ip, s.pod.Metadata.Name, s.pod.Metadata.Namespace, s.pod.Metadata.Labels["gateway.networking.k8s.io/gateway-name"], labels, istiod)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return err
	}
	return s.spawn(c, "", nil, s.n.envoy, "-c", file, "--disable-hot-restart", "--concurrency", "1", "-l", "info")
}

// listen opens a port of the pod.
func (s *sandbox) listen(port string) (net.Listener, error) {
	var l net.Listener
	err := s.inside(func() (err error) {
		l, err = net.Listen("tcp", ":"+port)
		return err
	})
	return l, err
}

// runEcho answers like the echo server of the Gateway API's conformance tests,
// and also tells the hash of the body.
func (s *sandbox) runEcho(c *container) error {
	ports := map[string]string{"HTTP_PORT": "3000", "H2C_PORT": "3001"}
	for _, e := range c.Env {
		ports[e.Name] = e.Value
	}
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	for _, port := range []string{ports["HTTP_PORT"], ports["H2C_PORT"]} {
		l, err := s.listen(port)
		if err != nil {
			return err
		}
		srv := &http.Server{Protocols: &protocols, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			h := sha256.New()
			n, _ := io.Copy(h, r.Body)
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(map[string]any{ //nolint:errchkjson // strings only
				"path": r.URL.Path, "host": r.Host, "method": r.Method, "proto": r.Proto, "headers": r.Header, "namespace": s.pod.Metadata.Namespace,
				"pod": s.pod.Metadata.Name, "httpPort": port, "bytes": n, "sha256": hex.EncodeToString(h.Sum(nil)),
			})
		})}
		go func() { _ = srv.Serve(l) }()
		s.stops = append(s.stops, func() { _ = srv.Close() })
	}
	return nil
}

// runHeaderOnly is a picker that obeys a test's wish by header alone, which Istio
// does not read.
func (s *sandbox) runHeaderOnly() error {
	picker, err := s.listen("9002")
	if err != nil {
		return err
	}
	probe, err := s.listen("9003")
	if err != nil {
		return err
	}
	g := grpc.NewServer()
	extprocv3.RegisterExternalProcessorServer(g, headerOnly{})
	h := health.NewServer()
	h.SetServingStatus("inference-extension", grpc_health_v1.HealthCheckResponse_SERVING)
	hs := grpc.NewServer()
	grpc_health_v1.RegisterHealthServer(hs, h)
	go func() { _ = g.Serve(picker) }()
	go func() { _ = hs.Serve(probe) }()
	s.stops = append(s.stops, g.Stop, hs.Stop)
	return nil
}

type headerOnly struct {
	extprocv3.UnimplementedExternalProcessorServer
}

// Process implements the service for requests without a body, and echoes bodies.
func (headerOnly) Process(stream extprocv3.ExternalProcessor_ProcessServer) error {
	for {
		m, err := stream.Recv()
		if err != nil {
			return nil //nolint:nilerr // the end
		}
		r := &extprocv3.ProcessingResponse{}
		switch q := m.GetRequest().(type) {
		case *extprocv3.ProcessingRequest_RequestHeaders:
			common := &extprocv3.CommonResponse{}
			for _, header := range q.RequestHeaders.GetHeaders().GetHeaders() {
				if header.GetKey() == "test-epp-endpoint-selection" {
					common.HeaderMutation = &extprocv3.HeaderMutation{SetHeaders: []*corev3.HeaderValueOption{{
						Header: &corev3.HeaderValue{Key: "x-gateway-destination-endpoint", RawValue: header.GetRawValue()}}}}
				}
			}
			r.Response = &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{Response: common}}
		case *extprocv3.ProcessingRequest_RequestBody:
			r.Response = &extprocv3.ProcessingResponse_RequestBody{RequestBody: streamed(q.RequestBody)}
		case *extprocv3.ProcessingRequest_RequestTrailers:
			r.Response = &extprocv3.ProcessingResponse_RequestTrailers{RequestTrailers: &extprocv3.TrailersResponse{}}
		case *extprocv3.ProcessingRequest_ResponseHeaders:
			r.Response = &extprocv3.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extprocv3.HeadersResponse{}}
		case *extprocv3.ProcessingRequest_ResponseBody:
			r.Response = &extprocv3.ProcessingResponse_ResponseBody{ResponseBody: streamed(q.ResponseBody)}
		case *extprocv3.ProcessingRequest_ResponseTrailers:
			r.Response = &extprocv3.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extprocv3.TrailersResponse{}}
		}
		if err := stream.Send(r); err != nil {
			return err
		}
	}
}

func streamed(b *extprocv3.HttpBody) *extprocv3.BodyResponse {
	return &extprocv3.BodyResponse{Response: &extprocv3.CommonResponse{BodyMutation: &extprocv3.BodyMutation{
		Mutation: &extprocv3.BodyMutation_StreamedResponse{StreamedResponse: &extprocv3.StreamedBodyResponse{Body: b.GetBody(), EndOfStream: b.GetEndOfStream()}}}}}
}
