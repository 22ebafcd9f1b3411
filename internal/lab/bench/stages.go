package main

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// stages are the sums and counts of Kvlane's decision times by stage.
type stages map[string][2]float64

// stages reads them from its metrics.
func (b *bed) stages(ctx context.Context) (stages, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+b.admin+"/metrics", http.NoBody)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	out := stages{}
	scan := bufio.NewScanner(resp.Body)
	scan.Buffer(nil, 1<<20)
	for scan.Scan() {
		for i, name := range []string{"kvlane_decision_seconds_sum", "kvlane_decision_seconds_count"} {
			rest, ok := strings.CutPrefix(scan.Text(), name+`{stage="`)
			stage, value, found := strings.Cut(rest, `"} `)
			if !ok || !found {
				continue
			}
			v, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return nil, err
			}
			pair := out[stage]
			pair[i] = v
			out[stage] = pair
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("no decision_seconds among the metrics")
	}
	return out, scan.Err()
}

// since formats the means in ms between two readings.
func (s stages) since(before stages) string {
	order := []string{"queue", "parse", "tokens", "hash", "index", "plan", "total"}
	var parts []string
	for _, stage := range order {
		sum, count := s[stage][0]-before[stage][0], s[stage][1]-before[stage][1]
		if count > 0 {
			parts = append(parts, fmt.Sprintf("%s %.3f", stage, sum/count*1000))
		}
	}
	return strings.Join(parts, ", ")
}
