// Package fleet knows which workers exist, which models they serve, what they cache (the
// index and the feeds of KV events), and whether their tokenizers agree with ours. It keeps
// the router's targets and loads up to date; routing decisions are not made here.
package fleet
