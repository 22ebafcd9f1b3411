package replay

import (
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"maps"
	"math"
	"reflect"
	"sort"
	"strings"
	"text/tabwriter"

	"github.com/kvlane/kvlane/kvindex"
	"github.com/kvlane/kvlane/routing"
)

// warmPart is the fraction of the requests, by arrival, that latencies exclude.
const warmPart = 0.05

// Result has the figures of one run, or their means over seeds.
type Result struct {
	// TTFT and its percentiles, and E2E, are seconds; ITL is seconds per output token.
	TTFT50 float64 `json:"ttft50"`
	TTFT90 float64 `json:"ttft90"`
	TTFT95 float64 `json:"ttft95"`
	TTFT99 float64 `json:"ttft99"`
	E2E90  float64 `json:"e2e90"`
	ITL50  float64 `json:"itl50"`
	ITL99  float64 `json:"itl99"`
	// Hit is cached over prompt tokens; Ceiling what an infinite cache would reach.
	Hit     float64 `json:"hit"`
	Ceiling float64 `json:"ceiling"`
	// Throughput is output tokens per second between 10 % and 90 % of the completions.
	Throughput float64 `json:"throughput"`
	// CV, MaxMin and MinMean describe the numbers of requests per rank. MaxMin is the largest number itself if a rank
	// got none.
	CV      float64 `json:"cv"`
	MaxMin  float64 `json:"max_min"`
	MinMean float64 `json:"min_mean"`
	// Moves counts turns routed to a different target than the previous turn.
	Moves   float64 `json:"moves"`
	Refused float64 `json:"refused"`
	// Stuck counts requests that were sent to a worker that hung.
	Stuck float64 `json:"stuck"`
	// Preempted counts preemptions by engines.
	Preempted float64 `json:"preempted"`
	// Copies is how often a burst's prefix was computed, Others95 the TTFT p95 of the requests outside bursts.
	Copies   float64 `json:"copies"`
	Others95 float64 `json:"others95"`
	// Goodput is the requests per second that meet sloTTFT and sloITL, Jain the fairness index over the tenants' shares
	// of these; 0 without tenants.
	Goodput float64 `json:"goodput"`
	Jain    float64 `json:"jain"`
	// TTFTError50 and TTFTError90 are percentiles of |predicted - observed| / observed over
	// requests with a predicted time to the first token, counted from when they were placed;
	// ITLError50 and ITLError90 are those of the time per output token.
	TTFTError50 float64 `json:"ttft_error_50"`
	TTFTError90 float64 `json:"ttft_error_90"`
	ITLError50  float64 `json:"itl_error_50"`
	ITLError90  float64 `json:"itl_error_90"`
}

// fields yields the figures by their names in JSON.
func (r *Result) fields() iter.Seq2[string, *float64] {
	return func(yield func(string, *float64) bool) {
		for f, v := range reflect.ValueOf(r).Elem().Fields() {
			if !yield(f.Tag.Get("json"), v.Addr().Interface().(*float64)) {
				return
			}
		}
	}
}

// figure returns a figure by its name, and whether there is one.
func (w *Row) figure(name string) (float64, bool) {
	for other, v := range w.Mean.fields() {
		if name == other {
			return *v, true
		}
	}
	return w.Seconds, name == "seconds"
}

// percentile of sorted values.
func percentile(sorted []float64, p float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(p*float64(len(sorted))), len(sorted)-1)]
}

// summarise computes the figures of a run.
func (s *simulation) summarise() Result {
	r := Result{Refused: float64(s.refused), Stuck: float64(s.stuck)}
	counts := make([]float64, s.ranks())
	seen := map[uint64]bool{}
	home := map[string]int{}
	var ttft, e2e, itl, ends []float64
	var prompt, cached, ideal float64
	for slot := range s.ranks() {
		_, k := s.at(kvindex.Slot(slot))
		r.Preempted += float64(k.preempted)
	}
	measured := s.records
	for len(measured) > 0 && measured[0].WarmUp {
		enter(seen, measured[0].Blocks)
		measured = measured[1:]
	}
	skip := int(warmPart * float64(len(measured)))
	output := map[float64]float64{}
	bursts := map[int]bool{}
	var others []float64
	for i, rec := range measured {
		counts[rec.slot]++
		prompt += float64(rec.Prompt)
		cached += float64(rec.matched)
		ideal += float64(min(enter(seen, rec.Blocks)*s.w.BlockSize, rec.Prompt-1))
		if before, ok := home[rec.Conversation]; ok && rec.Conversation != "" && before != int(rec.slot) {
			r.Moves++
		}
		home[rec.Conversation] = int(rec.slot)
		if rec.Burst > 0 {
			bursts[rec.Burst] = true
			r.Copies += max(float64(rec.BurstPrefix-rec.matched), 0) / float64(rec.BurstPrefix)
		}
		ends = append(ends, rec.ended)
		output[rec.ended] += float64(rec.Output)
		if i < skip {
			continue
		}
		if rec.Burst == 0 {
			others = append(others, rec.first-rec.At)
		}
		ttft = append(ttft, rec.first-rec.At)
		e2e = append(e2e, rec.ended-rec.At)
		if rec.Output > 1 {
			itl = append(itl, (rec.ended-rec.first)/float64(rec.Output-1))
		}
	}
	for _, values := range [][]float64{others, ttft, e2e, itl, ends} {
		sort.Float64s(values)
	}
	r.Others95 = percentile(others, 0.95)
	r.Copies /= float64(max(len(bursts), 1))
	r.TTFT50, r.TTFT90, r.TTFT95, r.TTFT99 = percentile(ttft, 0.5), percentile(ttft, 0.9), percentile(ttft, 0.95), percentile(ttft, 0.99)
	r.E2E90, r.ITL50, r.ITL99 = percentile(e2e, 0.9), percentile(itl, 0.5), percentile(itl, 0.99)
	if prompt > 0 {
		r.Hit, r.Ceiling = cached/prompt, ideal/prompt
	}
	from, to := percentile(ends, 0.1), percentile(ends, 0.9)
	total := 0.0
	for i, at := range ends {
		if at > from && at <= to && (i == 0 || at != ends[i-1]) {
			total += output[at]
		}
	}
	if to > from {
		r.Throughput = total / (to - from)
	}
	r.spread(counts)
	r.serve(measured[skip:])
	r.foretell(measured[skip:])
	return r
}

