package replicas

import (
	"testing"

	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
	"google.golang.org/protobuf/proto"
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
