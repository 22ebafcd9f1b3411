package kube

import (
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/goccy/go-yaml"
)

// Access is how an API server is reached.
type Access struct {
	// Server is the base URL.
	Server string
	// CA is a PEM bundle; empty means the system's. CAFile is read again at each TLS
	// handshake and wins: a cluster's CA is renewed while pods run.
	CA     []byte
	CAFile string
	// Insecure accepts any certificate, as a kubeconfig may ask for.
	Insecure bool
	// Token is sent as bearer; TokenFile is read again as it changes and wins.
	Token, TokenFile string
	// Cert and Key are a PEM client certificate, empty for none.
	Cert, Key []byte
	// Namespace is the one that names without a namespace are in.
	Namespace string
}

// accountDir is where the kubelet puts a pod's service account.
const accountDir = "/var/run/secrets/kubernetes.io/serviceaccount"

// InCluster is the access of the pod that this process runs in.
func InCluster() (Access, error) {
	host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return Access{}, errors.New("not in a pod (KUBERNETES_SERVICE_HOST is not set): name a kubeconfig")
	}
	namespace, err := os.ReadFile(filepath.Join(accountDir, "namespace"))
	if err != nil {
		return Access{}, fmt.Errorf("service account: %w", err)
	}
	return Access{
		Server: "https://" + net.JoinHostPort(host, port), CAFile: filepath.Join(accountDir, "ca.crt"), TokenFile: filepath.Join(accountDir, "token"),
		Namespace: strings.TrimSpace(string(namespace)),
	}, nil
}

// kubeconfig is the part of the file that is understood.
type kubeconfig struct {
	CurrentContext string `yaml:"current-context"`
	Clusters       []struct {
		Name    string `yaml:"name"`
		Cluster struct {
			Server   string `yaml:"server"`
			CA       string `yaml:"certificate-authority"`
			CAData   string `yaml:"certificate-authority-data"`
			Insecure bool   `yaml:"insecure-skip-tls-verify"`
		} `yaml:"cluster"`
	} `yaml:"clusters"`
	Users []struct {
		Name string `yaml:"name"`
		User struct {
			Token     string `yaml:"token"`
			TokenFile string `yaml:"tokenFile"`
			Cert      string `yaml:"client-certificate"`
			CertData  string `yaml:"client-certificate-data"`
			Key       string `yaml:"client-key"`
			KeyData   string `yaml:"client-key-data"`
			Exec      any    `yaml:"exec"`
			Provider  any    `yaml:"auth-provider"`
		} `yaml:"user"`
	} `yaml:"users"`
	Contexts []struct {
		Name    string `yaml:"name"`
		Context struct {
			Cluster   string `yaml:"cluster"`
			User      string `yaml:"user"`
			Namespace string `yaml:"namespace"`
		} `yaml:"context"`
	} `yaml:"contexts"`
}

// Kubeconfig is the access of a kubeconfig's current context. Users that need a
// program or a provider to log in are refused.
func Kubeconfig(path string) (Access, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return Access{}, fmt.Errorf("kubeconfig: %w", err)
	}
	a, err := parseKubeconfig(text, filepath.Dir(path))
	if err != nil {
		return Access{}, fmt.Errorf("kubeconfig %s: %w", path, err)
	}
	return a, nil
}

func parseKubeconfig(text []byte, dir string) (Access, error) {
	var k kubeconfig
	if err := yaml.Unmarshal(text, &k); err != nil {
		return Access{}, err
	}
	a := Access{Namespace: "default"}
	cluster, user, found := "", "", false
	for _, c := range k.Contexts {
		if c.Name == k.CurrentContext {
			cluster, user, found = c.Context.Cluster, c.Context.User, true
			if c.Context.Namespace != "" {
				a.Namespace = c.Context.Namespace
			}
		}
	}
	if !found {
		return Access{}, fmt.Errorf("no context %q", k.CurrentContext)
	}
	var err error
	found = false
	for _, c := range k.Clusters {
		if c.Name != cluster {
			continue
		}
		found = true
		a.Server, a.Insecure = strings.TrimSuffix(c.Cluster.Server, "/"), c.Cluster.Insecure
		if a.CA, err = material(dir, c.Cluster.CA, c.Cluster.CAData); err != nil {
			return Access{}, fmt.Errorf("certificate-authority: %w", err)
		}
		if c.Cluster.CA != "" && c.Cluster.CAData == "" {
			a.CA, a.CAFile = nil, under(dir, c.Cluster.CA)
		}
	}
	if !found || a.Server == "" {
		return Access{}, fmt.Errorf("no cluster %q with a server", cluster)
	}
	for _, u := range k.Users {
		if u.Name != user {
			continue
		}
		if u.User.Exec != nil || u.User.Provider != nil {
			return Access{}, fmt.Errorf("user %q logs in through a program, which is not supported", user)
		}
		a.Token = u.User.Token
		if u.User.TokenFile != "" {
			a.TokenFile = under(dir, u.User.TokenFile)
		}
		if a.Cert, err = material(dir, u.User.Cert, u.User.CertData); err != nil {
			return Access{}, fmt.Errorf("client-certificate: %w", err)
		}
		if a.Key, err = material(dir, u.User.Key, u.User.KeyData); err != nil {
			return Access{}, fmt.Errorf("client-key: %w", err)
		}
	}
	return a, nil
}

// material is PEM text that stands in a file or, in base64, in the kubeconfig.
func material(dir, file, data string) ([]byte, error) {
	switch {
	case data != "":
		return base64.StdEncoding.DecodeString(data)
	case file != "":
		return os.ReadFile(under(dir, file))
	}
	return nil, nil
}

// under makes a kubeconfig's relative path mean what it does to kubectl.
func under(dir, path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(dir, path)
}
