package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	stdio "io"
	"net/url"
	"os"
	"reflect"
	"slices"
	"time"

	"github.com/kvlane/kvlane/internal/observe"
	"github.com/kvlane/kvlane/routing"
)

// runExplain shows a decision of a running Kvlane, or runs an exported one again.
func runExplain(ctx context.Context, io streams, args []string) error {
	f := flags("explain")
	c := adminFlags(f, io.err)
	export := f.Bool("export", false, "print the decision with its state as JSON (POST /debug/record before the request)")
	rerun := f.String("rerun", "", "make the decision in `file` again and compare")
	last := f.Bool("last", false, "show the newest decision")
	asJSON := f.Bool("json", false, "print the decision as JSON")
	if err := parse(io, f, args, 1); err != nil {
		return err
	}
	subject := f.Arg(0)
	if *rerun != "" {
		if subject != "" {
			return usageError{"--rerun takes a file and no request id"}
		}
		return rerunDecision(io, *rerun)
	}
	if (subject == "") != *last {
		return usageError{"needs a request id (the x-request-id of the answer) or --last"}
	}
	path := "/debug/decisions/" + url.PathEscape(subject)
	switch {
	case *last && *export:
		return usageError{"--export takes a request id"}
	case *last:
		path = "/debug/decisions?n=1"
	case *export:
		path += "/export"
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	accept := map[bool]string{false: "text/plain", true: "application/json"}[*asJSON]
	answer, err := c.get(ctx, path, accept)
	if err != nil {
		return err
	}
	defer answer.Close()
	body, err := stdio.ReadAll(stdio.LimitReader(answer, maxPage))
	if err != nil {
		return err
	}
	if *last && *asJSON {
		var list []json.RawMessage
		if err := json.Unmarshal(body, &list); err != nil {
			return err
		}
		if body = nil; len(list) > 0 {
			body = slices.Concat(list[0], []byte{'\n'})
		}
	}
	if *last && len(body) == 0 {
		return errors.New("no request has been decided yet, or none is kept (explain.keep: 0)")
	}
	if !*export && !*asJSON {
		body = []byte(observe.Printable(string(body)))
	}
	_, err = io.out.Write(body)
	return err
}

// rerunDecision runs a recorded decision again: the same state and request give the same decision.
func rerunDecision(io streams, file string) error {
	export, err := os.Open(file)
	if err != nil {
		return err
	}
	defer export.Close()
	var d routing.Decision
	strict := json.NewDecoder(stdio.LimitReader(export, maxPage))
	strict.DisallowUnknownFields() // an export of a Kvlane with other fields must not be decided again without them
	if err := strict.Decode(&d); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if d.State == nil {
		return fmt.Errorf("%s: not an exported decision: it has no state", file)
	}
	plan, ex, err := d.Rerun()
	if ex != nil {
		fmt.Fprint(io.out, observe.Printable(ex.String()))
	}
	outcome := ""
	if err != nil {
		outcome = err.Error()
	}
	if outcome != d.Error || !reflect.DeepEqual(plan, d.Plan) {
		return errors.New(observe.Printable(fmt.Sprintf("another decision than the recorded one: %+v %s, recorded %+v %s", plan, outcome, d.Plan, d.Error)))
	}
	fmt.Fprintln(io.out, "the same decision as recorded")
	return nil
}
