// Package peers moves a copy of the index from a replica that is ready to one
// that starts, over the gRPC service Snapshots. It knows bytes, not what is in
// them: the owner of the index writes and reads the content.
//
// The copy is written to an unlinked temporary file first, because the index
// takes no changes while it is written: a slow peer must not hold up the events
// of engines. Neither side keeps more of it in memory than a piece.
package peers
