package enginesim

import (
	"errors"
	"net"
	"strconv"
)

// FreePorts finds n consecutive free TCP ports on 127.0.0.1, as engines with ranks need them, and returns the first. They
// were free a moment ago; nothing holds them.
func FreePorts(n int) (int, error) {
	for range 100 {
		first, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return 0, err
		}
		base := first.Addr().(*net.TCPAddr).Port
		held := []net.Listener{first}
		for i := 1; i < n; i++ {
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
