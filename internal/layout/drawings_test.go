package layout

import (
	"fmt"
	"html"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A drawing of the documentation, in pixels. A box has lines of text, the first one bold; an arrow has a label in its middle.
type drawing struct {
	width, height int
	boxes         []box
	arrows        []arrow
	notes         []note
}

type (
	box struct {
		x, y, w, h int
		text       string
		dark       bool
	}
	arrow struct {
		x1, y1, x2, y2 int
		label          string
		dashed, plain  bool
	}
	note struct {
		x, y int
		text string
	}
)

func (d *drawing) svg() string {
	var b strings.Builder
	p := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	p(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" font-family="sans-serif" font-size="13">`, d.width, d.height, d.width, d.height)
	p(`<!-- Drawn by go test ./internal/layout -run Drawings -update -->`)
	p(`<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="#456"/></marker></defs>`)
	p(`<rect width="100%%" height="100%%" fill="#fff"/>`)
	for _, a := range d.arrows {
		dash := ""
		if a.dashed {
			dash = ` stroke-dasharray="5 4"`
		}
		tip := ` marker-end="url(#tip)"`
		if a.plain {
			tip = ""
		}
		p(`<line x1="%d" y1="%d" x2="%d" y2="%d" stroke="#456" stroke-width="1.5"%s%s/>`, a.x1, a.y1, a.x2, a.y2, tip, dash)
		x, y, anchor := (a.x1+a.x2)/2, (a.y1+a.y2)/2-6, "middle"
		if a.x1 == a.x2 {
			x, y, anchor = x+6, y+10, "start"
		}
		p(`<text x="%d" y="%d" text-anchor="%s" fill="#345">%s</text>`, x, y, anchor, html.EscapeString(a.label))
	}
	for _, o := range d.boxes {
		fill, ink := "#eef3f8", "#123"
		if o.dark {
			fill, ink = "#2b5b84", "#fff"
		}
		p(`<rect x="%d" y="%d" width="%d" height="%d" rx="6" fill="%s" stroke="#2b5b84"/>`, o.x, o.y, o.w, o.h, fill)
		lines := strings.Split(o.text, "\n")
		for i, line := range lines {
			weight := "normal"
			if i == 0 {
				weight = "bold"
			}
			p(`<text x="%d" y="%d" text-anchor="middle" font-weight="%s" fill="%s">%s</text>`, o.x+o.w/2, o.y+o.h/2+5-8*(len(lines)-1)+16*i, weight, ink, html.EscapeString(line))
		}
	}
	for _, n := range d.notes {
		p(`<text x="%d" y="%d" fill="#345">%s</text>`, n.x, n.y, html.EscapeString(n.text))
	}
	p(`</svg>`)
	return b.String()
}

// row is boxes of equal size from left to right, with arrows between them.
func (d *drawing) row(x, y, w, h, gap int, texts ...string) {
	for i, text := range texts {
		d.boxes = append(d.boxes, box{x: x + i*(w+gap), y: y, w: w, h: h, text: text})
		if i > 0 {
			d.arrows = append(d.arrows, arrow{x1: x + i*(w+gap) - gap, y1: y + h/2, x2: x + i*(w+gap), y2: y + h/2})
		}
	}
}

func drawings() map[string]drawing {
	paths := drawing{width: 860, height: 330,
		boxes: []box{
			{20, 200, 90, 60, "client", false}, {220, 200, 130, 60, "Envoy\nforwards", false}, {200, 30, 400, 100, "", true},
			{640, 180, 200, 100, "engine\nranks 0 1 2 3\npaged KV cache", false},
		},
		arrows: []arrow{
			{110, 220, 220, 220, "request", false, false}, {220, 245, 110, 245, "", false, false}, {350, 220, 640, 220, "to the picked rank", false, false}, {640, 245, 350, 245, "", false, false},
			{255, 200, 255, 130, "", false, false}, {320, 130, 320, 200, "pick: 10.0.0.7:8000, rank 3", false, false}, {740, 180, 600, 95, "", true, false},
		},
		notes: []note{{125, 170, "headers and body"}, {625, 160, "KV events "}, {440, 263, "answer"}, {145, 263, "answer"},
			{20, 312, "Request path: solid. Event path (ZMQ, HTTP or gRPC): dashed; it never delays a request, and fills the index that the next request reads."}},
	}
	for i, text := range []string{"tokens", "hashes", "index", "routing"} {
		paths.boxes = append(paths.boxes, box{x: 212 + i*97, y: 75, w: 85, h: 40, text: text})
	}
	paths.boxes = append(paths.boxes, box{x: 350, y: 38, w: 100, h: 28, text: "Kvlane", dark: true})

	index := drawing{width: 860, height: 300, notes: []note{
		{20, 24, "A prompt of 5 blocks (16 tokens each). A block's hash covers the blocks before it, so equal hashes are equal prefixes."},
		{20, 275, "Below each block the ranks that hold it, by their events. Matched: a/0 three blocks, a/1 five, b/0 none."},
	}}
	index.row(20, 45, 140, 60, 25, "block 1\nsystem prompt", "block 2\nsystem prompt", "block 3\nfirst turn", "block 4\nfirst turn", "block 5\nnew turn")
	for i := range 5 {
		holders := []string{"a/0, a/1", "a/0, a/1", "a/0, a/1", "a/1", "a/1 (host)"}[i]
		index.boxes = append(index.boxes, box{x: 20 + 165*i, y: 205, w: 140, h: 46, text: holders})
		index.arrows = append(index.arrows, arrow{x1: 90 + 165*i, y1: 105, x2: 90 + 165*i, y2: 205, dashed: true})
	}

	decision := drawing{width: 860, height: 330, notes: []note{{20, 24, "One decision"},
		{20, 312, "cost = uncached tokens + queued tokens + 1,000 for each running request (an example; the preset sets the weights)"}}}
	decision.row(20, 40, 92, 50, 28, "read\nJSON, API", "tokens\nas the engine", "hash\nblocks", "index\nholders", "filter\nready, model", "cost\neach target", "book\nand answer")
	for i, line := range [][]string{{"target", "uncached", "queued", "running", "cost", "verdict"}, {"a/0", "7,200", "0", "1", "8,200", ""}, {"a/1", "800", "2,000", "3", "5,800", "picked"},
		{"b/0", "8,000", "0", "0", "8,000", ""}, {"b/1", "–", "–", "–", "–", "not_ready"}} {
		for k, cell := range line {
			decision.boxes = append(decision.boxes, box{x: 70 + 120*k, y: 125 + 33*i, w: 120, h: 33, text: cell, dark: i == 0 || i == 2})
		}
	}

	split := drawing{width: 860, height: 400}
	for i, who := range []string{"client", "Envoy", "Kvlane", "prefill engine", "decode engine"} {
		x := 90 + 170*i
		split.boxes = append(split.boxes, box{x: x - 65, y: 15, w: 130, h: 34, text: who, dark: i == 2})
		split.arrows = append(split.arrows, arrow{x1: x, y1: 49, x2: x, y2: 385, dashed: true, plain: true})
	}
	for i, step := range []struct {
		from, to int
		label    string
	}{{0, 1, "request"}, {1, 2, "headers, body"}, {2, 3, "prefill leg: one token"}, {3, 2, "where the KV blocks are"}, {2, 1, "decode pick, body"}, {1, 4, "request with KV parameters"},
		{3, 4, "KV blocks"}, {4, 1, "first token, then the rest"}, {1, 0, "answer"}} {
		y := 85 + 34*i
		split.arrows = append(split.arrows, arrow{90 + 170*step.from, y, 90 + 170*step.to, y, step.label, false, false})
	}
	return map[string]drawing{"paths": paths, "index": index, "decision": decision, "split": split}
}

// The drawings of docs are what this file draws, and a page shows each.
func TestDrawings(t *testing.T) {
	pages, err := filepath.Glob(root + "/docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, page := range pages {
		content, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		text.Write(content)
	}
	for name, d := range drawings() {
		file := filepath.Join(root, "docs/drawings", name+".svg")
		if *update {
			if err := os.WriteFile(file, []byte(d.svg()), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := os.ReadFile(file); err != nil || string(got) != d.svg() {
			t.Errorf("%s is not what is drawn here (%v): run go test ./internal/layout -run Drawings -update", file, err)
		}
		if !strings.Contains(text.String(), "](drawings/"+name+".svg)") {
			t.Errorf("no page shows drawings/%s.svg", name)
		}
	}
}
