// Package bpe turns text into the very token ids that Hugging Face's
// tokenizers library computes from the same tokenizer.json, which is what
// engines run. It is pure Go and exact: byte-level BPE with the split patterns
// of real models and SentencePiece-style BPE with byte fallback have fast paths,
// BPE of other shapes a slower one. Whatever it cannot do exactly is refused by
// Load with the reason.
//
//	tok, err := bpe.Load(os.DirFS("models/qwen3"))
//	ids, err := tok.Encode(nil, "Hello", true)
//
// The slower path runs split patterns on an engine of its own: dlclark/regexp2
// cannot read all patterns of real models, takes 5 to 40 times as long, and its
// time limit holds for each match instead of the text (17.8 s for 20,000 digits
// with the pattern of Aya, where 0.3 s of bounded work are spent here).
package bpe

//go:generate gen/generate.sh
