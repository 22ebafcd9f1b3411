package workers

import (
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A metrics page costs little, whatever the labels of its cache are.
func TestLabelsOfACacheAreBounded(t *testing.T) {
	page := []byte("vllm:cache_config_info{" + strings.Repeat("x", maxLine/2) + `,block_size="32"} 1` + "\n")
	if got := parseCache(page).BlockSize; got != 32 {
		t.Errorf("got blocks of %d tokens, want 32", got)
	}
	page = []byte(`vllm:cache_config_info{block_size="` + strings.Repeat("1", maxPage))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began := threadTime(t)
	for range 10 {
		parseCache(page)
	}
	if took := threadTime(t) - began; took > 10*time.Second {
		t.Errorf("got %v of a processor for 10 pages, want some milliseconds", took)
	}
}

// threadTime is the processor time of the calling thread.
func threadTime(t *testing.T) time.Duration {
	t.Helper()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now); err != nil {
		t.Fatal(err)
	}
	return time.Duration(now.Nano())
}
