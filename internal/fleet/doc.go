// Package fleet knows which workers exist, which models they serve, what they cache
// (the index and the feeds of KV events), and whether their tokenizers agree with
// ours. It tells the router about targets and load; it chooses nothing.
package fleet
