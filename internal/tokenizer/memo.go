package tokenizer

type memo struct{}
type cutter struct{}
