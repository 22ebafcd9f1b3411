package workers

import (
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/cpu"
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
	began := cpu.Thread()
	for range 10 {
		parseCache(page)
	}
	if took := cpu.Thread() - began; took > 10*time.Second {
		t.Errorf("got %v of a processor for 10 pages, want some milliseconds", took)
	}
}
