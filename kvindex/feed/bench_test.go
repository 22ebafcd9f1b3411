package feed_test

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/kvindex/feed"
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

// BenchmarkDecodeTRTLLM decodes one event of the HTTP poll: 32 blocks of 32 tokens.
func BenchmarkDecodeTRTLLM(b *testing.B) {
	var blocks []string
	for i := range 32 {
		var tokens []string
		for k := range 32 {
			tokens = append(tokens, fmt.Sprintf(`{"type":"unique_token","token_id":%d,"token_extra_id":0}`, (i*32+k)*7919%151_000))
		}
		blocks = append(blocks, fmt.Sprintf(`{"type":"stored_block","block_hash":%d,"tokens":[%s],"cache_level":0,"priority":35,"mm_keys":[],"cache_salt":null}`, uint64(i+1)*0x9e3779b97f4a7c15, strings.Join(tokens, ",")))
	}
	event := []byte(`{"event_id":1,"window_size":4096,"hash_algo":"v1_block_key","data":{"type":"stored","parent_hash":null,"blocks":[` + strings.Join(blocks, ",") + `]}}`)
	d := feed.NewDecoder(feed.TRTLLM, 32)
	for b.Loop() {
		if batch, err := d.Decode(event); err != nil || len(batch.Events) != 1 || len(batch.Events[0].Hashes) != 32 {
			b.Fatal(err, batch.Dropped)
		}
	}
	b.ReportMetric(float64(b.N*32)/b.Elapsed().Seconds()/1e6, "Mblocks/s")
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

// publish connects a feed to a publisher that writes n prepared messages in bursts, with
// increasing numbers, and waits until the sink has received want blocks. The CPU time includes
// the publisher's writes.
func publish(b *testing.B, sink feed.Sink, blocks *atomic.Int64, want int64, messages [][]byte) time.Duration {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	f, err := feed.Start(b.Context(), feed.Source{Worker: "w", Engine: feed.VLLM, Rank: kvindex.NoRank, Endpoint: "tcp://" + l.Addr().String()}, sink)
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
	var buf []byte
	runtime.GC()
	b.ResetTimer()
	before := cpu()
	for seq := range uint64(b.N) {
		payload := messages[seq%uint64(len(messages))]
		buf = append(buf, 1, 2, 'k', 'v', 1, 8)
		buf = binary.BigEndian.AppendUint64(buf, seq)
		buf = append(buf, 2)
		buf = binary.BigEndian.AppendUint64(buf, uint64(len(payload)))
		buf = append(buf, payload...)
		if len(buf) > 256<<10 || seq == uint64(b.N)-1 {
			if _, err := nc.Write(buf); err != nil {
				b.Fatal(err)
			}
			buf = buf[:0]
		}
	}
	for blocks.Load() < want {
		time.Sleep(50 * time.Microsecond)
	}
	used := cpu() - before
	b.ReportMetric(float64(want)/used.Seconds()/1e6, "Mblocks/cpu-s")
	return used
}

// BenchmarkSocketToSink measures the path from the socket to the sink: ZMTP, machine, decoder.
func BenchmarkSocketToSink(b *testing.B) {
	for _, s := range shapes {
		b.Run(s.name, func(b *testing.B) {
			sink := &counter{}
			used := publish(b, sink, &sink.blocks, int64(b.N*s.events*s.blocks), [][]byte{benchPayload(b, s.events, s.blocks, true)})
			b.ReportMetric(float64(b.N*s.events)/used.Seconds()/1e3, "kevents/cpu-s")
		})
	}
}

// indexSink applies events to a real index.
type indexSink struct {
	counter
	index *kvindex.Index
	slot  kvindex.Slot
}

func (s *indexSink) Apply(t kvindex.Target, ev *kvindex.Event) error {
	if err := s.index.Apply(s.slot, ev); err != nil {
		return err
	}
	return s.counter.Apply(t, ev)
}

// churn returns messages that each store a chain of blocks and remove the one stored 128
// messages before, to be sent cyclically. single removes each block by an event of its own.
func churn(b *testing.B, blocks int, single bool) [][]byte {
	const ring, age = 256, 128
	messages := make([][]byte, ring)
	chain := func(i int) []uint64 {
		h := make([]uint64, blocks)
		for k := range h {
			h[k] = uint64((i%ring)*blocks+k+1) * 0x9e3779b97f4a7c15
		}
		return h
	}
	for i := range messages {
		tokens := make([]uint32, 16*blocks)
		for k := range tokens {
			tokens[k] = uint32((i*len(tokens)+k)*7919) % 151_000
		}
		events := []any{
			m{"type": "BlockStored", "block_hashes": chain(i), "parent_block_hash": nil, "token_ids": tokens, "block_size": 16, "lora_id": nil, "medium": "GPU", "lora_name": nil,
				"extra_keys": make([]any, blocks), "group_idx": 0, "kv_cache_spec_kind": "full_attention"},
		}
		removed := chain(i + ring - age)
		for each := range slices.Chunk(removed, map[bool]int{true: 1, false: blocks}[single]) {
			events = append(events, m{"type": "BlockRemoved", "block_hashes": each, "medium": "GPU", "group_idx": 0})
		}
		messages[i] = pack(b, []any{1.5, events, 0})
	}
	return messages
}

// BenchmarkSocketToIndex measures the whole path of an event. Both events of a message count.
func BenchmarkSocketToIndex(b *testing.B) {
	for _, c := range []struct {
		name   string
		blocks int
		single bool
	}{{"single blocks", 1, false}, {"chains of 32", 32, false}, {"chains of 32, removed one by one", 32, true}} {
		b.Run(c.name, func(b *testing.B) {
			blocks := c.blocks
			index, err := kvindex.New(kvindex.Config{BlockSize: 16})
			if err != nil {
				b.Fatal(err)
			}
			slot, err := index.Add(kvindex.Target{Worker: "w", Rank: kvindex.NoRank}, "m", 16)
			if err != nil {
				b.Fatal(err)
			}
			sink := &indexSink{index: index, slot: slot}
			used := publish(b, sink, &sink.blocks, int64(b.N*2*blocks), churn(b, blocks, c.single))
			b.ReportMetric(float64(2*b.N)/used.Seconds()/1e3, "kevents/cpu-s")
		})
	}
}

// targetSink applies each target's events to an index.
type targetSink struct {
	counter
	index *kvindex.Index
	slots map[kvindex.Target]kvindex.Slot
}

func (s *targetSink) Apply(t kvindex.Target, ev *kvindex.Event) error {
	if err := s.index.Apply(s.slots[t], ev); err != nil {
		return err
	}
	return s.counter.Apply(t, ev)
}

// BenchmarkSteady publishes 20,000 single-block events per second, stored and removed, two per
// message, spread over feeds with one connection each. It measures their share of a core without
// the publisher, and the memory of a feed.
func BenchmarkSteady(b *testing.B) {
	const perSecond, tick = 10_000, 5 * time.Millisecond
	messages := churn(b, 1, false)
	for _, feeds := range []int{1, 1000} {
		b.Run(fmt.Sprintf("feeds=%d", feeds), func(b *testing.B) {
			index, err := kvindex.New(kvindex.Config{BlockSize: 16})
			if err != nil {
				b.Fatal(err)
			}
			sink := &targetSink{index: index, slots: map[kvindex.Target]kvindex.Slot{}}
			for f := range feeds {
				t := kvindex.Target{Worker: fmt.Sprint(f), Rank: kvindex.NoRank}
				if sink.slots[t], err = index.Add(t, "m", 16); err != nil {
					b.Fatal(err)
				}
			}
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				b.Fatal(err)
			}
			defer l.Close()
			before := inUse()
			connections := make([]net.Conn, feeds)
			for f := range connections {
				src := feed.Source{Worker: fmt.Sprint(f), Engine: feed.VLLM, Rank: kvindex.NoRank, Endpoint: "tcp://" + l.Addr().String()}
				reader, err := feed.Start(b.Context(), src, sink)
				if err != nil {
					b.Fatal(err)
				}
				defer reader.Close()
				if connections[f], err = l.Accept(); err != nil {
					b.Fatal(err)
				}
				defer connections[f].Close()
				if _, err := connections[f].Write(publisherHello()); err != nil {
					b.Fatal(err)
				}
			}
			var buf []byte
			send := func(n int) {
				payload := messages[n/feeds%len(messages)]
				buf = append(buf[:0], 1, 2, 'k', 'v', 1, 8)
				buf = binary.BigEndian.AppendUint64(buf, uint64(n/feeds))
				buf = append(buf, 2)
				buf = binary.BigEndian.AppendUint64(buf, uint64(len(payload)))
				buf = append(buf, payload...)
				if _, err := connections[n%feeds].Write(buf); err != nil {
					b.Fatal(err)
				}
			}
			arrived := func(n int) {
				for sink.blocks.Load() < int64(2*n) {
					time.Sleep(tick)
				}
			}
			for f := range feeds {
				send(f)
			}
			arrived(feeds)
			runtime.LockOSThread() // so that the publisher's CPU time is this thread's
			defer runtime.UnlockOSThread()
			b.ResetTimer()
			began, all, own := time.Now(), cpu(), threadTime()
			reads0 := syscr()
			for n := range b.N {
				send(feeds + n)
				if ahead := time.Duration(n)*time.Second/perSecond - time.Since(began); ahead > tick {
					time.Sleep(ahead)
				}
			}
			arrived(feeds + b.N)
			used := cpu() - all - (threadTime() - own)
			// At 20,000 per second, even if the machine was too busy to publish that many.
			b.ReportMetric(100*used.Seconds()*perSecond/float64(b.N), "%core")
			b.ReportMetric(float64(syscr()-reads0)/float64(b.N), "reads/msg")
			b.ReportMetric((inUse()-before)/float64(feeds)/1024, "KB/feed")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// inUse returns the bytes of heap and stacks after a collection.
func inUse() float64 {
	runtime.GC()
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return float64(s.HeapAlloc + s.StackInuse)
}

func threadTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

// syscr returns the number of the process's read system calls so far, 0 if it is unknown.
func syscr() (n int) {
	t, err := os.ReadFile("/proc/self/io")
	if err != nil {
		return 0
	}
	_, after, _ := strings.Cut(string(t), "syscr: ")
	_, _ = fmt.Sscan(after, &n)
	return n
}
