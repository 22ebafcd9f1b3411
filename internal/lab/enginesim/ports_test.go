package enginesim

import (
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

// TestPortsAreHandedOutOnce: an allocated port is not allocated again, here or in another
// process, although it has no listener.
func TestPortsAreHandedOutOnce(t *testing.T) {
	const child = "KVLANE_TEST_PORTS"
	if taken, err := strconv.Atoi(os.Getenv(child)); err == nil {
		held, err := claim(taken, 1)
		if err == nil {
			t.Errorf("port %d was claimed twice: %d sockets", taken, len(held))
		}
		return
	}
	seen := map[int]bool{}
	for range 50 {
		base, err := FreePorts(3)
		if err != nil {
			t.Fatal(err)
		}
		for p := base; p < base+3; p++ {
			if seen[p] {
				t.Fatalf("port %d was handed out twice", p)
			}
			seen[p] = true
			l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(p))
			if err != nil {
				t.Fatal(err)
			}
			_ = l.Close()
		}
	}
	port, err := FreePorts(1)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestPortsAreHandedOutOnce$", "-test.v")
	cmd.Env = append(os.Environ(), child+"="+strconv.Itoa(port))
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS") {
		t.Errorf("another process: %v\n%s", err, out)
	}
}
