package kube

import (
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Only the fields that are read: the types of k8s.io/api would add 3.2 MB of code to the
// binary, and pod specifications to memory.

var (
	podVersion  = schema.GroupVersion{Version: "v1"}
	poolVersion = schema.GroupVersion{Group: "inference.networking.k8s.io", Version: "v1"}
	// objectiveVersions are llm-d's, and that of the Gateway API inference extension, from which llm-d took them over.
	objectiveVersions = []schema.GroupVersion{{Group: "llm-d.ai", Version: "v1alpha2"}, {Group: "inference.networking.x-k8s.io", Version: "v1alpha2"}}
)

func scheme() *runtime.Scheme {
	s := runtime.NewScheme()
	s.AddKnownTypeWithName(podVersion.WithKind("Pod"), &Pod{})
	s.AddKnownTypeWithName(podVersion.WithKind("PodList"), &listOf[Pod, *Pod]{})
	s.AddKnownTypeWithName(poolVersion.WithKind("InferencePool"), &Pool{})
	s.AddKnownTypeWithName(poolVersion.WithKind("InferencePoolList"), &listOf[Pool, *Pool]{})
	for _, v := range objectiveVersions {
		s.AddKnownTypeWithName(v.WithKind("InferenceObjective"), &Objective{})
		s.AddKnownTypeWithName(v.WithKind("InferenceObjectiveList"), &listOf[Objective, *Objective]{})
		metav1.AddToGroupVersion(s, v)
	}
	metav1.AddToGroupVersion(s, podVersion)
	metav1.AddToGroupVersion(s, poolVersion)
	return s
}

// Pod has the fields of a pod that are read.
type Pod struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Status struct {
		Phase      string      `json:"phase"`
		PodIP      string      `json:"podIP"`
		Conditions []condition `json:"conditions"`
	} `json:"status"`
}

type condition struct {
	Type    string `json:"type"`
	Status  string `json:"status"`
	Message string `json:"message"`
}

// unready returns why a pod gets no requests, "" if it may.
func (p *Pod) unready() string {
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

// over reports whether a pod's containers have ended for good: its address may belong to
// another pod.
func (p *Pod) over() bool { return p.Status.Phase == "Succeeded" || p.Status.Phase == "Failed" }

// Pool has the fields of an InferencePool v1 that are read.
type Pool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		Selector struct {
			MatchLabels map[string]string `json:"matchLabels"`
		} `json:"selector"`
		TargetPorts       []targetPort `json:"targetPorts"`
		EndpointPickerRef struct {
			Name string `json:"name"`
			Port struct {
				Number int `json:"number"`
			} `json:"port"`
		} `json:"endpointPickerRef"`
	} `json:"spec"`
}

type targetPort struct {
	Number int `json:"number"`
}

// Objective has the fields of an InferenceObjective that are read.
type Objective struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		Priority int `json:"priority"` // absent: 0
		PoolRef  struct {
			Name string `json:"name"`
		} `json:"poolRef"`
	} `json:"spec"`
}

// listOf is a list of objects as the API server returns it.
type listOf[T any, P interface {
	*T
	runtime.Object
}] struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`

	Items []T `json:"items"`
}

// DeepCopyObject implements runtime.Object.
func (l *listOf[T, P]) DeepCopyObject() runtime.Object {
	c := listOf[T, P]{TypeMeta: l.TypeMeta, Items: make([]T, 0, len(l.Items))}
	l.DeepCopyInto(&c.ListMeta)
	for i := range l.Items {
		c.Items = append(c.Items, *P(&l.Items[i]).DeepCopyObject().(P))
	}
	return &c
}

// DeepCopyObject implements runtime.Object.
func (p *Pod) DeepCopyObject() runtime.Object {
	c := *p
	p.DeepCopyInto(&c.ObjectMeta)
	c.Status.Conditions = slices.Clone(p.Status.Conditions)
	return &c
}

// DeepCopyObject implements runtime.Object.
func (p *Pool) DeepCopyObject() runtime.Object {
	c := *p
	p.DeepCopyInto(&c.ObjectMeta)
	c.Spec.Selector.MatchLabels = maps.Clone(p.Spec.Selector.MatchLabels)
	c.Spec.TargetPorts = slices.Clone(p.Spec.TargetPorts)
	return &c
}

// DeepCopyObject implements runtime.Object.
func (o *Objective) DeepCopyObject() runtime.Object {
	c := *o
	o.DeepCopyInto(&c.ObjectMeta)
	return &c
}
