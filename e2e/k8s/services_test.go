//go:build linux

package k8s

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// clusterService is a Service whose address leads to its ready pods: what
// kube-proxy and, for type LoadBalancer, a cloud do. It connects one by one
// through in turn.
type clusterService struct {
	address   string
	listeners map[int]net.Listener // by the Service's port

	mu      sync.Mutex
	targets map[int][]string
	turn    int
}

// services makes the addresses of all Services what they should be.
func (n *node) services(ctx context.Context, pods []pod) error {
	var list items[service]
	if err := n.client.read(ctx, "/api/v1/services", &list); err != nil {
		return err
	}
	names := map[string][]string{}
	for i := range list.Items {
		s := &list.Items[i]
		if len(s.Spec.Selector) == 0 || s.Spec.ClusterIP == "" {
			continue
		}
		name := s.Metadata.Name + "." + s.Metadata.Namespace + ".svc.cluster.local."
		if s.Spec.ClusterIP == "None" {
			for i := range pods {
				p := &pods[i]
				if s.leadsTo(p) || s.Spec.PublishNotReady && p.Status.PodIP != "" && p.Metadata.Namespace == s.Metadata.Namespace && selects(s.Spec.Selector, p.Metadata.Labels) {
					names[name] = append(names[name], pods[i].Status.PodIP)
				}
			}
			continue
		}
		names[name] = []string{s.Spec.ClusterIP}
		p, err := n.serve(s, pods)
		if err != nil {
			return err
		}
		if in := s.Status.LoadBalancer.Ingress; s.Spec.Type != "LoadBalancer" || len(in) == 1 && in[0].IP == p.address || !p.leads() {
			continue
		}
		body := fmt.Sprintf(`{"status":{"loadBalancer":{"ingress":[{"ip":%q}]}}}`, p.address)
		path := "/api/v1/namespaces/" + s.Metadata.Namespace + "/services/" + s.Metadata.Name + "/status"
		if err := n.client.send(ctx, http.MethodPatch, path, "application/merge-patch+json", []byte(body), nil); err != nil {
			return err
		}
	}
	n.mu.Lock()
	n.names = names
	n.mu.Unlock()
	return nil
}

// serve opens a Service's ports and tells it its pods. Only the node's own
// goroutine calls it.
func (n *node) serve(s *service, pods []pod) (*clusterService, error) {
	p := n.proxied[s.Spec.ClusterIP]
	if p == nil {
		if err := ip("addr replace " + s.Spec.ClusterIP + "/32 dev lo"); err != nil {
			return nil, err
		}
		p = &clusterService{address: s.Spec.ClusterIP, listeners: map[int]net.Listener{}}
		n.proxied[s.Spec.ClusterIP] = p
	}
	targets := map[int][]string{}
	for _, port := range s.Spec.Ports {
		targets[port.Port] = nil
		for i := range pods {
			q := &pods[i]
			if s.leadsTo(q) {
				targets[port.Port] = append(targets[port.Port], q.address(port.TargetPort, port.Port))
			}
		}
	}
	p.mu.Lock()
	p.targets = targets
	p.mu.Unlock()
	for port, l := range p.listeners {
		if _, wanted := targets[port]; !wanted {
			_ = l.Close()
			delete(p.listeners, port)
		}
	}
	for port := range targets {
		if p.listeners[port] != nil {
			continue
		}
		l, err := net.Listen("tcp", net.JoinHostPort(p.address, strconv.Itoa(port)))
		if err != nil {
			return nil, err
		}
		p.listeners[port] = l
		go p.accept(l, port)
	}
	return p, nil
}

// leadsTo reports whether a pod is behind the Service.
func (s *service) leadsTo(p *pod) bool {
	return p.Metadata.Namespace == s.Metadata.Namespace && p.ready() && p.Metadata.DeletionTimestamp == nil && selects(s.Spec.Selector, p.Metadata.Labels)
}

// leads reports whether any pod is behind the Service.
func (p *clusterService) leads() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range p.targets {
		if len(t) > 0 {
			return true
		}
	}
	return false
}

func (p *clusterService) accept(l net.Listener, port int) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go p.connect(conn, port)
	}
}

// connect joins a connection with a pod; with none, it is closed.
func (p *clusterService) connect(conn net.Conn, port int) {
	defer conn.Close()
	p.mu.Lock()
	targets := p.targets[port]
	p.turn++
	turn := p.turn
	p.mu.Unlock()
	for i := range targets {
		to, err := net.DialTimeout("tcp", targets[(turn+i)%len(targets)], 2*time.Second)
		if err != nil {
			continue
		}
		defer to.Close()
		go func() {
			_, _ = io.Copy(to, conn)
			_ = to.(*net.TCPConn).CloseWrite()
		}()
		_, _ = io.Copy(conn, to)
		return
	}
}

// names answers DNS questions about Services.
func (n *node) serveDNS(t *testing.T) {
	t.Helper()
	conn, err := net.ListenPacket("udp", hostIP+":53")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	go func() {
		buf := make([]byte, 512)
		for {
			size, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			if answer, err := n.lookup(buf[:size]); err == nil {
				_, _ = conn.WriteTo(answer, from)
			}
		}
	}()
}

func (n *node) lookup(question []byte) ([]byte, error) {
	var p dnsmessage.Parser
	header, err := p.Start(question)
	if err != nil {
		return nil, err
	}
	q, err := p.Question()
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	addresses := n.names[strings.ToLower(q.Name.String())]
	n.mu.Unlock()
	m := dnsmessage.Message{Header: dnsmessage.Header{ID: header.ID, Response: true, Authoritative: true, RecursionDesired: header.RecursionDesired, RecursionAvailable: true},
		Questions: []dnsmessage.Question{q}}
	if len(addresses) == 0 {
		m.RCode = dnsmessage.RCodeNameError
	}
	for _, a := range addresses {
		if q.Type == dnsmessage.TypeA {
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 5}, Body: &dnsmessage.AResource{A: [4]byte(net.ParseIP(a).To4())}})
		}
	}
	return m.Pack()
}
