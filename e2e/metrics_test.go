package e2e

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
)

var (
	metricRow = regexp.MustCompile("(?m)^\\| `(kvlane_[a-z_]+)` \\| [a-z]+ \\| ([a-z, ]*) ?\\| (.+) \\|$")
	labelName = regexp.MustCompile(`[{,]([a-z]+)="`)
	series    = regexp.MustCompile(`_(bucket|sum|count)$`)
)

// documented are the metrics of docs/reference/metrics.md: their labels, and last the help text.
var documented = sync.OnceValues(func() (map[string][]string, error) {
	page, err := os.ReadFile("../docs/reference/metrics.md")
	if err != nil {
		return nil, err
	}
	rows := map[string][]string{}
	for _, m := range metricRow.FindAllStringSubmatch(string(page), -1) {
		rows[m[1]] = append(strings.Split(strings.TrimSpace(m[2]), ", "), m[3])
	}
	return rows, nil
})

// described compares a line of a /metrics page with the docs: its help text if it is one,
// else its labels.
func (b *bed) described(line string) {
	b.t.Helper()
	comment := strings.TrimPrefix(line, "# HELP ")
	if !strings.HasPrefix(comment, "kvlane_") || b.older {
		return
	}
	rows, err := documented()
	if err != nil {
		b.t.Fatal(err)
	}
	name := comment[:strings.IndexAny(comment, " {")]
	row, ok := rows[name]
	if !ok {
		row, ok = rows[series.ReplaceAllString(name, "")]
	}
	switch {
	case !ok:
		b.t.Errorf("docs/reference/metrics.md has no metric %s", name)
	case comment != line:
		if help := strings.TrimPrefix(comment, name+" "); help != row[len(row)-1] {
			b.t.Errorf("docs/reference/metrics.md says of %s: %q; its help is %q", name, row[len(row)-1], help)
		}
	default:
		for _, m := range labelName.FindAllStringSubmatch(line, -1) {
			if m[1] != "le" && !slices.Contains(row[:len(row)-1], m[1]) {
				b.t.Errorf("docs/reference/metrics.md does not give %s the label %s: %s", name, m[1], line)
			}
		}
	}
}
