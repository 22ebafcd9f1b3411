package kube

import "time"

// Meta is what is read of every object's metadata.
type Meta struct {
	Name              string            `json:"name"`
	Namespace         string            `json:"namespace"`
	UID               string            `json:"uid"`
	ResourceVersion   string            `json:"resourceVersion"`
	Labels            map[string]string `json:"labels"`
	Annotations       map[string]string `json:"annotations"`
	CreationTimestamp time.Time         `json:"creationTimestamp"`
	DeletionTimestamp *time.Time        `json:"deletionTimestamp"`
}

// Pod is what is read of a pod.
type Pod struct {
	Metadata Meta `json:"metadata"`
	Status   struct {
		Phase      string `json:"phase"`
		PodIP      string `json:"podIP"`
		Conditions []struct {
			Type    string `json:"type"`
			Status  string `json:"status"`
			Reason  string `json:"reason"`
			Message string `json:"message"`
		} `json:"conditions"`
	} `json:"status"`
}

// Pool is what is read of an InferencePool v1.
type Pool struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		Selector struct {
			MatchLabels map[string]string `json:"matchLabels"`
		} `json:"selector"`
		TargetPorts []struct {
			Number int `json:"number"`
		} `json:"targetPorts"`
		EndpointPickerRef struct {
			Name string `json:"name"`
			Port struct {
				Number int `json:"number"`
			} `json:"port"`
		} `json:"endpointPickerRef"`
	} `json:"spec"`
}

func (p Pod) meta() Meta  { return p.Metadata }
func (p Pool) meta() Meta { return p.Metadata }

// unready says why a pod gets no requests, "" if it may.
func (p Pod) unready() string {
	for _, c := range p.Status.Conditions {
		if c.Type == "Ready" {
			switch {
			case c.Status == "True":
				return ""
			case c.Message != "":
				return "pod not ready: " + c.Message
			}
		}
	}
	return "pod not ready"
}

// over says that a pod's containers have ended for good: its address may belong
// to another one.
func (p Pod) over() bool { return p.Status.Phase == "Succeeded" || p.Status.Phase == "Failed" }
