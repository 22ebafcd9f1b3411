package kube

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/kvlane/kvlane/internal/observe"
)

// These types have only the fields that are read: those of k8s.io/api would add 3.2 MB of code to the binary, and keep
// whole pod specifications in memory.

var (
	podVersion  = schema.GroupVersion{Version: "v1"}
	poolVersion = schema.GroupVersion{Group: "inference.networking.k8s.io", Version: "v1"}
	// objectiveVersions are llm-d's, and that of the Gateway API inference extension, from which llm-d took them over.
	objectiveVersions = []schema.GroupVersion{{Group: "llm-d.ai", Version: "v1alpha2"}, {Group: "inference.networking.x-k8s.io", Version: "v1alpha2"}}
)

func scheme() *runtime.Scheme {
	s := runtime.NewScheme()
	register[none, podStatus](s, podVersion, "Pod")
	register[poolSpec, none](s, poolVersion, "InferencePool")
	for _, v := range objectiveVersions {
		register[objectiveSpec, none](s, v, "InferenceObjective")
	}
	return s
}

func register[Spec, Status any](s *runtime.Scheme, v schema.GroupVersion, kind string) {
	s.AddKnownTypeWithName(v.WithKind(kind), &resource[Spec, Status]{})
	s.AddKnownTypeWithName(v.WithKind(kind+"List"), &listOf[Spec, Status]{})
	metav1.AddToGroupVersion(s, v)
}

// The kinds that are watched.
type (
	Pod       = resource[none, podStatus]
	Pool      = resource[poolSpec, none]
	Objective = resource[objectiveSpec, none]
)

// resource holds the fields of an object that are read.
type resource[Spec, Status any] struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Spec   Spec   `json:"spec"`
	Status Status `json:"status"`
}

// none is the type of a Spec or Status that Kvlane does not read.
type none struct{}

// DeepCopyObject implements runtime.Object. Specification and status are shared: they are not changed.
func (r *resource[Spec, Status]) DeepCopyObject() runtime.Object {
	c := *r
	r.DeepCopyInto(&c.ObjectMeta)
	return &c
}

// listOf is a list of objects as the API server returns it.
type listOf[Spec, Status any] struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`

	Items []resource[Spec, Status] `json:"items"`
}

// DeepCopyObject implements runtime.Object. The objects are shared: they are not changed.
func (l *listOf[Spec, Status]) DeepCopyObject() runtime.Object {
	c := *l
	l.DeepCopyInto(&c.ListMeta)
	return &c
}

type podStatus struct {
	Phase      string      `json:"phase"`
	PodIP      string      `json:"podIP"`
	Conditions []condition `json:"conditions"`
}

type condition struct {
	Type    string `json:"type"`
	Status  string `json:"status"`
	Message string `json:"message"`
}

// unready returns why a pod gets no requests, "" if it may.
func (p *podStatus) unready() string {
	for _, c := range p.Conditions {
		if c.Type == "Ready" {
			switch {
			case c.Status == "True":
				return ""
			case c.Message != "":
				return "pod not ready: " + observe.ClipTo(c.Message, observe.MaxText)
			}
		}
	}
	return "pod not ready"
}

// over reports whether a pod's containers have ended for good: its address may belong to another pod.
func (p *podStatus) over() bool { return p.Phase == "Succeeded" || p.Phase == "Failed" }

// poolSpec is that of an InferencePool v1.
type poolSpec struct {
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
}

type targetPort struct {
	Number int `json:"number"`
}

type objectiveSpec struct {
	Priority int `json:"priority"` // absent: 0
	PoolRef  struct {
		Name string `json:"name"`
	} `json:"poolRef"`
}
