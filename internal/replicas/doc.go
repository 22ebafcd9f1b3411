// Package replicas lets several replicas route as one: each sends the others its bookings and
// the conversations that it binds, over NATS.
//
// Core is the protocol, without clock, goroutine or network: its inputs are the router's changes and the others'
// messages; it returns messages and copies others' bookings to the router. Node runs a Core on a NATS connection, and
// Server is the NATS server of mode embedded.
//
// Every replica publishes to a subject of its own: changes with a sequence number, gathered for at most 5 ms, and a
// heartbeat twice a second with the sum of its ledger. A replica that misses a change, meets another for the first
// time, or finds a sum that differs asks that replica for its whole state. A replica that is silent for 1.8 s is
// dropped with its bookings; its conversations stay. A replica has a new id at each start, so that a restarted one is
// new to the others.
//
// The binding of a conversation is a register that all replicas merge alike: the higher generation wins, then the
// earlier logical time, then the smaller replica id. A new conversation has generation 0; binding it to another target,
// because its own is gone, raises the generation. So of two concurrent bindings the earlier one wins everywhere.
package replicas
