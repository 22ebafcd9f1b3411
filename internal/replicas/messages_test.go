package replicas

import (
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
)

type message = kvlanev1.ReplicaMessage

// recode sends a message through its wire form.
func recode(t testing.TB, m *message) *message {
	t.Helper()
	data, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	got, err := Parse(data)
	if err != nil {
		t.Fatalf("got %v for a message of ours: %v", err, m)
	}
	return got
}

// all returns the messages of o, which owns the lock.
func (o *Out) all() []*message {
	if o.Build != nil {
		return slices.Collect(o.Build(unlocked))
	}
	return []*message{o.Message}
}

func unlocked(do func()) { do() }
