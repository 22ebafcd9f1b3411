package observe

import (
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// luminance is that of WCAG 2.2, of a colour #rgb or #rrggbb.
func luminance(t *testing.T, colour string) float64 {
	t.Helper()
	digits := strings.TrimPrefix(colour, "#")
	if len(digits) == 3 {
		digits = regexp.MustCompile(".").ReplaceAllString(digits, "$0$0")
	}
	n, err := strconv.ParseUint(digits, 16, 32)
	if err != nil || len(digits) != 6 {
		t.Fatalf("%q is no colour: %v", colour, err)
	}
	linear := func(shift int) float64 {
		v := float64(n>>shift&255) / 255
		if v > 0.03928 {
			return math.Pow((v+0.055)/1.055, 2.4)
		}
		return v / 12.92
	}
	return 0.2126*linear(16) + 0.7152*linear(8) + 0.0722*linear(0)
}

// The page's colours have the contrasts that WCAG 2.2 asks for (AA), in light and in dark mode: 4.5 of texts, 3 of what states
// are known by.
func TestContrasts(t *testing.T) {
	css, err := pageFiles.ReadFile("page/page.css")
	if err != nil {
		t.Fatal(err)
	}
	schemes := regexp.MustCompile(`(?s):root \{(.*?)\}`).FindAllStringSubmatch(string(css), -1)
	if len(schemes) != 2 {
		t.Fatalf("got %d colour schemes, want 2", len(schemes))
	}
	for i, name := range []string{"light", "dark"} {
		of := map[string]string{}
		for _, m := range regexp.MustCompile(`--([a-z]+): (#[0-9a-f]+);`).FindAllStringSubmatch(schemes[i][1], -1) {
			of[m[1]] = m[2]
		}
		for pair, least := range map[string]float64{
			"text back": 4.5, "text panel": 4.5, "text fill": 4.5, "dim back": 4.5, "dim panel": 4.5, "bad back": 4.5, "bad panel": 4.5, "warn back": 4.5,
			"fill back": 3, "good panel": 3, "warn panel": 3, "differs panel": 3,
		} {
			a, b, _ := strings.Cut(pair, " ")
			x, y := luminance(t, of[a]), luminance(t, of[b])
			if got := (max(x, y) + 0.05) / (min(x, y) + 0.05); got < least {
				t.Errorf("%s: %s %s on %s %s: got contrast %.2f, want %v or more", name, a, of[a], b, of[b], got, least)
			}
		}
	}
}
