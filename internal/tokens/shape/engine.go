package shape

import "fmt"

// Engine is a type of inference engine.
type Engine uint8

// The engines.
const (
	VLLM Engine = iota
	SGLang
	TRTLLM
)

var engineNames = [...]string{"vllm", "sglang", "trtllm"}

// String returns the engine's name in configuration and metrics.
func (e Engine) String() string {
	if int(e) < len(engineNames) {
		return engineNames[e]
	}
	return "unknown"
}

// ParseEngine returns the engine with this name.
func ParseEngine(name string) (Engine, error) {
	for i, n := range engineNames {
		if n == name {
			return Engine(i), nil
		}
	}
	return 0, fmt.Errorf("unknown engine %q: vllm, sglang or trtllm", name)
}

// Refusal is the error for a request that the engine would refuse, with the status and the reason that it would give.
//
//nolint:errname // it is what the engine does, and reads as such where it is used
type Refusal struct {
	Status int
	Reason string
	// Guessed: the refusal depends on a flag or file of the engine that is unknown here.
	Guessed bool
}

func (r *Refusal) Error() string { return r.Reason }

func refuse(format string, args ...any) error {
	return &Refusal{Status: 400, Reason: fmt.Sprintf(format, args...)}
}

func guess(format string, args ...any) error {
	return &Refusal{Status: 400, Reason: fmt.Sprintf(format, args...), Guessed: true}
}

func refuseWith(status int, reason string) error { return &Refusal{Status: status, Reason: reason} }
