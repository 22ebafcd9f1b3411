package extproc

import (
	"encoding/binary"
	"net/netip"
	"sync"
	"sync/atomic"
)

// address is a client's IPv4 address, or the /56 prefix of its IPv6 address: providers give one to a home, which has 256 /64.
// 0 is none.
type address uint64

// clientAddress reads the attribute source.address, "ip:port"; anything else, such as the path of a Unix socket, is none.
func clientAddress(text []byte) address {
	a, err := netip.ParseAddrPort(string(text))
	if err != nil {
		return 0
	}
	b := a.Addr().As16()
	if a.Addr().Unmap().Is4() {
		return address(binary.BigEndian.Uint64(b[8:])) // ::ffff:a.b.c.d. No /56 in use has this number.
	}
	return max(1, address(binary.BigEndian.Uint64(b[:8])&^0xff))
}

// addresses counts the open requests of each client. It is safe for concurrent use.
type addresses struct {
	most atomic.Int64 // 0: no bound
	mu   sync.Mutex
	open map[address]int64 // Invariant: no value is 0, so there are no more entries than open streams.
}

// enter counts a request, and reports whether its client may have one more.
func (a *addresses) enter(client address) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	n, most := a.open[client], a.most.Load()
	if most > 0 && n >= most {
		return false
	}
	a.open[client] = n + 1
	return true
}

// leave ends a request that was counted.
func (a *addresses) leave(client address) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if n := a.open[client]; n > 1 {
		a.open[client] = n - 1
	} else {
		delete(a.open, client)
	}
}

// SetPerAddress replaces Options.MaxPerAddress. Requests that are open go on; those that were opened while it was 0
// do not count.
func (s *Server) SetPerAddress(most int) { s.clients.most.Store(int64(most)) }
