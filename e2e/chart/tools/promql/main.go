// Command promql reads PromQL expressions, one a line, and says which do not parse.
package main

import (
	"bufio"
	"fmt"
	"os"

	"github.com/prometheus/prometheus/promql/parser"
)

func main() {
	p := parser.NewParser(parser.Options{})
	in := bufio.NewScanner(os.Stdin)
	failed := false
	for in.Scan() {
		if _, err := p.ParseExpr(in.Text()); err != nil {
			fmt.Printf("%s: %v\n", in.Text(), err)
			failed = true
		}
	}
	if failed {
		os.Exit(1)
	}
}
