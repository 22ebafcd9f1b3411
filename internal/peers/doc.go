// Package peers copies the index from a ready replica to one that starts, over the gRPC service Snapshots. The content
// is opaque bytes: the owner of the index writes and reads it.
//
// The copy is written to an unlinked temporary file first, because the index accepts no changes while it is written: a
// slow peer must not delay the engines' events. Neither side holds more than one chunk in memory.
package peers
