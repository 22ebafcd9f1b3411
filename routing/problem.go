package routing

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
)

// Problem is a setting that is out of bounds.
type Problem struct {
	// Path is the dotted key in YAML, like "policy.limits.shed_at".
	Path string
	// Text explains what is wrong.
	Text string
}

// String is the path and the text.
func (p Problem) String() string { return p.Path + ": " + p.Text }

// Problems lists every setting that is out of bounds.
func (c *Config) Problems() []Problem {
	var found problems
	c.check(&found)
	return found
}

// Validate joins all Problems into one error, nil if there are none.
func (c *Config) Validate() error {
	var errs []error
	for _, p := range c.Problems() {
		errs = append(errs, errors.New(p.String()))
	}
	return errors.Join(errs...)
}

// problems collects what the checks find.
type problems []Problem

func (ps *problems) addf(path, format string, args ...any) {
	*ps = append(*ps, Problem{path, fmt.Sprintf(format, args...)})
}

// bound is an inclusive range.
type bound struct {
	name      string
	value     float64
	low, high float64
}

func (ps *problems) within(prefix string, bounds []bound) {
	for _, b := range bounds {
		if math.IsNaN(b.value) || b.value < b.low || b.value > b.high {
			ps.addf(prefix+b.name, "%v is not within %v to %v", b.value, b.low, b.high)
		}
	}
}

func (ps *problems) span(path string, value, low, high time.Duration) {
	if value < low || value > high {
		ps.addf(path, "%v is not within %v to %v", value, low, high)
	}
}

func oneOf[T ~string](ps *problems, path string, value T, allowed ...T) {
	if !slices.Contains(allowed, value) {
		ps.addf(path, "%q is not one of %q", value, allowed)
	}
}
