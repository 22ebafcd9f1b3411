package fleet

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/tokens/models"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/internal/workers"
	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newFleet starts a fleet that updates a router of its own.
func newFleet(t testing.TB, yaml string, list ...workers.Worker) *Fleet {
	t.Helper()
	c, err := config.Parse("test.yaml", []byte("models: [{name: demo, aliases: [alias], adapters: [sql]}]\n"+yaml))
	if err != nil {
		t.Fatal(err)
	}
	f := start(t, c, &Model{Config: c.Models[0]})
	f.SetWorkers(list)
	return f
}

func start(t testing.TB, c *config.Config, m ...*Model) *Fleet {
	t.Helper()
	router, err := routing.New(c.Routing.Config)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := c.Index.Secret()
	if err != nil {
		t.Fatal(err)
	}
	key := sha256.Sum256([]byte(secret))
	began := time.Now()
	var mu sync.Mutex
	f, err := New(Options{Config: c, Models: m, Key: kvindex.Key(key[:]), Metrics: observe.New("test"), Log: zerolog.Nop(), Now: time.Now,
		Update: func(at time.Time, change func(r *routing.Router, now time.Duration)) {
			mu.Lock()
			defer mu.Unlock()
			change(router, at.Sub(began))
		}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Close)
	return f
}

func worker(name string, ranks int) workers.Worker {
	return workers.Worker{Ready: true, Generation: 1, Worker: config.Worker{
		Name: name, Address: fmt.Sprintf("10.0.0.%d:8000", name[0]), Engine: "vllm", Role: "both", Ranks: ranks, RankBy: "header", Speed: 1, Models: []string{"demo"},
	}}
}

// qwen loads the tokenizer once for all tests.
var qwen = sync.OnceValues(func() (*shape.Model, error) {
	files, err := models.Open("builtin:qwen3")
	if err != nil {
		return nil, err
	}
	return shape.Load(files, shape.Options{Names: []string{"demo"}})
})

// A worker that flaps is asked for its models by one goroutine, however often it becomes ready.
func TestAFlappingWorkerIsCheckedOnce(t *testing.T) {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"data":[{"id":"other"}]}`) }))
	defer engine.Close()
	f := newFleet(t, "")
	w := worker("a", 1)
	w.Address = engine.Listener.Addr().String()
	const flaps = 200
	before := runtime.NumGoroutine()
	for i := range flaps {
		w.Ready = i%2 == 0
		f.SetWorkers([]workers.Worker{w})
	}
	if n := runtime.NumGoroutine() - before; n > flaps/4 {
		t.Errorf("got %d more goroutines after %d changes, want a few", n, flaps)
	}
	warned := func() bool {
		return slices.ContainsFunc(f.Warnings(), func(w observe.Warning) bool { return w.Reason == "other_models" })
	}
	for !warned() { // the test's timeout ends it
		time.Sleep(5 * time.Millisecond)
	}
}

// Of many workers that become ready only maxListing are asked concurrently, and all in the end.
func TestModelsAreAskedForByTheGate(t *testing.T) {
	var mu sync.Mutex
	now, most, all := 0, 0, 0
	release := make(chan struct{})
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		now, all = now+1, all+1
		most = max(most, now)
		mu.Unlock()
		<-release
		mu.Lock()
		now--
		mu.Unlock()
		fmt.Fprint(w, `{"data":[{"id":"demo"}]}`)
	}))
	defer engine.Close()
	f := newFleet(t, "")
	var list []workers.Worker
	for i := range 3 * maxListing {
		w := worker(fmt.Sprint("w", i), 1)
		w.Address = engine.Listener.Addr().String()
		list = append(list, w)
	}
	f.SetWorkers(list)
	asked := func(n int) {
		for done := false; !done; time.Sleep(20 * time.Millisecond) { // the test's timeout ends it
			mu.Lock()
			done = all >= n
			mu.Unlock()
		}
	}
	asked(maxListing)
	close(release)
	asked(len(list))
	if most > maxListing {
		t.Errorf("got %d workers asked concurrently, want %d at most", most, maxListing)
	}
}

// A request waits for the lists of models at most listTimeout, however many workers hang.
func TestListEndsThoughWorkersHang(t *testing.T) {
	c := config.Default()
	c.Index.MaxBytes = 1 << 20
	f, err := New(Options{Config: &c, Metrics: observe.New("test"), Log: zerolog.Nop(), Now: time.Now, Update: func(time.Time, func(*routing.Router, time.Duration)) {}})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for range maxListing {
		f.listGate <- struct{}{} // as many are asked as may be, and none answers
	}
	f.SetWorkers([]workers.Worker{{Ready: true, Generation: 1, Worker: config.Worker{Name: "a", Address: "127.0.0.1:1", Engine: "vllm", Role: "both", Speed: 1}}})
	if f.List(t.Context()) {
		t.Error("got an answer of every worker, want one missing")
	}
}
