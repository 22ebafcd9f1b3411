// Package conv is the cache of conversations: it reuses results for a body that begins like an earlier one. It follows
// a request from its bytes to its block hashes, in four kinds of entries:
//
//	bodies    a whole body          -> the parsed request, its ids and block hashes
//	chats     JSON of a chat        -> where its messages begin and end
//	messages  JSON of a message     -> the value that the chat template gets
//	prompts   text of a prompt      -> ids up to the end of a special token, and block hashes
//
// All are found in one table by keyed hashes, bounded in bytes by one limit, and evicted in the order of their last
// use. A hit is compared byte by byte with the request, so a collision costs time and never causes wrong ids.
// Cache.Parse begins a Turn, which follows one request through the cache.
package conv
