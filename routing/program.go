package routing

import (
	"cmp"
	"time"
)

const (
	// programPart is the share of the KV memory for live programs. The rest is for prefixes that several targets hold,
	// and for answers.
	programPart = 0.6
	// programIdle is how long a program counts as live between two turns: most agents' tools answer sooner.
	programIdle = 3 * time.Second
)

// program is a conversation that is live: a turn of it runs, or has ended within programIdle.
type program struct {
	// final is set if its latest turn is its last.
	final bool
	// tokens is its last prompt, counted in pool.Live.
	tokens  int64
	running int
	ended   time.Duration
}

// programKey is a conversation id within a model; the zero value is none.
type programKey struct {
	key  Key
	pool *pool
}

// programEnd is the end of a turn.
type programEnd struct {
	key programKey
	at  time.Duration
}

// programs holds the live conversations, with Config.KVTokens. If their working set exceeds the fleet's memory, it is
// evicted turn by turn, and all compute their prompts again. So those that have begun go first, and new ones wait.
type programs struct {
	byKey map[programKey]*program
	// idle is the ends of turns, oldest first.
	idle []programEnd
}

// crowded refuses a new program while the live ones of its model fill the memory of the eligible targets. A single
// program is never refused.
func (d *decision) crowded() bool {
	r, live := d.r, &d.r.programs
	if r.config.KVTokens <= 0 || d.req.leg != mainLeg || d.out.key == (Key{}) || d.q.Waited < 0 {
		return false
	}
	live.expire(d.now)
	room := int64(programPart * float64(r.config.KVTokens) * float64(len(d.cands)))
	used := d.out.models.Live
	if live.byKey[programKey{d.out.key, d.out.models}] != nil || used == 0 || used+d.q.PromptTokens <= room {
		return false
	}
	d.ex.sayf("programs", "held: those that have begun use %d of %d tokens", used, room)
	return true
}

func (l *programs) expire(now time.Duration) {
	n := 0
	for n < len(l.idle) && l.idle[n].at <= now-programIdle {
		if p := l.byKey[l.idle[n].key]; p != nil && p.running == 0 && p.ended == l.idle[n].at {
			l.drop(l.idle[n].key)
		}
		n++
	}
	l.idle = l.idle[n:]
}

func (l *programs) drop(key programKey) {
	if p := l.byKey[key]; p != nil {
		key.pool.Live -= p.tokens
		delete(l.byKey, key)
	}
}

// poolOf returns the pool that counts a model's live programs.
func (r *Router) poolOf(model string) *pool { return cmp.Or(r.models[model], &r.anyModel) }

// begin records a placed turn of a program.
func (l *programs) begin(key programKey, tokens int64, final bool) {
	p := l.byKey[key]
	if p == nil {
		p = &program{}
		if l.byKey == nil {
			l.byKey = map[programKey]*program{}
		}
		l.byKey[key] = p
	}
	key.pool.Live += tokens - p.tokens
	p.tokens, p.final = tokens, final
	p.running++
}

// end notes the end of a turn.
func (l *programs) end(key programKey, now time.Duration) {
	l.expire(now)
	p := l.byKey[key]
	if p == nil || p.running == 0 {
		return
	}
	if p.running--; p.running == 0 && p.final {
		l.drop(key)
		return
	}
	p.ended = now
	l.idle = append(l.idle, programEnd{key, now})
}
