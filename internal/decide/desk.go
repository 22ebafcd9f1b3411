package decide

import "runtime"

// desks are where decisions are worked on, as many as there are processors: more at
// once would only take turns, and each needs memory for the ids of its prompt. Who
// comes later waits with nothing but the request. A job that waits for something
// else than a processor leaves its desk first.
type desks chan struct{}

func newDesks() desks { return make(desks, runtime.GOMAXPROCS(0)) }

// sit waits for a desk.
func (j *job) sit() {
	j.d.desks <- struct{}{}
	j.seated = true
}

// leave makes the desk free, if the job has one.
func (j *job) leave() {
	if j.seated {
		j.seated = false
		<-j.d.desks
	}
}
