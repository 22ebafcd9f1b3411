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
<html lang="en"><meta charset="utf-8"><title>Kvlane replay: %[1]s</title>
<style>body{font:15px system-ui;margin:2em auto;max-width:70em}table{border-collapse:collapse}td,th{padding:.2em .7em;text-align:right}
td:first-child,th:first-child{text-align:left;white-space:nowrap}tr:nth-child(even){background:#f2f5f8}svg{display:block;margin:.5em 0 2em}</style>
<h1>%[1]s</h1>
<p>%[2]d ranks, means over seeds %[3]v. Green: the default. Simulated engines: rankings and ratios carry over, seconds do not.</p>
`
	tableHead = "<table><tr><th>policy<th>hit %<th>ceiling %<th>TTFT p50<th>p90<th>±<th>p99<th>ITL p50 ms<th>tokens/s<th>CV %<th>max/min<th>moves</tr>\n"
	chartHead = `<h2>%s, %s</h2><svg width="760" height="%d" font-family="system-ui" font-size="13">` + "\n"
	chartBar  = `<text x="230" y="%[1]d" text-anchor="end" dy="14">%[2]s</text><rect x="240" y="%[1]d" width="%[3]d" height="17" fill="%[4]s"/>` +
		`<text x="%[3]d" dx="246" y="%[1]d" dy="14">%.2[5]f</text>` + "\n"
)

// WriteHTML writes the report as one page with tables and charts, no scripts. Names of workloads and policies come from
// files and users, so they are escaped. It does not use html/template, for the same reason as package envoy's template.
func (r *Report) WriteHTML(out io.Writer) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, pageHead, html.EscapeString(r.Workload), r.Ranks, r.Seeds)
	for _, sentence := range r.Verdict() {
		fmt.Fprintf(&b, "<p><b>%s</b></p>\n", html.EscapeString(sentence))
	}
	b.WriteString(tableHead)
	for i := range r.Rows {
		m, d := &r.Rows[i].Mean, &r.Rows[i].Deviation
		fmt.Fprintf(&b, "<tr><td>%s", html.EscapeString(r.Rows[i].Policy))
		for _, v := range []float64{100 * m.Hit, 100 * m.Ceiling, m.TTFT50, m.TTFT90, d.TTFT90, m.TTFT99, 1000 * m.ITL50, m.Throughput, 100 * m.CV, m.MaxMin, m.Moves} {
			fmt.Fprintf(&b, "<td>%.2f", v)
		}
		b.WriteString("</tr>\n")
	}
	b.WriteString("</table>\n")
	for _, c := range charts {
		r.writeChart(&b, c)
	}
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
