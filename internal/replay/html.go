package replay

import (
	"fmt"
	"html/template"
	"io"
)

// chart is one bar chart of the report.
type chart struct {
	Title, Unit string
	value       func(*Result) float64
	// Bars are computed for the template.
	Bars []bar
}

type bar struct {
	Policy, Text string
	Y, Width     int
	Default      bool
}

const barHeight, barArea = 22, 420

var charts = []chart{
	{Title: "TTFT p90", Unit: "s", value: func(r *Result) float64 { return r.TTFT90 }},
	{Title: "Time per output token p50", Unit: "ms", value: func(r *Result) float64 { return 1000 * r.ITL50 }},
	{Title: "Hit rate", Unit: "%", value: func(r *Result) float64 { return 100 * r.Hit }},
	{Title: "CV of requests per rank", Unit: "%", value: func(r *Result) float64 { return 100 * r.CV }},
}

var page = template.Must(template.New("report").Parse(`<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Kvlane replay: {{.Report.Workload}}</title>
<style>body{font:15px system-ui;margin:2em auto;max-width:70em}table{border-collapse:collapse}td,th{padding:.2em .7em;text-align:right}
td:first-child,th:first-child{text-align:left;white-space:nowrap}tr:nth-child(even){background:#f2f5f8}svg{display:block;margin:.5em 0 2em}</style>
<h1>{{.Report.Workload}}</h1>
<p>{{.Report.Ranks}} ranks, means over seeds {{.Report.Seeds}}. Green: the default. Simulated engines: rankings and ratios carry over, seconds do not.</p>
{{range .Report.Verdict}}<p><b>{{.}}</b></p>
{{end}}<table><tr><th>policy<th>hit %<th>ceiling %<th>TTFT p50<th>p90<th>±<th>p99<th>ITL p50 ms<th>tokens/s<th>CV %<th>max/min<th>moves</tr>
{{range .Rows}}<tr>{{range .}}<td>{{.}}{{end}}</tr>
{{end}}</table>
{{range .Charts}}<h2>{{.Title}}, {{.Unit}}</h2><svg width="760" height="{{$.Height}}" font-family="system-ui" font-size="13">
{{range .Bars}}<text x="230" y="{{.Y}}" text-anchor="end" dy="14">{{.Policy}}</text><rect x="240" y="{{.Y}}" width="{{.Width}}" height="17" fill="{{if .Default}}#1f7a4d{{else}}#4a78a8{{end}}"/><text x="{{.Width}}" dx="246" y="{{.Y}}" dy="14">{{.Text}}</text>
{{end}}</svg>{{end}}
</html>
`))

// WriteHTML writes the report as one page with tables and charts, no scripts.
func (r *Report) WriteHTML(out io.Writer) error {
	data := struct {
		Report *Report
		Rows   [][]string
		Charts []chart
		Height int
	}{Report: r, Height: barHeight * len(r.Rows)}
	for i := range r.Rows {
		m, d := &r.Rows[i].Mean, &r.Rows[i].Deviation
		row := []string{r.Rows[i].Policy}
		for _, v := range []float64{100 * m.Hit, 100 * m.Ceiling, m.TTFT50, m.TTFT90, d.TTFT90, m.TTFT99, 1000 * m.ITL50, m.Throughput, 100 * m.CV, m.MaxMin, m.Moves} {
			row = append(row, fmt.Sprintf("%.2f", v))
		}
		data.Rows = append(data.Rows, row)
	}
	for _, c := range charts {
		most := 0.0
		for i := range r.Rows {
			most = max(most, c.value(&r.Rows[i].Mean))
		}
		c.Bars = nil
		for i := range r.Rows {
			v := c.value(&r.Rows[i].Mean)
			c.Bars = append(c.Bars, bar{Policy: r.Rows[i].Policy, Text: fmt.Sprintf("%.2f", v), Y: i * barHeight,
				Width: int(barArea * v / max(most, 1e-9)), Default: isDefault(r.Rows[i].Policy)})
		}
		data.Charts = append(data.Charts, c)
	}
	return page.Execute(out, data)
}
