package enginesim

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"sync"
)

// lowestPort and highestPort bound the allocated ports.
const (
	lowestPort  = 10_000
	highestPort = 60_000
)

// claims keeps the sockets that mark the ports allocated by this process.
var claims struct {
	sync.Mutex
	held []net.PacketConn
}

// FreePorts finds n consecutive free TCP ports on 127.0.0.1, as engines with ranks need them, and returns the first.
//
// A port belongs to the process that got it until that process ends: neither a later call nor a call in another process
// returns it again, even while it has no listener. The claim is a UDP socket on the same number, which does not
// conflict with TCP. The kernel's range for outgoing connections is excluded, so that no connection takes a port that
// was found free. Safe for concurrent use.
func FreePorts(n int) (int, error) {
	claims.Lock()
	defer claims.Unlock()
	low, high := portRange(ephemeral())
	var last error
	for range 1000 {
		base := low + rand.IntN(high-low-n)
		held, err := claim(base, n)
		if err == nil {
			claims.held = append(claims.held, held...)
			return base, nil
		}
		last = err
	}
	return 0, fmt.Errorf("no %d free ports in a row between %d and %d: %w", n, low, high, last)
}

// claim marks all n ports from base on, or none.
func claim(base, n int) (held []net.PacketConn, err error) {
	defer func() {
		if err != nil {
			for _, c := range held {
				_ = c.Close()
			}
		}
	}()
	for i := range n {
		address := "127.0.0.1:" + strconv.Itoa(base+i)
		c, err := net.ListenPacket("udp", address)
		if err != nil {
			return held, err
		}
		held = append(held, c)
		l, err := net.Listen("tcp", address)
		if err != nil {
			return held, err
		}
		if err := l.Close(); err != nil {
			return held, err
		}
	}
	return held, nil
}

// portRange is the wider of the two ranges below and above the kernel's ports for outgoing
// connections, or all ports if the kernel leaves too few.
func portRange(first, last int) (low, high int) {
	low, high = lowestPort, min(first, highestPort)
	if above := max(last+1, lowestPort); highestPort-above > high-low {
		low, high = above, highestPort
	}
	if high-low < 1000 {
		return lowestPort, highestPort
	}
	return low, high
}

// ephemeral is the kernel's range of ports for outgoing connections; Linux' default where it cannot be read.
func ephemeral() (first, last int) {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if n, _ := fmt.Sscan(string(text), &first, &last); err != nil || n != 2 || first >= last {
		return 32768, 60999
	}
	return first, last
}