// foretell compares what the router predicted with what happened.
func (r *Result) foretell(measured []*record) {
	var first, token []float64
	add := func(to *[]float64, predicted, observed float64) {
		if predicted > 0 && observed > 0 {
			*to = append(*to, math.Abs(predicted-observed)/observed)
		}
	}
	for _, rec := range measured {
		add(&first, rec.predicted, rec.first-rec.placed)
		add(&token, rec.perToken, (rec.ended-rec.first)/float64(max(rec.Output-1, 1)))
	}
	sort.Float64s(first)
	sort.Float64s(token)
	r.TTFTError50, r.TTFTError90 = percentile(first, 0.5), percentile(first, 0.9)
	r.ITLError50, r.ITLError90 = percentile(token, 0.5), percentile(token, 0.9)
}

// serve counts the requests whose first token met its latency target, in all and for each tenant.
func (r *Result) serve(measured []*record) {
	if len(measured) == 0 {
		return
	}
	good := 0.0
	var met, asked []float64 // by tenant
	for _, rec := range measured {
		for rec.Tenant >= len(met) {
			met, asked = append(met, 0), append(asked, 0)
		}
		asked[rec.Tenant]++
		if rec.first-rec.At <= sloTTFT && rec.ended-rec.first <= sloITL*float64(rec.Output-1) {
			met[rec.Tenant]++
			good++
		}
	}
	if span := measured[len(measured)-1].At - measured[0].At; span > 0 {
		r.Goodput = good / span
	}
	sum, square, n := 0.0, 0.0, 0.0
	for tenant, v := range met {
		if tenant > 0 && asked[tenant] > 0 {
			part := v / asked[tenant]
			sum, square, n = sum+part, square+part*part, n+1
		}
	}
	if square > 0 {
		r.Jain = sum * sum / (n * square)
	}
}

// spread measures how evenly requests were distributed over ranks.
func (r *Result) spread(counts []float64) {
	sum, least, most := 0.0, math.Inf(1), 0.0
	for _, n := range counts {
		sum += n
		least, most = min(least, n), max(most, n)
	}
	mean := sum / float64(len(counts))
	if mean == 0 {
		return
	}
	square := 0.0
	for _, n := range counts {
		square += (n - mean) * (n - mean)
	}
	r.CV = math.Sqrt(square/float64(len(counts))) / mean
	r.MinMean = least / mean
	r.MaxMin = most / max(least, 1)
}

// Row has a policy's figures over all seeds.
type Row struct {
	Policy string `json:"policy"`
	Mean   Result `json:"mean"`
	// Deviation is the sample standard deviation, zero for one seed.
	Deviation Result   `json:"deviation"`
	Runs      []Result `json:"runs"`
	// Seconds is the processor time of one run on this machine, without that of the
	// concurrent garbage collector; it is in no report.
	Seconds float64 `json:"-"`
}

func (w *Row) conclude() {
	n, mean, dev := float64(len(w.Runs)), maps.Collect(w.Mean.fields()), maps.Collect(w.Deviation.fields())
	for i := range w.Runs {
		for name, v := range w.Runs[i].fields() {
			*mean[name] += *v / n
		}
	}
	if n < 2 {
		return
	}
	for i := range w.Runs {
		for name, v := range w.Runs[i].fields() {
			*dev[name] += (*v - *mean[name]) * (*v - *mean[name]) / (n - 1)
		}
	}
	for _, v := range dev {
		*v = math.Sqrt(*v)
	}
}

// Report compares policies on one workload.
type Report struct {
	Workload string   `json:"workload"`
	Ranks    int      `json:"ranks"`
	Seeds    []uint64 `json:"seeds"`
	Rows     []Row    `json:"rows"`
}

