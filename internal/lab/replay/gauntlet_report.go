package replay

import (
	"bytes"
	"fmt"
	"io"
	"strings"
)

// table is a titled table of text.
type table struct {
	title string
	head  []string
	rows  [][]string
}

// verdict compares the default with its aim.
func (o *Outcomes) verdict() []string {
	mean, own, ok := o.Bound()
	if !ok || len(o.Cells) == 0 {
		return nil
	}
	met := func(is bool) string {
		if is {
			return "met"
		}
		return "missed"
	}
	return []string{
		fmt.Sprintf("%s: geometric mean of TTFT p90 %.3f of the best rule's (aim %.2f: %s).", own.Rule.Policy, mean, aimMean, met(mean <= aimMean)),
		fmt.Sprintf("Its worst cell: %s, %.2f times %s (aim %.2f: %s).", own.At, own.Worst, own.Best, aimWorst, met(own.Worst <= aimWorst)),
	}
}

// tables returns the rules' standings, TTFT p90 of all cells, and each cell's figures.
func (o *Outcomes) tables() []table {
	standings := o.Standings()
	all := table{title: "Geometric means over the cells, relative to the best rule of each cell", head: []string{"rule"}}
	for i := range compared {
		all.head = append(all.head, compared[i].name)
	}
	all.head = append(all.head, "worst p90", "in cell", "refused", "source", "date")
	for i := range standings {
		s := &standings[i]
		row := []string{s.Rule.Policy}
		for _, v := range s.Means {
			row = append(row, fmt.Sprintf("%.3f", v))
		}
		all.rows = append(all.rows, append(row, fmt.Sprintf("%.2f", s.Worst), s.At, fmt.Sprintf("%.0f", s.Refused), s.Rule.Source, s.Rule.Date))
	}
	out := []table{all}
	for _, c := range o.Cells {
		t := table{title: fmt.Sprintf("%s (%d ranks)", c.Workload, c.Ranks),
			head: []string{"rule", "TTFT p50", "p90", "±", "p99", "ITL p50 ms", "tokens/s", "goodput/s", "hit of ceiling %", "error p90 %", "ITL error p90 %", "Jain"}}
		for i := range c.Rows {
			m, jain := &c.Rows[i].Mean, "-"
			if m.Jain > 0 {
				jain = fmt.Sprintf("%.3f", m.Jain)
			}
			hit := 100.0
			if m.Ceiling > 0 {
				hit = 100 * m.Hit / m.Ceiling
			}
			row := []string{c.Rows[i].Policy}
			for _, v := range []float64{m.TTFT50, m.TTFT90, c.Rows[i].Deviation.TTFT90, m.TTFT99} {
				row = append(row, fmt.Sprintf("%.2f", v))
			}
			t.rows = append(t.rows, append(row, fmt.Sprintf("%.1f", 1000*m.ITL50), fmt.Sprintf("%.0f", m.Throughput), fmt.Sprintf("%.2f", m.Goodput), fmt.Sprintf("%.1f", hit), fmt.Sprintf("%.0f", 100*m.TTFTError90), fmt.Sprintf("%.0f", 100*m.ITLError90), jain))
		}
		out = append(out, t)
	}
	return out
}

func (o *Outcomes) title() string {
	return fmt.Sprintf("Gauntlet: %d rules, %d cells, seeds %d to %d", len(o.Rules), len(o.Cells), o.Seeds[0], o.Seeds[len(o.Seeds)-1])
}

// goal explains goodput.
var goal = fmt.Sprintf("Goodput: requests a second with TTFT up to %g s and %g ms a token. Jain's index: over the tenants' parts of such requests.", sloTTFT, 1000*sloITL)

// WriteMarkdown writes the verdict and all tables.
func (o *Outcomes) WriteMarkdown(out io.Writer) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "# %s\n\n", o.title())
	for _, line := range append(o.verdict(), goal) {
		fmt.Fprintf(&b, "%s\n\n", line)
	}
	cells := func(row []string) { fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | ")) }
	for _, t := range o.tables() {
		fmt.Fprintf(&b, "## %s\n\n", t.title)
		cells(t.head)
		fmt.Fprintf(&b, "|%s\n", strings.Repeat("---|", len(t.head)))
		for _, row := range t.rows {
			cells(row)
		}
		b.WriteByte('\n')
	}
	_, err := out.Write(b.Bytes())
	return err
}

// WriteHTML writes the same as one page.
func (o *Outcomes) WriteHTML(out io.Writer) error {
	return writeHTML(out, o.title(), append(o.verdict(), goal), o.tables(), func(*bytes.Buffer) {})
}

// WriteJSON writes all runs.
func (o *Outcomes) WriteJSON(out io.Writer) error { return writeJSON(out, o) }
