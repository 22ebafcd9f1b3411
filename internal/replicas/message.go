package replicas

import (
	"errors"

	"github.com/kvlane/kvlane/kvindex"
	kvlanev1 "github.com/kvlane/kvlane/proto/kvlane/v1"
	"github.com/kvlane/kvlane/routing"
	"google.golang.org/protobuf/proto"
)

const (
	// formatVersion is the version in messages.
	formatVersion = 1
	// maxID bounds the ids of replicas and origins, maxWorker the names of workers, in bytes.
	maxID, maxWorker = 128, 512
	// maxLater bounds the unknown fields that are kept of a conversation from a later version, in bytes.
	maxLater = 256
	// Logical times of others are bounded by firstBound plus the wall clock in milliseconds << boundShift, so that no
	// message can exhaust the logical clock. All replicas compute the same bound. It grows by 16 million a second, faster
	// than changes can advance a clock that was pushed up to it.
	firstBound = 1 << 54
	boundShift = 14
	// partSize is the approximate number of bookings or conversations in one part of a state. A part is applied under
	// the router's lock, and is far below NATS' limit of 1 MB per message.
	partSize = 200
	maxParts = 1 << 16
	// maxTokens bounds the tokens of one booking.
	maxTokens = 1 << 40
	// maxGeneration is the last generation: others refuse a message with a later one.
	maxGeneration = 1<<31 - 1
)

// Parse decodes a message and checks what later code relies on: ids are not empty and targets exist.
func Parse(data []byte) (*kvlanev1.ReplicaMessage, error) {
	m := new(kvlanev1.ReplicaMessage)
	if err := proto.Unmarshal(data, m); err != nil {
		return nil, err
	}
	ok := isNamed(m) && numChanges(m) <= 2*maxBatch && m.GetClock() < 1<<62
	n := uint32(len(m.GetTargets()))
	for _, t := range m.GetTargets() {
		ok = ok && t.GetWorker() != "" && len(t.GetWorker()) <= maxWorker && t.GetRank() <= 1<<30
	}
	for _, b := range m.GetBooked() {
		ok = ok && b.GetId() != 0 && b.GetDecode() >= 1 && b.GetDecode() <= n && b.GetPrefill() <= n && b.GetMiss() <= maxTokens && b.GetKv() <= maxTokens && b.GetPhase() <= phaseDecoding
	}
	for _, c := range m.GetConversations() {
		ok = ok && c.GetTarget() >= 1 && c.GetTarget() <= n && c.GetOrigin() != "" && len(c.GetOrigin()) <= maxID && c.GetLeg() < numLegs && c.GetHi()|c.GetLo() != 0 &&
			c.GetTime() <= m.GetClock() && c.GetGeneration() <= maxGeneration
	}
	if p := m.GetStatePart(); p != nil {
		ok = ok && p.GetPart() < p.GetParts() && p.GetParts() <= maxParts
	}
	if !ok {
		return nil, errors.New("not a message of a replica")
	}
	return m, nil
}

func isNamed(m *kvlanev1.ReplicaMessage) bool {
	return m.GetVersion() >= 1 && m.GetReplica() != "" && len(m.GetReplica()) <= maxID
}

// Phases of Booking.Phase.
const (
	phaseDecoding = 3
	numLegs       = 2
)

// writer fills a message; targets are named once.
type writer struct {
	m       *kvlanev1.ReplicaMessage
	targets map[kvindex.Target]uint32
	// entries is the number of changes in the message.
	entries int
}

func (w *writer) target(t kvindex.Target) uint32 {
	if t.Worker == "" {
		return 0
	}
	if i, ok := w.targets[t]; ok {
		return i
	}
	if w.targets == nil {
		w.targets = map[kvindex.Target]uint32{}
	}
	w.m.Targets = append(w.m.Targets, &kvlanev1.ReplicaTarget{Worker: t.Worker, Rank: uint32(t.Rank + 1)})
	i := uint32(len(w.m.GetTargets()))
	w.targets[t] = i
	return i
}

func (w *writer) booked(b *routing.Booking) {
	w.entries++
	w.m.Booked = append(w.m.Booked, &kvlanev1.ReplicaBooking{Id: uint64(b.ID), Decode: w.target(b.Decode), Prefill: w.target(b.Prefill),
		Miss: uint64(b.Miss), Kv: uint64(b.KV), Phase: uint32(b.Phase), Turn: uint32(b.Turn[0]), InTurn: uint32(b.InTurn), PrefillTurn: uint32(b.Turn[1]), Sequences: uint32(min(b.Sequences, 1<<32-1))})
}

func (w *writer) conversation(leg int, b *binding) {
	w.entries++
	v := &kvlanev1.ReplicaConversation{Hi: b.key.Hi, Lo: b.key.Lo, Leg: uint32(leg), Target: w.target(b.target), Generation: b.generation, Time: b.time, Origin: b.origin, Tail: b.tail, Turns: b.turns + 1}
	if b.later != "" {
		v.ProtoReflect().SetUnknown([]byte(b.later))
	}
	w.m.Conversations = append(w.m.Conversations, v)
}

// turnsOf returns the turns of a conversation, 1 if an older version has not sent them.
func turnsOf(v *kvlanev1.ReplicaConversation) uint32 {
	if v.GetTurns() == 0 {
		return 1
	}
	return v.GetTurns() - 1
}

// laterFields returns the encoded fields that this version does not know, "" above maxLater bytes.
func laterFields(v *kvlanev1.ReplicaConversation) string {
	if unknown := v.ProtoReflect().GetUnknown(); len(unknown) <= maxLater {
		return string(unknown)
	}
	return ""
}

// targetOf returns the target with a number of the message, the zero Target for 0.
func targetOf(m *kvlanev1.ReplicaMessage, number uint32) kvindex.Target {
	if number == 0 {
		return kvindex.Target{}
	}
	t := m.GetTargets()[number-1]
	return kvindex.Target{Worker: t.GetWorker(), Rank: int32(t.GetRank()) - 1}
}

func bookingOf(m *kvlanev1.ReplicaMessage, b *kvlanev1.ReplicaBooking) routing.Booking {
	return routing.Booking{Replica: m.GetReplica(), ID: routing.ReservationID(b.GetId()), Decode: targetOf(m, b.GetDecode()), Prefill: targetOf(m, b.GetPrefill()),
		Miss: int64(b.GetMiss()), KV: int64(b.GetKv()), Sequences: int64(b.GetSequences()), Phase: uint8(b.GetPhase()),
		Turn: [numLegs]uint8{uint8(min(b.GetTurn(), 2)), uint8(min(b.GetPrefillTurn(), 2))}, InTurn: uint8(b.GetInTurn() & 3)}
}
