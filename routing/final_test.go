package routing

import "testing"

// The last turn follows its conversation's binding and ends it; without an id nothing changes.
func TestAFinalTurnForgetsItsConversation(t *testing.T) {
	r, _ := heldRouter(t, false)
	turn := func(q Query) (Plan, error) {
		q.PromptTokens = 300
		plan, err := r.Pick(0, &q, nil, nil)
		r.Release(0, plan.Reservation)
		return plan, err
	}
	if _, err := turn(Query{ID: "1", Conversation: "x"}); err != nil || r.conversations[mainLeg].find(r.config.keyOf("x")) == none {
		t.Fatalf("got %v and no binding, want one after the first turn", err)
	}
	size := r.conversations[mainLeg].size()
	plan, err := turn(Query{ID: "2", Conversation: "x", Final: true})
	if err != nil || plan.FirstTurn || plan.Conversation != (Key{}) || r.conversations[mainLeg].size() != size-1 {
		t.Errorf("got %+v, %v and %d conversations, want a known one and %d left", plan, err, r.conversations[mainLeg].size(), size-1)
	}
	for _, id := range []string{"x", ""} {
		if plan, err = turn(Query{ID: "3", Conversation: id, Final: true}); err != nil || r.conversations[mainLeg].size() != size-1 {
			t.Errorf("%q: got %+v, %v and %d conversations, want a place and no binding", id, plan, err, r.conversations[mainLeg].size())
		}
	}
}
