package main

import (
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvlane/kvlane/extproc"
	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/internal/steering"
)

func TestProtocolMetricsKnowEveryModeAndKind(t *testing.T) {
	t.Parallel()
	m := observe.New("test")
	hooks := protocolMetrics(m)
	hooks.Answered(extproc.ModeBuffered, time.Millisecond)
	if n, err := testutil.GatherAndCount(m.Registry, "kvlane_extproc_answer_seconds"); err != nil || n != 1 {
		t.Errorf("%d answer times, %v: want that of the mode that came", n, err)
	}
	for mode := range extproc.NumModes {
		hooks.Opened(mode)
		hooks.Opened(mode)
		hooks.Closed(mode)
		hooks.Answered(mode, time.Millisecond)
		if got := testutil.ToFloat64(m.ExtProcStreams.WithLabelValues(mode.String())); got != 1 {
			t.Errorf("%v: %v streams open", mode, got)
		}
	}
	for kind := extproc.KindRequestHeaders; kind < extproc.NumKinds; kind++ {
		hooks.Message(kind)
		if got := testutil.ToFloat64(m.ExtProcMessages.WithLabelValues(kind.String())); got != 1 {
			t.Errorf("%v: %v messages", kind, got)
		}
	}
	if n, err := testutil.GatherAndCount(m.Registry, "kvlane_extproc_answer_seconds"); err != nil || n != int(extproc.NumModes) {
		t.Errorf("%d answer times, %v", n, err)
	}
}

// The server has the bounds of the configuration, and removes what a client must not set.
func TestServerHasTheConfigurationsBounds(t *testing.T) {
	t.Parallel()
	c, err := config.Parse("k.yaml", []byte(`limits: {max_body: 1MiB, bodies_in_flight: {count: 3, bytes: 7MiB}, requests_per_address: 9, max_streams: 5}
envoy: {stall_timeout: 4s, message_timeout: 250s}
tenants: {salt_header: x-tenant}
disagg: {connector: p2p-nccl}
`))
	if err != nil {
		t.Fatal(err)
	}
	o := extProcOptions(c, observe.New("test"))
	if o.BodyLimit != 1<<20 || o.MaxBodies != 3 || o.MaxBodyBytes != 7<<20 || o.MaxStreams != 5 || o.MaxPerAddress != 9 {
		t.Errorf("got %d bytes of a body, %d bodies of %d bytes, %d streams, %d requests of an address, want 1 MiB, 3 of 7 MiB, 5, 9", o.BodyLimit, o.MaxBodies, o.MaxBodyBytes, o.MaxStreams, o.MaxPerAddress)
	}
	if o.Name != "kvlane" {
		t.Errorf("got the name %q in details, want kvlane", o.Name)
	}
	if o.ExtendTimeout != 250*time.Second || o.ExtendAfter != time.Second || o.LateTickets >= 0 {
		t.Errorf("got %v more asked for after %v, %d late tickets, want 250 s after 1 s, and none without an access log", o.ExtendTimeout, o.ExtendAfter, o.LateTickets)
	}
	if want := append(steering.AtKvlane(), "x-tenant", "x-cache-salt", "x-smg-routing-key"); !slices.Equal(o.ControlHeaders, want) {
		t.Errorf("got %q removed, want %q", o.ControlHeaders, want)
	}
	if o.RequestID == nil || o.RequestID("fine") == "fine" {
		t.Error("got a client's request id with p2p-nccl, want another")
	}
}
