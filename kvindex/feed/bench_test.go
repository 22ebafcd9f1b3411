package feed_test

import (
	"encoding/binary"
	"net"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
	"github.com/kvlane/kvlane/kvindex/feed/zmtp"
)

// benchPayload is a vLLM batch of events x blocks of 16 tokens.
func benchPayload(b testing.TB, events, blocks int, asMap bool) []byte {
	var list []any
	for e := range events {
		hashes := make([]uint64, blocks)
		for i := range hashes {
			hashes[i] = uint64(e*blocks+i+1) * 0x9e3779b97f4a7c15
		}
		tokens := make([]uint32, 16*blocks)
		for i := range tokens {
			tokens[i] = uint32(i*7919) % 151_000
		}
		if asMap {
			list = append(list, m{"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": hashes[0] + 1, "token_ids": tokens, "block_size": 16,
				"lora_id": nil, "medium": "GPU", "lora_name": nil, "extra_keys": make([]any, blocks), "group_idx": 0, "kv_cache_spec_kind": "full_attention"})
		} else {
			list = append(list, []any{"BlockStored", hashes, hashes[0] + 1, tokens, 16, nil, "GPU"})
		}
	}
	return pack(b, []any{1.5, list, 0})
}

var shapes = []struct {
	name           string
	events, blocks int
}{{"1x1", 1, 1}, {"1x32", 1, 32}, {"8x32", 8, 32}}

func BenchmarkDecode(b *testing.B) {
	for _, s := range shapes {
		for form, asMap := range map[string]bool{"array": false, "map": true} {
			b.Run(s.name+"/"+form, func(b *testing.B) {
				p := benchPayload(b, s.events, s.blocks, asMap)
				d := feed.NewDecoder(feed.VLLM, 0)
				b.ReportAllocs()
				for b.Loop() {
					if batch, err := d.Decode(p); err != nil || len(batch.Events) != s.events {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.N*s.events*s.blocks)/b.Elapsed().Seconds()/1e6, "Mblocks/s")
			})
		}
	}
}

// counter is a sink that only counts.
type counter struct{ blocks atomic.Int64 }

func (c *counter) Apply(_ kvindex.Target, ev *kvindex.Event) error {
	c.blocks.Add(int64(len(ev.Hashes)))
	return nil
}
func (*counter) Clear(kvindex.Target, feed.Reason)             {}
func (*counter) State(kvindex.Target, feed.State, feed.Reason) {}
func (*counter) Warn(kvindex.Target, feed.Reason, string)      {}

// cpu is the CPU time that this process has used.
func cpu() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkSocketToSink is the road from the socket to the sink: ZMTP, machine,
// decoder. The publisher writes prepared bytes in bursts; its writes are in the
// CPU time too.
func BenchmarkSocketToSink(b *testing.B) {
	for _, s := range shapes {
		b.Run(s.name, func(b *testing.B) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				b.Fatal(err)
			}
			defer l.Close()
			sink := &counter{}
			f, err := feed.Start(b.Context(), feed.Source{Worker: "w", Engine: feed.VLLM, Rank: kvindex.NoRank, Endpoint: "tcp://" + l.Addr().String(), Conn: zmtp.Options{}}, sink)
			if err != nil {
				b.Fatal(err)
			}
			defer f.Close()
			nc, err := l.Accept()
			if err != nil {
				b.Fatal(err)
			}
			defer nc.Close()
			if _, err := nc.Write(publisherHello()); err != nil {
				b.Fatal(err)
			}
			payload := benchPayload(b, s.events, s.blocks, true)
			one := append([]byte{1, 2, 'k', 'v', 1, 8}, make([]byte, 8)...)
			one = append(one, 2)
			one = binary.BigEndian.AppendUint64(one, uint64(len(payload)))
			one = append(one, payload...)
			burst := max(1, 256<<10/len(one))
			buf := make([]byte, 0, burst*len(one))
			runtime.GC()
			b.ResetTimer()
			before := cpu()
			seq := uint64(0)
			for left := b.N; left > 0; {
				n := min(left, burst)
				buf = buf[:0]
				for range n {
					binary.BigEndian.PutUint64(one[6:], seq)
					seq++
					buf = append(buf, one...)
				}
				if _, err := nc.Write(buf); err != nil {
					b.Fatal(err)
				}
				left -= n
			}
			want := int64(b.N * s.events * s.blocks)
			for sink.blocks.Load() < want {
				time.Sleep(50 * time.Microsecond)
			}
			used := (cpu() - before).Seconds()
			b.ReportMetric(float64(want)/used/1e6, "Mblocks/cpu-s")
			b.ReportMetric(float64(b.N*s.events)/used/1e3, "kevents/cpu-s")
		})
	}
}
