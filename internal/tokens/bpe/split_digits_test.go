package bpe

import (
	"math/rand"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvlane/kvlane/internal/lab/cpu"
)

// Pieces end where a digit begins, as if the text was cut at all digits first.
func TestSplitBeforeDigits(t *testing.T) {
	alphabet := []string{"a", "é", " ", " ", "5", "٣", "Ⅷ", "½", "\u3000", "\t", "\n", "'", "s", "t", ",", "中", "😀", "²", "\xe0"}
	rnd := rand.New(rand.NewSource(1))
	for range 100_000 {
		var b strings.Builder
		for range rnd.Intn(9) {
			b.WriteString(alphabet[rnd.Intn(len(alphabet))])
		}
		text := b.String()
		var got, want []int
		var ends [16]uint32
		n, _ := gpt2Split{digits: true}.split(text, 0, ends[:])
		for _, end := range ends[:n] {
			got = append(got, int(end))
		}
		for at := 0; at < len(text); {
			var end int
			if c, w := classAt(text, at); c&clsDigit != 0 {
				end = at + w
			} else {
				end = skipNot(text, at+w, clsDigit)
			}
			for at < end {
				at = gpt2Split{}.next(text[:end], at)
				want = append(want, at)
			}
		}
		if !slices.Equal(got, want) {
			t.Fatalf("%q: got ends %v, want %v", text, got, want)
		}
	}
}

// Text without digits is not searched for one again and again: 16 times the text takes about 16 times as long, not 256 times.
func TestTextWithoutDigits(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cost := func(size int) time.Duration {
		text := strings.Repeat("a,", size/2)
		best := time.Hour
		for range 5 {
			began := cpu.Thread()
			var ends [512]uint32
			for at := 0; at < len(text); {
				_, at = gpt2Split{digits: true}.split(text, at, ends[:])
			}
			best = min(best, cpu.Thread()-began)
		}
		return best
	}
	if small, large := cost(1<<15), cost(1<<19); large > 100*small {
		t.Errorf("got %s for 32 KiB and %s for 512 KiB, want about 16 times", small, large)
	}
}
