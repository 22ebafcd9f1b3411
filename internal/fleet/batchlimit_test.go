package fleet

import (
	"encoding/binary"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
)

// A batch of events has at most 16 MiB: an engine that announces more loses its connection.
func TestBatchesOfAFeedAreBounded(t *testing.T) {
	for bytes, refused := range map[uint64]bool{16<<20 - 100: false, 16<<20 + 1: true} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		hello := slices.Concat([]byte("\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x03\x01NULL"), make([]byte, 48), []byte("\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"))
		ended := make(chan struct{})
		go func() {
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			_, _ = c.Write(binary.BigEndian.AppendUint64(append(hello, "\x01\x00\x02"...), bytes))
			for buf := make([]byte, 1<<10); err == nil; {
				_, err = c.Read(buf)
			}
			close(ended)
		}()
		w := worker("w", 1)
		w.Events.Endpoint = "tcp://" + l.Addr().String()
		f := newFleet(t, "", w)
		failed := func() bool {
			for _, s := range f.FeedStatus() {
				if strings.Contains(s.LastError, "16777216") {
					return true
				}
			}
			return false
		}
		select {
		case <-ended:
		case <-time.After(300 * time.Millisecond):
		}
		for end := time.Now().Add(10 * time.Second); refused && !failed() && time.Now().Before(end); {
			time.Sleep(5 * time.Millisecond)
		}
		if failed() != refused {
			t.Errorf("a batch of %d bytes: got refused %v, want %v", bytes, !refused, refused)
		}
	}
}
