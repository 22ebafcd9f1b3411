package feed

import (
	"cmp"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed/zmtp"
)

// Source describes where a worker's events come from. The zero value of a field means its default, or off.
type Source struct {
	// Worker is the worker's name in targets.
	Worker string
	// Engine is the event dialect; required.
	Engine Engine
	// Rank is the rank of the feed's target; NoRank for a worker without ranks. With
	// RankFromBatch it is the rank of batches that carry none.
	Rank int32
	// RankFromBatch takes the rank from each batch.
	RankFromBatch bool
	// BlockSize is the worker's configured block size in tokens; 0 adopts that of its events.
	BlockSize int

	// Endpoint is the publisher's address ("tcp://10.0.0.1:5557", "ipc://path"). With Bind it is
	// a local address to which the publisher connects.
	Endpoint string
	Bind     bool
	// Topic is the subscription's prefix; the default matches everything.
	Topic string
	// Replay is the endpoint that serves past batches; empty if there is none.
	Replay string

	// PollURL is TensorRT-LLM's POST /kv_cache_events, instead of Endpoint.
	PollURL string
	// PollInterval is the time between polls that are not triggered by requests, and PollTimeout
	// bounds a poll; defaults 1 s and 30 s.
	PollInterval, PollTimeout time.Duration

	// Machine configures the sequence's state machine; the feed sets its Replay and Polled. With
	// Resume, Rank must be that of the snapshot's target.
	Machine MachineConfig
	// Conn configures connections.
	Conn zmtp.Options
	// ReconnectMin and ReconnectMax limit the wait before another connection or replay, which
	// doubles each time; defaults 100 ms and 5 s.
	ReconnectMin, ReconnectMax time.Duration
	// ReplayTotal and ReplayIdle limit the duration of a replay and the silence within one;
	// defaults 2 min and 2 s. An engine polls its replay socket every 0.1 s.
	ReplayTotal, ReplayIdle time.Duration
	// Replays limit the concurrent replays, such as those of a worker and those of the process. They are acquired in order.
	Replays []*semaphore.Weighted
	// Large limits the batches of more than LargeBatch bytes that are received or processed concurrently; acquired as
	// Replays.
	Large []*semaphore.Weighted
}

// LargeBatch is the size in bytes above which a batch needs a place in Source.Large; engines send less. A sender that
// takes longer than largeWithin for the batch loses the place and its connection.
const LargeBatch = 1 << 20

var largeWithin = 10 * time.Second // shorter in tests

func (s *Source) setDefaults() {
	s.PollInterval, s.PollTimeout = cmp.Or(max(s.PollInterval, 0), time.Second), cmp.Or(max(s.PollTimeout, 0), 30*time.Second)
	s.ReconnectMin, s.ReconnectMax = cmp.Or(max(s.ReconnectMin, 0), 100*time.Millisecond), cmp.Or(max(s.ReconnectMax, 0), 5*time.Second)
	s.ReplayTotal, s.ReplayIdle = cmp.Or(max(s.ReplayTotal, 0), 2*time.Minute), cmp.Or(max(s.ReplayIdle, 0), 2*time.Second)
}

// check returns what is wrong with a source.
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
			return fmt.Errorf("feed: endpoint %q: no engine can listen at port 0", e)
		}
	}
	return nil
}

// checkURL rejects URLs that cannot be requested.
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
