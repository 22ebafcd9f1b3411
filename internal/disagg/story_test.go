package disagg

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/tokens/body"
)

// story runs one file of testdata: commands and, under ----, what the legs are.
//
//	new CONNECTOR [append] [trust]      a protocol; the input is workers' pages, one per line: URL JSON
//	request [path=] [ids=(...)] [id=] [conv=]   the client's body
//	side prefill|decode [name=] [address=] [rank=] [ranks=]   the input is JSON of the worker's settings
//	prefill                      the prefill leg
//	decode                       the decode leg; the input is the prefill answer
type story struct {
	p     *Protocol
	pages map[string]string
	asked []string
	x     Exchange
}

func TestStories(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no stories: %v", err)
	}
	seen := map[string]bool{}
	for _, path := range files {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txt"), func(t *testing.T) {
			var s story
			datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
				if d.Cmd == "new" {
					seen[d.CmdArgs[0].Key] = true
				}
				return s.run(t, d)
			})
		})
	}
	for _, name := range connectors() {
		if !seen[name] {
			t.Errorf("got no story of %s", name)
		}
	}
}

func (s *story) run(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	switch d.Cmd {
	case "new":
		return s.create(t, d)
	case "request":
		return s.request(t, d)
	case "side":
		return s.side(t, d)
	case "prefill":
		s.asked = nil
		leg, err := s.p.Prefill(context.Background(), &s.x)
		return strings.Join(s.asked, "") + s.show(t, &leg, err)
	case "decode":
		var a *Answer
		if d.Input != "" {
			var err error
			if a, err = ParseAnswer([]byte(d.Input)); err != nil {
				return err.Error() + "\n"
			}
		}
		leg, err := s.p.Decode(&s.x, a)
		return s.show(t, &leg, err)
	}
	t.Fatalf("unknown command %s", d.Cmd)
	return ""
}

func (s *story) create(t *testing.T, d *datadriven.TestData) string {
	s.pages = map[string]string{}
	for line := range strings.SplitSeq(d.Input, "\n") {
		if url, page, ok := strings.Cut(line, " "); ok {
			s.pages[url] = page
		}
	}
	var err error
	s.p, err = New(d.CmdArgs[0].Key, Options{Append: d.HasArg("append"), Trust: d.HasArg("trust"), Random: func() uint64 { return 12 },
		Get: func(_ context.Context, address, path string, api bool) ([]byte, error) {
			s.asked = append(s.asked, fmt.Sprintf("GET %s%s api=%v\n", address, path, api))
			page, ok := s.pages[address+path]
			if !ok {
				return nil, errors.New("connection refused")
			}
			return []byte(page), nil
		}})
	if err != nil {
		t.Fatal(err)
	}
	side := func(name string) Side { return Side{Worker: name, Address: "10.0.0.1:8000", Rank: NoRank} }
	s.x = Exchange{Prefill: side("p"), Decode: side("d"), ID: "req-1", Unique: Unique{Text: "00112233445566778899aabbccddeeff", Number: 1<<63 + 41}}
	s.x.Decode.Address = "10.0.0.2:8000"
	return "ok\n"
}

func (s *story) request(t *testing.T, d *datadriven.TestData) string {
	s.x.Path, s.x.IDs, s.x.Conversation, s.x.transfer = "/v1/completions", nil, "", 0
	for _, arg := range d.CmdArgs {
		switch arg.Key {
		case "path":
			s.x.Path = arg.Vals[0]
		case "id":
			s.x.ID = arg.Vals[0]
		case "conv":
			s.x.Conversation = arg.Vals[0]
		case "ids":
			for _, v := range arg.Vals {
				var id uint32
				if _, err := fmt.Sscan(v, &id); err != nil {
					t.Fatal(err)
				}
				s.x.IDs = append(s.x.IDs, id)
			}
		default:
			t.Fatalf("unknown argument %s", arg.Key)
		}
	}
	api, _ := body.Detect("POST", s.x.Path)
	var err error
	if s.x.Request, err = body.Parse(api, []byte(d.Input)); err != nil {
		t.Fatal(err)
	}
	out := "split\n"
	if why := s.p.Refuses(s.x.Request, s.x.IDs); why != "" {
		out = "local: " + why + "\n"
	}
	if edits := s.p.Local(s.x.Request); edits != nil {
		leg := Leg{Edits: edits}
		out += "if local: " + s.show(t, &leg, nil)
	}
	return out
}

func (s *story) side(t *testing.T, d *datadriven.TestData) string {
	side := &s.x.Prefill
	if d.CmdArgs[0].Key == "decode" {
		side = &s.x.Decode
	}
	side.Settings = config.WorkerDisagg{}
	if d.HasArg("address") {
		d.ScanArgs(t, "address", &side.Address)
	}
	if d.HasArg("rank") {
		d.ScanArgs(t, "rank", &side.Rank)
		d.ScanArgs(t, "ranks", &side.Ranks)
		side.ByHeader = true
	}
	if d.Input != "" {
		if err := json.Unmarshal([]byte(d.Input), &side.Settings); err != nil {
			t.Fatal(err)
		}
	}
	return "ok\n"
}

// show prints a leg's changes to the client's request.
func (s *story) show(t *testing.T, leg *Leg, err error) string {
	t.Helper()
	if final, ok := errors.AsType[*FinalError](err); ok {
		return "final: " + strings.TrimSpace(string(final.Body)) + "\n"
	}
	if err != nil {
		return "error: " + err.Error() + "\n"
	}
	var b strings.Builder
	if leg.Path != "" {
		fmt.Fprintf(&b, "path %s\n", leg.Path)
	}
	for _, h := range leg.Headers {
		fmt.Fprintf(&b, "%s: %s\n", h.Name, h.Value)
	}
	body, err := leg.Body(context.Background(), s.x.Request)
	if err != nil {
		t.Fatal(err)
	}
	if body == nil {
		return b.String() + "the client's body\n"
	}
	if !json.Valid(body) {
		t.Errorf("not JSON: %s", body)
	}
	return b.String() + string(body) + "\n"
}

// The configuration knows the engine of each connector.
func TestEveryConnectorHasItsEngine(t *testing.T) {
	if known := slices.Sorted(maps.Keys(config.ConnectorEngines)); !slices.Equal(known, connectors()) {
		t.Errorf("got connectors %v in the configuration, want %v", known, connectors())
	}
}

// connectors returns the names of all connectors, sorted.
func connectors() []string { return slices.Sorted(maps.Keys(protocols)) }
