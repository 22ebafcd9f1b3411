package feed

import (
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed/zmtp"
)

// Source describes where a worker's events come from. The zero value of a field
// means its default or nothing, as said.
type Source struct {
	// Worker is the worker's name in targets.
	Worker string
	// Engine is the dialect; required.
	Engine Engine
	// Rank is the rank of the feed's target; NoRank for a worker without ranks. With
	// RankFromBatch it is what a batch that names no rank means.
	Rank int32
	// RankFromBatch takes the rank from each batch.
	RankFromBatch bool
	// StartRank is subtracted from a batch's rank: engines that are spread over nodes
	// publish the global rank, while requests name the local one.
	StartRank int32
	// BlockSize is the block size that the worker is configured to have; 0 adopts
	// that of its events.
	BlockSize int

	// Endpoint is the publisher ("tcp://10.0.0.1:5557", "ipc://path"). With Bind it is
	// our own, and the publisher connects.
	Endpoint string
	Bind     bool
	// Topic is the subscription's prefix; default everything.
	Topic string
	// Replay is the endpoint that past batches are asked from; none if empty.
	Replay string

	// PollURL is TensorRT-LLM's POST /kv_cache_events, instead of Endpoint.
	PollURL string
	// PollInterval is the time between polls that nothing asked for; default 1 s.
	PollInterval time.Duration

	// Machine bounds the sequence's state; its Replay and Polled are set by the feed.
	// With Resume, Rank has to be that of the target that the snapshot had.
	Machine MachineConfig
	// Conn bounds connections.
	Conn zmtp.Options
	// ReconnectMin and ReconnectMax bound the wait before another connection or
	// replay, doubled each time; defaults 100 ms and 5 s.
	ReconnectMin, ReconnectMax time.Duration
	// ReplayTotal and ReplayIdle bound a replay and the silence within one; defaults
	// 2 min and 2 s. An engine looks at its replay socket every 0.1 s.
	ReplayTotal, ReplayIdle time.Duration
	// Replays limits the replays that run at once in the process; nil does not.
	Replays *Limit
}

// Limit is a number of things that may run at once.
type Limit struct{ slots chan struct{} }

// NewLimit returns a Limit of n.
func NewLimit(n int) *Limit { return &Limit{make(chan struct{}, n)} }

func (l *Limit) acquire(done <-chan struct{}) bool {
	if l == nil {
		return true
	}
	select {
	case l.slots <- struct{}{}:
		return true
	case <-done:
		return false
	}
}

func (l *Limit) release() {
	if l != nil {
		<-l.slots
	}
}

func (s *Source) setDefaults() {
	for _, f := range []struct {
		p *time.Duration
		v time.Duration
	}{
		{&s.PollInterval, time.Second}, {&s.ReconnectMin, 100 * time.Millisecond}, {&s.ReconnectMax, 5 * time.Second},
		{&s.ReplayTotal, 2 * time.Minute}, {&s.ReplayIdle, 2 * time.Second},
	} {
		if *f.p <= 0 {
			*f.p = f.v
		}
	}
}

// check says what is wrong with a source.
func (s *Source) check() error {
	switch {
	case s.Worker == "":
		return errors.New("feed: source without a worker")
	case s.Engine != VLLM && s.Engine != SGLang && s.Engine != TRTLLM:
		return fmt.Errorf("feed: engine %q: want vllm, sglang or trtllm", s.Engine)
	case s.Rank < kvindex.NoRank:
		return fmt.Errorf("feed: rank %d", s.Rank)
	case (s.PollURL == "") == (s.Endpoint == ""):
		return errors.New("feed: want an endpoint or a poll URL")
	case s.PollURL != "":
		if s.Engine != TRTLLM {
			return fmt.Errorf("feed: %s publishes over ZMQ, it is not polled", s.Engine)
		}
		return checkURL(s.PollURL)
	}
	for _, e := range []string{s.Endpoint, s.Replay} {
		if e == "" {
			continue
		}
		if err := zmtp.CheckEndpoint(e); err != nil {
			return fmt.Errorf("feed: %w", err)
		}
		if strings.HasPrefix(e, "tcp://") && strings.HasSuffix(e, ":0") && (!s.Bind || e == s.Replay) {
			return fmt.Errorf("feed: endpoint %q: nobody listens at port 0", e)
		}
	}
	return nil
}

// checkURL refuses what no request can be sent to.
func checkURL(text string) error {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return fmt.Errorf("feed: %w", err)
	case u.Scheme != "http" && u.Scheme != "https", u.Hostname() == "":
		return fmt.Errorf("feed: %q: want http://host:port/path", text)
	case u.Port() == "":
		return nil
	}
	if port, err := strconv.ParseUint(u.Port(), 10, 16); err != nil || port == 0 {
		return fmt.Errorf("feed: %q: port %s is not a number from 1 to 65535", text, u.Port())
	}
	return nil
}
