package replay

import (
	"bytes"
	"fmt"
	"html"
	"io"
)

// chart is one bar chart of the report.
type chart struct {
	title, unit string
	value       func(*Result) float64
}

// Pixels: the height of a bar with the gap below it, and the width of the longest.
const barHeight, barArea = 22, 420

var charts = []chart{
	{title: "TTFT p90", unit: "s", value: func(r *Result) float64 { return r.TTFT90 }},
	{title: "Time per output token p50", unit: "ms", value: func(r *Result) float64 { return 1000 * r.ITL50 }},
	{title: "Hit rate", unit: "%", value: func(r *Result) float64 { return 100 * r.Hit }},
	{title: "CV of requests per rank", unit: "%", value: func(r *Result) float64 { return 100 * r.CV }},
}

const (
	pageHead = `<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Kvlane: %[1]s</title>
<style>body{font:15px system-ui;margin:2em auto;max-width:90em}table{border-collapse:collapse}td,th{padding:.2em .7em;text-align:right}
td:first-child,th:first-child{text-align:left;white-space:nowrap}tr:nth-child(even){background:#f2f5f8}
tr.own{color:#1f7a4d;font-weight:bold}svg{display:block;margin:.5em 0 2em}</style>
<h1>%[1]s</h1>
<p>Green: the default. Simulated engines: orders and ratios carry over, seconds do not.</p>
`
	chartHead = `<h2>%s, %s</h2><svg width="760" height="%d" font-family="system-ui" font-size="13">` + "\n"
	chartBar  = `<text x="230" y="%[1]d" text-anchor="end" dy="14">%[2]s</text><rect x="240" y="%[1]d" width="%[3]d" height="17" fill="%[4]s"/>` +
		`<text x="%[3]d" dx="246" y="%[1]d" dy="14">%.2[5]f</text>` + "\n"
)

// WriteHTML writes the report as one page with a table and charts.
func (r *Report) WriteHTML(out io.Writer) error {
	t := table{title: "Means over the seeds", head: []string{"policy", "hit %", "ceiling %", "TTFT p50", "p90", "±", "p99", "ITL p50 ms", "tokens/s", "CV %", "max/min", "moves"}}
	for i := range r.Rows {
		m, d, row := &r.Rows[i].Mean, &r.Rows[i].Deviation, []string{r.Rows[i].Policy}
		for _, v := range []float64{100 * m.Hit, 100 * m.Ceiling, m.TTFT50, m.TTFT90, d.TTFT90, m.TTFT99, 1000 * m.ITL50, m.Throughput, 100 * m.CV, m.MaxMin, m.Moves} {
			row = append(row, fmt.Sprintf("%.2f", v))
		}
		t.rows = append(t.rows, row)
	}
	said := append([]string{fmt.Sprintf("%d ranks, seeds %v.", r.Ranks, r.Seeds)}, r.Verdict()...)
	return writeHTML(out, r.Workload, said, []table{t}, func(b *bytes.Buffer) {
		for _, c := range charts {
			r.writeChart(b, c)
		}
	})
}

// writeHTML writes sentences, tables and more as one page without scripts. Names of workloads and policies come from files and
// users, so they are escaped. It does not use html/template, for the same reason as package envoy's template.
func writeHTML(out io.Writer, title string, said []string, tables []table, more func(b *bytes.Buffer)) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, pageHead, html.EscapeString(title))
	for _, sentence := range said {
		fmt.Fprintf(&b, "<p>%s</p>\n", html.EscapeString(sentence))
	}
	for _, t := range tables {
		fmt.Fprintf(&b, "<h2>%s</h2><table><tr>", html.EscapeString(t.title))
		for _, h := range t.head {
			fmt.Fprintf(&b, "<th>%s", html.EscapeString(h))
		}
		for _, row := range t.rows {
			class := ""
			if isDefault(row[0]) {
				class = ` class="own"`
			}
			fmt.Fprintf(&b, "\n<tr%s>", class)
			for _, v := range row {
				fmt.Fprintf(&b, "<td>%s", html.EscapeString(v))
			}
		}
		b.WriteString("</table>\n")
	}
	more(&b)
	b.WriteString("\n</html>\n")
	_, err := out.Write(b.Bytes())
	return err
}

func (r *Report) writeChart(b *bytes.Buffer, c chart) {
	most := 0.0
	for i := range r.Rows {
		most = max(most, c.value(&r.Rows[i].Mean))
	}
	fmt.Fprintf(b, chartHead, c.title, c.unit, barHeight*len(r.Rows))
	for i := range r.Rows {
		policy, v, color := r.Rows[i].Policy, c.value(&r.Rows[i].Mean), "#4a78a8"
		if isDefault(policy) {
			color = "#1f7a4d"
		}
		fmt.Fprintf(b, chartBar, i*barHeight, html.EscapeString(policy), int(barArea*v/max(most, 1e-9)), color, v)
	}
	b.WriteString("</svg>")
}
