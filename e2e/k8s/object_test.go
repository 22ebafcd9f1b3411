//go:build linux

package k8s

import (
	"fmt"
	"net"
	"time"
)

// pod is what the node reads of a pod.
type pod struct {
	Metadata struct {
		Name              string            `json:"name"`
		Namespace         string            `json:"namespace"`
		UID               string            `json:"uid"`
		Labels            map[string]string `json:"labels"`
		DeletionTimestamp *time.Time        `json:"deletionTimestamp"`
	} `json:"metadata"`
	Spec struct {
		NodeName                      string      `json:"nodeName"`
		ServiceAccountName            string      `json:"serviceAccountName"`
		AutomountServiceAccountToken  *bool       `json:"automountServiceAccountToken"`
		TerminationGracePeriodSeconds *int        `json:"terminationGracePeriodSeconds"`
		InitContainers                []container `json:"initContainers"`
		Containers                    []container `json:"containers"`
		RestartPolicy                 string      `json:"restartPolicy"`
		Volumes                       []volume    `json:"volumes"`
		SecurityContext               security    `json:"securityContext"`
	} `json:"spec"`
	Status struct {
		PodIP      string `json:"podIP"`
		Phase      string `json:"phase"`
		Conditions []struct {
			Type   string `json:"type"`
			Status string `json:"status"`
		} `json:"conditions"`
	} `json:"status"`
}

func (p *pod) ready() bool {
	for _, c := range p.Status.Conditions {
		if c.Type == "Ready" {
			return c.Status == "True"
		}
	}
	return false
}

// address is where the target port of a Service is, its port if it names none.
func (p *pod) address(target any, port int) string {
	if target == nil {
		target = port
	}
	for i := range p.Spec.Containers {
		if n := p.Spec.Containers[i].port(target); n != fmt.Sprint(target) {
			return net.JoinHostPort(p.Status.PodIP, n)
		}
	}
	return net.JoinHostPort(p.Status.PodIP, fmt.Sprint(target))
}

type security struct {
	RunAsUser *uint32 `json:"runAsUser"`
}

type container struct {
	Name            string   `json:"name"`
	Image           string   `json:"image"`
	ImagePullPolicy string   `json:"imagePullPolicy"`
	Command         []string `json:"command"`
	Args            []string `json:"args"`
	RestartPolicy   string   `json:"restartPolicy"`
	Env             []struct {
		Name      string `json:"name"`
		Value     string `json:"value"`
		ValueFrom struct {
			FieldRef struct {
				FieldPath string `json:"fieldPath"`
			} `json:"fieldRef"`
		} `json:"valueFrom"`
	} `json:"env"`
	Ports []struct {
		Name          string `json:"name"`
		ContainerPort int    `json:"containerPort"`
	} `json:"ports"`
	VolumeMounts []struct {
		Name      string `json:"name"`
		MountPath string `json:"mountPath"`
		SubPath   string `json:"subPath"`
	} `json:"volumeMounts"`
	ReadinessProbe *probe `json:"readinessProbe"`
	Lifecycle      struct {
		PreStop struct {
			Sleep struct {
				Seconds int `json:"seconds"`
			} `json:"sleep"`
		} `json:"preStop"`
	} `json:"lifecycle"`
	SecurityContext security `json:"securityContext"`
}

// port is the number of a port that is given by number or by name.
func (c *container) port(port any) string {
	for _, p := range c.Ports {
		if p.Name == port {
			return fmt.Sprint(p.ContainerPort)
		}
	}
	return fmt.Sprint(port)
}

type probe struct {
	HTTPGet *struct {
		Path string `json:"path"`
		Port any    `json:"port"`
	} `json:"httpGet"`
	GRPC *struct {
		Port    int    `json:"port"`
		Service string `json:"service"`
	} `json:"grpc"`
	TCPSocket *struct {
		Port any `json:"port"`
	} `json:"tcpSocket"`
}

type volume struct {
	Name      string `json:"name"`
	ConfigMap *struct {
		Name     string `json:"name"`
		Optional bool   `json:"optional"`
		Items    []struct {
			Key  string `json:"key"`
			Path string `json:"path"`
		} `json:"items"`
	} `json:"configMap"`
	Secret *struct {
		SecretName string `json:"secretName"`
		Optional   bool   `json:"optional"`
	} `json:"secret"`
	EmptyDir *struct{} `json:"emptyDir"`
}

type service struct {
	Metadata struct {
		Name      string `json:"name"`
		Namespace string `json:"namespace"`
	} `json:"metadata"`
	Spec struct {
		Type      string            `json:"type"`
		Selector  map[string]string `json:"selector"`
		ClusterIP string            `json:"clusterIP"`
		// PublishNotReady gives a headless Service the addresses of all its pods.
		PublishNotReady bool `json:"publishNotReadyAddresses"`
		Ports           []struct {
			Port       int `json:"port"`
			TargetPort any `json:"targetPort"`
		} `json:"ports"`
	} `json:"spec"`
	Status struct {
		LoadBalancer struct {
			Ingress []struct {
				IP string `json:"ip"`
			} `json:"ingress"`
		} `json:"loadBalancer"`
	} `json:"status"`
}

type items[T any] struct {
	Items []T `json:"items"`
}

func selects(selector, labels map[string]string) bool {
	for k, v := range selector {
		if labels[k] != v {
			return false
		}
	}
	return len(selector) > 0
}
