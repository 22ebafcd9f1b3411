//go:build linux

package k8s

import "time"

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
		Volumes                       []volume    `json:"volumes"`
		SecurityContext               security    `json:"securityContext"`
	} `json:"spec"`
	Status struct {
		PodIP string `json:"podIP"`
		Phase string `json:"phase"`
	} `json:"status"`
}

type security struct {
	RunAsUser *uint32 `json:"runAsUser"`
}

type container struct {
	Name          string   `json:"name"`
	Image         string   `json:"image"`
	Command       []string `json:"command"`
	Args          []string `json:"args"`
	RestartPolicy string   `json:"restartPolicy"`
	Env           []struct {
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
		Name  string `json:"name"`
		Items []struct {
			Key  string `json:"key"`
			Path string `json:"path"`
		} `json:"items"`
	} `json:"configMap"`
	Secret *struct {
		SecretName string `json:"secretName"`
	} `json:"secret"`
	EmptyDir *struct{} `json:"emptyDir"`
}

type service struct {
	Metadata struct {
		Name      string `json:"name"`
		Namespace string `json:"namespace"`
	} `json:"metadata"`
	Spec struct {
		Type     string            `json:"type"`
		Selector map[string]string `json:"selector"`
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
