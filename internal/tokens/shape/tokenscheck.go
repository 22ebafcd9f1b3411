package shape

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

// TokensCheck implements the command `kvlane tokens-check`: it queries a live engine for the ids of the built-in
// requests, compares them with ours and writes a line for each, with the first difference. differ is the number of
// requests whose ids differ. The error reports that the engine did not answer or has no such endpoint.
func TokensCheck(ctx context.Context, w io.Writer, m *Model, oracle *Oracle, modelName string) (differ int, err error) {
	c := NewChecker(m, oracle, CheckerOptions{ModelName: modelName})
	compared := 0
	for _, q := range builtIn(modelName) {
		d, err := c.compare(ctx, q)
		raw := q[1:]
		switch {
		case errors.Is(err, errNotComparable):
			_, err = fmt.Fprintf(w, "refused %v %s\n", body.API(q[0]), raw)
		case err != nil:
			return differ, err
		case d != nil:
			differ++
			compared++
			_, err = fmt.Fprintf(w, "differs %v %s\n  %v\n", body.API(q[0]), raw, d)
		default:
			compared++
			_, err = fmt.Fprintf(w, "same    %v %s\n", body.API(q[0]), raw)
		}
		if err != nil {
			return differ, err
		}
	}
	if compared == 0 {
		return differ, ErrNoOracle
	}
	_, err = fmt.Fprintf(w, "%d prompts compared, %d differ\n", compared, differ)
	return differ, err
}
