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
		verdict, detail := "same   ", ""
		switch d, err := c.compare(ctx, q); {
		case errors.Is(err, errNotComparable):
			verdict = "refused"
			compared--
		case err != nil:
			return differ, err
		case d != nil:
			verdict, detail = "differs", fmt.Sprintf("  %v\n", d)
			differ++
		}
		compared++
		if _, err = fmt.Fprintf(w, "%s %v %s\n%s", verdict, body.API(q[0]), q[1:], detail); err != nil {
			return differ, err
		}
	}
	if compared == 0 {
		return differ, ErrNoOracle
	}
	_, err = fmt.Fprintf(w, "%d prompts compared, %d differ\n", compared, differ)
	return differ, err
}
