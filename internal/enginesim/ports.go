package enginesim

import (
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
)

// Ports are looked for below the range from which the kernel takes those of outgoing connections: one that is free now
// is then not taken by a connection a moment later.
const (
	lowestPort  = 10_000
	highestPort = 30_000
)

// FreePorts finds n consecutive free TCP ports on 127.0.0.1, as engines with ranks need them, and returns the first. They
// were free a moment ago; nothing holds them.
func FreePorts(n int) (int, error) {
	for range 1000 {
		base := lowestPort + rand.IntN(highestPort-lowestPort)
		held := make([]net.Listener, 0, n)
		for i := range n {
			l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(base+i))
			if err != nil {
				break
			}
			held = append(held, l)
		}
		for _, l := range held {
			_ = l.Close()
		}
		if len(held) == n {
			return base, nil
		}
	}
	return 0, errors.New("no run of free ports found")
}
