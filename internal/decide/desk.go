package decide

import (
	"context"
	"errors"
	"runtime"

	"github.com/kvlane/kvlane/extproc"
)

// desks are where decisions are worked on, as many as there are processors: more at
// once would only take turns, and each needs memory for the ids of its prompt. Who
// comes later waits with nothing but the request. A job that waits for something
// else than a processor leaves its desk first.
type desks chan struct{}

func newDesks() desks { return make(desks, runtime.GOMAXPROCS(0)) }

// errClientGone says that nobody waits for the decision any more.
var errClientGone = errors.New("the client went away before the decision")

// sit waits for a desk, and says whether it got one before the client went away.
func (j *job) sit(ctx context.Context) bool {
	select {
	case j.d.desks <- struct{}{}:
		j.seated = true
	case <-ctx.Done():
	}
	return j.seated
}

// gone is the answer to a client that went away, nil while it is there. It is asked
// between the stages: each may take seconds for a long prompt.
func (j *job) gone(ctx context.Context) *extproc.Reject {
	if ctx.Err() == nil {
		return nil
	}
	j.entry.Refusal = errClientGone.Error()
	return &extproc.Reject{Status: 499, Details: "kvlane_client_gone"}
}

// leave makes the desk free, if the job has one.
func (j *job) leave() {
	if j.seated {
		j.seated = false
		<-j.d.desks
	}
}
