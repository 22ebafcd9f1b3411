package feed

import (
	"testing"
	"time"
)

func TestNegativeOptionsMeanTheDefaults(t *testing.T) {
	s := Source{PollInterval: -1, ReconnectMin: -1, ReconnectMax: -1, ReplayTotal: -1, ReplayIdle: -1}
	s.setDefaults()
	if s.PollInterval != time.Second || s.ReconnectMin != 100*time.Millisecond || s.ReconnectMax != 5*time.Second ||
		s.ReplayTotal != 2*time.Minute || s.ReplayIdle != 2*time.Second {
		t.Errorf("got %v, %v, %v, %v and %v, want the defaults", s.PollInterval, s.ReconnectMin, s.ReconnectMax, s.ReplayTotal, s.ReplayIdle)
	}
	m := NewMachine(MachineConfig{MaxPending: -1, Attempts: -1, SilentAfter: -1})
	if m.cfg.MaxPending != 8<<20 || m.cfg.Attempts != 3 || m.cfg.SilentAfter != 16 || m.Full() {
		t.Errorf("got %+v, full %v, want the defaults and room", m.cfg, m.Full())
	}
}