// Verdict explains what the figures mean for a choice: the policy with the least TTFT p90, and the overlap weight with
// it if several were run. Bounds that no router can reach, and policies that refuse requests or lose throughput, do not
// count.
func (r *Report) Verdict() []string {
	const lost = 0.98
	most := 0.0
	for i := range r.Rows {
		most = max(most, r.Rows[i].Mean.Throughput)
	}
	var best, weight, usual *Row
	weights := 0
	for i := range r.Rows {
		row := &r.Rows[i]
		if isDefault(row.Policy) {
			usual = row
		}
		if strings.HasPrefix(row.Policy, "oracle") || row.Mean.Refused > 0 || row.Mean.Throughput < lost*most {
			continue
		}
		if best == nil || row.Mean.TTFT90 < best.Mean.TTFT90 {
			best = row
		}
		if strings.HasPrefix(row.Policy, weightSetting) {
			weights++
			if weight == nil || row.Mean.TTFT90 < weight.Mean.TTFT90 {
				weight = row
			}
		}
	}
	var out []string
	if best != nil && len(r.Rows) > 1 {
		out = append(out, "Least TTFT p90: "+against(best, usual))
	}
	if weights > 1 {
		out = append(out, "Best overlap weight: "+against(weight, usual))
	}
	return out
}

// isDefault reports whether a name means the default without changes.
func isDefault(policy string) bool {
	return policy == routing.DefaultPreset || policy == weightSetting+defaultWeight
}

// against describes a policy's p90 and whether its distance from the default's exceeds the deviations over seeds.
func against(row, usual *Row) string {
	text := fmt.Sprintf("%s, %.2f s ± %.2f", row.Policy, row.Mean.TTFT90, row.Deviation.TTFT90)
	switch {
	case usual == nil:
		return text + "."
	case row == usual:
		return text + ": the default, keep it."
	case len(row.Runs) == 1:
		return text + fmt.Sprintf("; the default has %.2f s. One seed tells no deviation: run more.", usual.Mean.TTFT90)
	case usual.Mean.TTFT90-row.Mean.TTFT90 <= row.Deviation.TTFT90+usual.Deviation.TTFT90:
		return text + fmt.Sprintf("; the default's %.2f s ± %.2f is not worse beyond the seeds' deviation: keep it.", usual.Mean.TTFT90, usual.Deviation.TTFT90)
	default:
		text += fmt.Sprintf(": %.0f %% less than the default's %.2f s.", 100*(1-row.Mean.TTFT90/usual.Mean.TTFT90), usual.Mean.TTFT90)
		if c := configured(row.Policy); c != "" {
			text += " In the configuration: " + c
		}
		return text
	}
}

// configured returns the configuration of a policy; "" for those that replay adds.
func configured(policy string) string {
	preset, settings, _ := strings.Cut(policy, "?")
	if _, ok := routing.Preset(preset); !ok {
		return ""
	}
	parts := []string{"preset: " + preset}
	for setting := range strings.SplitSeq(settings, "&") {
		path, value, ok := strings.Cut(setting, "=")
		if !ok {
			continue
		}
		keys := strings.Split(path, ".")
		parts = append(parts, "policy: {"+strings.Join(keys, ": {")+": "+value+strings.Repeat("}", len(keys)))
	}
	if len(parts) > 2 {
		return "" // two settings may share a key: the user nests them
	}
	return "routing: {" + strings.Join(parts, ", ") + "}"
}

// WriteJSON writes the report with all runs.
func (r *Report) WriteJSON(out io.Writer) error { return writeJSON(out, r) }

func writeJSON(out io.Writer, v any) error {
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// WriteTable writes the means.
func (r *Report) WriteTable(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "%s, ranks: %d, seeds: %d\n", r.Workload, r.Ranks, len(r.Seeds))
	fmt.Fprintln(w, "policy\thit %\tceiling %\tTTFT p50\tp90\t±\tp95\tp99\tITL p50 ms\ttok/s\tCV %\tmax/min\tmin/mean %\tmoves\tgoodput\trefused\terror p90 %\tITL error p90 %\t")
	for i := range r.Rows {
		m, d := &r.Rows[i].Mean, &r.Rows[i].Deviation
		fmt.Fprintf(w, "%s\t%.1f\t%.1f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.1f\t%.0f\t%.1f\t%.2f\t%.0f\t%.0f\t%.2f\t%.0f\t%.0f\t%.0f\t\n", r.Rows[i].Policy, 100*m.Hit, 100*m.Ceiling,
			m.TTFT50, m.TTFT90, d.TTFT90, m.TTFT95, m.TTFT99, 1000*m.ITL50, m.Throughput, 100*m.CV, m.MaxMin, 100*m.MinMean, m.Moves, m.Goodput, m.Refused, 100*m.TTFTError90, 100*m.ITLError90)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, line := range r.Verdict() {
		if _, err := fmt.Fprintln(out, line); err != nil {
			return err
		}
	}
	return nil
}
