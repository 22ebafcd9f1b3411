package kube

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Client asks an API server. It is safe for concurrent use.
type Client struct {
	access Access
	http   *http.Client

	mu      sync.Mutex
	token   string
	renewAt time.Time
}

const (
	// callTimeout bounds everything but watches.
	callTimeout = 30 * time.Second
	// tokenAge is how long a service account's token is used before its file is read
	// again; the kubelet renews it long before it expires.
	tokenAge = time.Minute
	// maxAnswer bounds one answer; a page of pods is far below.
	maxAnswer = 64 << 20
)

// NewClient returns a client. It connects on first use.
func NewClient(a Access) (*Client, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: a.Insecure} //nolint:gosec // only where a kubeconfig says so
	switch {
	case a.Insecure:
	case a.CAFile != "":
		if err := a.trust(cfg); err != nil {
			return nil, err
		}
	case len(a.CA) > 0:
		roots, err := bundle(a.CA)
		if err != nil {
			return nil, err
		}
		cfg.RootCAs = roots
	}
	if len(a.Cert) > 0 {
		pair, err := tls.X509KeyPair(a.Cert, a.Key)
		if err != nil {
			return nil, fmt.Errorf("client certificate: %w", err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return &Client{access: a, http: &http.Client{Transport: &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
		TLSClientConfig:       cfg,
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: callTimeout,
		IdleConnTimeout:       90 * time.Second,
		ForceAttemptHTTP2:     true,
		// A watch over a connection that died without a word would never end.
		HTTP2: &http.HTTP2Config{SendPingTimeout: 20 * time.Second, PingTimeout: 10 * time.Second},
	}}}, nil
}

// bundle reads the certificates of a CA bundle.
func bundle(pem []byte) (*x509.CertPool, error) {
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, errors.New("the API server's CA bundle holds no certificate")
	}
	return roots, nil
}

// trust has cfg check servers against what CAFile holds at that moment.
func (a *Access) trust(cfg *tls.Config) error {
	server, err := url.Parse(a.Server)
	if err != nil {
		return fmt.Errorf("API server: %w", err)
	}
	read := func() (*x509.CertPool, error) {
		pem, err := os.ReadFile(a.CAFile)
		if err != nil {
			return nil, fmt.Errorf("the API server's CA bundle: %w", err)
		}
		return bundle(pem)
	}
	if _, err := read(); err != nil {
		return err
	}
	cfg.InsecureSkipVerify = true // VerifyConnection does it
	cfg.VerifyConnection = func(cs tls.ConnectionState) error {
		roots, err := read()
		if err != nil {
			return err
		}
		between := x509.NewCertPool()
		for _, c := range cs.PeerCertificates[1:] {
			between.AddCert(c)
		}
		_, err = cs.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: roots, Intermediates: between, DNSName: server.Hostname()})
		return err
	}
	return nil
}

// Namespace is the access's own.
func (c *Client) Namespace() string { return c.access.Namespace }

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// StatusError is a refusal of the API server.
type StatusError struct {
	Code            int
	Reason, Message string
	// RetryAfter is how long the server wants to be left alone, 0 if it did not say.
	RetryAfter time.Duration `json:"-"`
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("API server: %d %s: %s", e.Code, e.Reason, e.Message)
}

// IsCode says that err is a StatusError with that code.
func IsCode(err error, code int) bool {
	var status *StatusError
	return errors.As(err, &status) && status.Code == code
}

// Get decodes what is at path ("/api/v1/...") into out.
func (c *Client) Get(ctx context.Context, path string, out any) error {
	return c.Do(ctx, http.MethodGet, path, "", nil, out)
}

// Do sends a request; body may be nil, out may be nil.
func (c *Client) Do(ctx context.Context, method, path, contentType string, body []byte, out any) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	answer, err := c.open(ctx, method, path, contentType, body)
	if err != nil {
		return err
	}
	defer answer.Close()
	if out == nil {
		_, err = io.Copy(io.Discard, io.LimitReader(answer, maxAnswer))
		return err
	}
	if err := json.NewDecoder(io.LimitReader(answer, maxAnswer)).Decode(out); err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	return nil
}

// open sends a request and returns the answer's body.
func (c *Client) open(ctx context.Context, method, path, contentType string, body []byte) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.access.Server+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	token, err := c.bearer()
	if err != nil {
		return nil, err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	req.Header.Set("Accept", "application/json")
	req.Header.Set("User-Agent", "kvlane")
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode/100 == 2 {
		return resp.Body, nil
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusUnauthorized {
		c.forgetToken()
	}
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	status := &StatusError{Code: resp.StatusCode}
	if seconds, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && seconds > 0 {
		status.RetryAfter = time.Duration(seconds) * time.Second
	}
	var said struct{ Reason, Message string }
	if json.Unmarshal(text, &said) == nil && said.Message != "" {
		status.Reason, status.Message = said.Reason, said.Message
	} else {
		status.Message = strings.TrimSpace(string(text))
	}
	return nil, status
}

func (c *Client) bearer() (string, error) {
	if c.access.TokenFile == "" {
		return c.access.Token, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := time.Now(); c.token == "" || now.After(c.renewAt) {
		text, err := os.ReadFile(c.access.TokenFile)
		if err != nil {
			return "", fmt.Errorf("service account token: %w", err)
		}
		c.token, c.renewAt = strings.TrimSpace(string(text)), now.Add(tokenAge)
	}
	return c.token, nil
}

// forgetToken has the file read again: the token was refused.
func (c *Client) forgetToken() {
	c.mu.Lock()
	c.token = ""
	c.mu.Unlock()
}
