package fleet

import (
	"cmp"
	"errors"
	"maps"
	"slices"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/internal/workers"
)

// Reasons of Unfit.
var (
	ErrNoTokenizer = errors.New("the model has no tokenizer")
	ErrSuspended   = errors.New("the tokenizer differs from the engine's")
)

// Model is a configured model with its sources of token ids.
type Model struct {
	Config config.Model
	Engine shape.Engine
	// Tokens computes the ids; nil where there is no tokenizer.
	Tokens *shape.Model
	// Refused is why the configured tokenizer could not be loaded, "" if it was loaded. Away reports that loading it again
	// may succeed.
	Refused string
	Away    bool
	// Remote computes ids where Tokens cannot; may be nil.
	Remote *shape.Remote

	agreement agreement
}

// Names returns all names that clients may send: name, aliases and adapters.
func (m *Model) Names() []string {
	return slices.Concat([]string{m.Config.Name}, m.Config.Aliases, m.Config.Adapters)
}

// Unfit returns why the model cannot compute ids itself, nil if it can.
func (m *Model) Unfit() error {
	if m.Tokens == nil {
		return ErrNoTokenizer
	}
	if d := m.agreement.differing.Load(); d != nil && d.all {
		return ErrSuspended
	}
	return nil
}

// serves reports whether a worker that lists these names serves the model.
func serves(names []string, m *Model) bool {
	return len(names) == 0 || slices.ContainsFunc(names, func(n string) bool { return slices.Contains(m.Names(), n) })
}

// cacheModel is the name under which the index knows a worker's cache: the configured model that the worker serves. So
// aliases and adapters in its list refer to the same cache as in a request.
func (f *Fleet) cacheModel(served []string) string {
	for _, name := range served {
		if s := f.models.Load().byName[name]; s != nil {
			return s.Config.Name
		}
	}
	if len(served) > 0 {
		return served[0]
	}
	if s := f.Model(""); s != nil {
		return s.Config.Name
	}
	return ""
}

// Model finds a model by the name in a request, nil if it is not configured; "" means the only one.
func (f *Fleet) Model(name string) *Model {
	all := f.models.Load()
	if s := all.byName[name]; s != nil || name != "" || len(all.list) != 1 {
		return s
	}
	return all.list[0]
}

// SGLang returns the model whose token ids bound those of a request that an SGLang may get, nil if none does: named, or if that is nil
// the model with the most ids of those with SGLang and a tokenizer, else of those with a tokenizer. A worker may be an SGLang
// where the engine of its model is another.
func (f *Fleet) SGLang(named *Model) *Model {
	all, workers := f.models.Load(), f.View().sglang
	switch {
	case named == nil && len(workers) > 0:
		return cmp.Or(all.sglang, all.largest)
	case named == nil:
		return all.sglang
	case workers[""] || workers[named.Config.Name] || named.Engine == shape.SGLang:
		return named
	}
	return nil
}

// modelSet holds the configured models. It is replaced as a whole.
type modelSet struct {
	list            []*Model
	byName          map[string]*Model // every name
	sglang, largest *Model            // of those with SGLang, and of all, the one with the most ids; see Fleet.SGLang
}

func newModelSet(list []*Model) *modelSet {
	s := &modelSet{list: list, byName: map[string]*Model{}}
	for _, m := range list {
		for _, name := range m.Names() {
			s.byName[name] = m
		}
		if m.Tokens != nil && (s.largest == nil || m.Tokens.IDs() > s.largest.Tokens.IDs()) {
			s.largest = m
		}
		if m.Engine == shape.SGLang && m.Tokens != nil && (s.sglang == nil || m.Tokens.IDs() > s.sglang.Tokens.IDs()) {
			s.sglang = m
		}
	}
	return s
}

// SetModels replaces the models. A request that is being decided keeps its model. New models are compared with the
// workers as at startup. Workers whose blocks now belong to another model are cleared, and their feeds restart.
func (f *Fleet) SetModels(list []*Model) {
	f.changing.Lock()
	defer f.changing.Unlock()
	f.catalog.mu.Lock()
	f.learnContexts(list)
	old, v := f.models.Swap(newModelSet(list)).list, f.View()
	f.catalog.mu.Unlock()
	var all []workers.Worker
	for _, name := range slices.Sorted(maps.Keys(v.members)) {
		all = append(all, v.members[name].Worker)
	}
	f.setWorkers(all)
	for _, m := range f.View().members {
		f.checkMember(m)
	}
	for _, m := range old {
		if !slices.Contains(list, m) {
			m.agreement.end()
		}
		if !slices.ContainsFunc(list, func(other *Model) bool { return other.Config.Name == m.Config.Name }) {
			f.Metrics.ForgetModel(m.Config.Name)
		}
	}
}
