package extproc

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	epv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/types/known/structpb"
)

// fromAddress is a request's headers with the attribute source.address, which "" leaves out.
func fromAddress(source string, mode filterv3.ProcessingMode_BodySendMode) *epv3.ProcessingRequest {
	m := &epv3.ProcessingRequest{
		Request:        &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: &epv3.HttpHeaders{Headers: &corev3.HeaderMap{}}},
		ProtocolConfig: &epv3.ProtocolConfiguration{RequestBodyMode: mode},
	}
	if source != "" {
		m.Attributes = map[string]*structpb.Struct{attributesKey: {Fields: map[string]*structpb.Value{
			"request.id": structpb.NewStringValue("r"), "source.address": structpb.NewStringValue(source)}}}
	}
	return m
}

// A client has as many open requests as the options allow, whether they are decided or not, and more when some have ended. Others,
// and those whose address is not known, do not count.
func TestOpenRequestsOfAnAddressAreBounded(t *testing.T) {
	const most = 2
	b := newBed(t, Options{Name: "product", MaxPerAddress: most}, &recorder{})
	counted := func() (n int64) {
		b.srv.clients.mu.Lock()
		defer b.srv.clients.mu.Unlock()
		for client, k := range b.srv.clients.open {
			if k < 1 {
				t.Errorf("%x has an entry of %d", client, k)
			}
			n += k
		}
		return n
	}
	open := func(source string, mode filterv3.ProcessingMode_BodySendMode) (status int, end context.CancelFunc) {
		t.Helper()
		ctx, end := context.WithCancel(t.Context())
		st, err := b.client.Process(ctx)
		if err == nil {
			err = st.Send(fromAddress(source, mode))
		}
		if err != nil {
			t.Fatal(err)
		}
		r, err := st.Recv()
		if err != nil {
			t.Fatal(err)
		}
		i := r.GetImmediateResponse()
		if i != nil && (!strings.Contains(i.GetDetails(), "product_too_many_requests") || !strings.Contains(i.GetHeaders().String(), "retry-after")) {
			t.Errorf("got %v, want Retry-After and the reason", i)
		}
		return int(i.GetStatus().GetCode()), end
	}
	buffered, streamed := filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_STREAMED // waits for its body, and is decided
	first := map[string]context.CancelFunc{}
	for i, source := range []string{"192.0.2.1:10", "[2001:db8::1]:10", "192.0.2.2:10", "", "/run/socket"} {
		for k := range most {
			// Another port, another network of the /56: the same client.
			s := strings.NewReplacer(":10", fmt.Sprint(":1", k), "::1", fmt.Sprintf(":0:%x::", k)).Replace(source)
			status, end := open(s, []filterv3.ProcessingMode_BodySendMode{buffered, streamed}[(i+k)%2])
			if status != 0 {
				t.Fatalf("request %d of %q: got status %d, want none", k, s, status)
			}
			first[source] = end
		}
	}
	for source, want := range map[string]int{
		"192.0.2.1:99": 429, "[::ffff:192.0.2.1]:99": 429, "[2001:db8::ffff]:99": 429, "[2001:db8::1%eth0]:99": 429,
		"[2001:db8:0:1::1]:99": 429, "[2001:db8:0:ff::1]:99": 429, "[2001:db8:0:100::1]:99": 0, "[2001:db8:1::1]:99": 0, "192.0.2.3:99": 0, "": 0, "/run/socket": 0,
	} {
		if got, end := open(source, buffered); got != want {
			t.Errorf("a further request of %q: got status %d, want %d", source, got, want)
		} else {
			end()
		}
	}
	if n := b.failed(FailureNoAddress); n != 2*most+2 {
		t.Errorf("got %d requests without an address in the metrics, want %d", n, 2*most+2)
	}
	if n := b.failed(FailureTooManyRequests); n != 6 {
		t.Errorf("got %d refused requests in the metrics, want 6", n)
	}
	waitFor(t, func() bool { return counted() == 3*most })
	first["192.0.2.1:10"]()
	waitFor(t, func() bool { return counted() == 3*most-1 })
	for _, want := range []int{0, 429} {
		if got, _ := open("192.0.2.1:99", buffered); got != want {
			t.Errorf("after one has ended: got status %d, want %d", got, want)
		}
	}
	b.srv.SetPerAddress(0)
	if got, end := open("192.0.2.1:99", buffered); got != 0 {
		t.Errorf("without a bound: got status %d, want none", got)
	} else {
		end()
	}
	b.srv.SetPerAddress(1)
	if got, _ := open("192.0.2.1:99", buffered); got != 429 {
		t.Errorf("with a bound again: got status %d, want 429", got)
	}
}

// Without a bound addresses are not read.
func TestAddressesAreNotReadWithoutABound(t *testing.T) {
	raw := mem.BufferSlice{mem.SliceBuffer(marshal(t, fromAddress("192.0.2.1:10", 0)))}
	for bound, want := range map[bool]bool{true: true, false: false} {
		m := message{first: true, addressed: bound}
		if err := m.decode(raw); err != nil || (m.client != 0) != want {
			t.Errorf("bound %v: got %x (%v)", bound, m.client, err)
		}
	}
}

// The bound costs a request one small allocation, its address as a string.
func TestAddressesAreCountedInPlace(t *testing.T) {
	text := [][]byte{[]byte("192.0.2.1:41234"), []byte("[2001:db8:1:2:3:4:5:6]:41234")}
	s := addresses{open: map[address]int64{}}
	s.most.Store(1)
	if n := testing.AllocsPerRun(100, func() {
		for _, b := range text {
			addr := clientAddress(b)
			if !s.enter(addr) {
				t.Fatal("refused")
			}
			s.leave(addr)
		}
	}); n > float64(len(text)) {
		t.Errorf("got %v allocations for %d requests, want one each", n, len(text))
	}
}

// BenchmarkAddress is what the bound adds to a request.
func BenchmarkAddress(b *testing.B) {
	for name, text := range map[string][]byte{"IPv4": []byte("192.0.2.1:41234"), "IPv6": []byte("[2001:db8:1:2:3:4:5:6]:41234")} {
		b.Run(name, func(b *testing.B) {
			s := addresses{open: map[address]int64{}}
			s.most.Store(1)
			b.ReportAllocs()
			for b.Loop() {
				addr := clientAddress(text)
				s.enter(addr)
				s.leave(addr)
			}
		})
	}
}
