package observe

import (
	"encoding/json"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/kvlane/kvlane/internal/lab/replay"
	"github.com/kvlane/kvlane/routing"
)

// All keys of the JSON that the admin port serves are in snake_case.
func TestKeysAreInSnakeCase(t *testing.T) {
	seen := map[reflect.Type]bool{}
	for _, page := range []any{Entry{}, IndexPage{}, Status{}, Row{}, WorkerRow{}, routing.Decision{}, replay.Report{}, struct {
		Bad int `json:"notSnake"`
	}{}} {
		var wrong []string
		keysOf(reflect.TypeOf(page), seen, &wrong)
		if name := reflect.TypeOf(page).Name(); name == "" && len(wrong) != 1 {
			t.Errorf("got %q for a key in camelCase, want it found", wrong)
		} else if name != "" && len(wrong) > 0 {
			t.Errorf("%s: got the keys %q, want snake_case", name, wrong)
		}
	}
}

// The reasons why targets are not eligible are in snake_case: they are values in JSON.
func TestReasonsAreInSnakeCase(t *testing.T) {
	for r := range routing.NumReasons {
		if !snakeCase.MatchString(r.String()) {
			t.Errorf("got the reason %q, want snake_case", r)
		}
	}
}

var snakeCase = regexp.MustCompile(`^[a-z][a-z0-9]*(_[a-z0-9]+)*$`)

// keysOf adds the keys below a type that are not in snake_case.
func keysOf(of reflect.Type, seen map[reflect.Type]bool, wrong *[]string) {
	switch of.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
		keysOf(of.Elem(), seen, wrong)
	case reflect.Struct:
		if seen[of] || of != reflect.TypeFor[Entry]() && reflect.PointerTo(of).Implements(reflect.TypeFor[json.Marshaler]()) || reflect.PointerTo(of).Implements(reflect.TypeFor[interface{ MarshalText() ([]byte, error) }]()) {
			return
		}
		seen[of] = true
		for _, f := range reflect.VisibleFields(of) {
			tag, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if !f.IsExported() || tag == "-" || len(f.Index) > 1 {
				continue
			}
			if !f.Anonymous {
				if tag == "" {
					tag = f.Name
				}
				if !snakeCase.MatchString(tag) {
					*wrong = append(*wrong, of.String()+"."+tag)
				}
			}
			keysOf(f.Type, seen, wrong)
		}
	}
}
