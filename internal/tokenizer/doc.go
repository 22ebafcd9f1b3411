// Package tokenizer turns text into the very token ids that Hugging Face's
// tokenizers library computes from the same tokenizer.json, which is what
// engines run. It is pure Go and exact: byte-level BPE with the split patterns
// of real models and SentencePiece-style BPE with byte fallback have fast ways,
// BPE of other shapes, WordPiece and WordLevel a slower one. Whatever it cannot do
// exactly is refused by Load with the reason.
//
//	tok, err := tokenizer.Load(os.DirFS("models/qwen3"))
//	ids, err := tok.Encode(nil, "Hello", true)
//
// A road through the files: load.go reads the files, added.go cuts added tokens
// out of the text, nfc.go normalizes, split*.go finds the words, words.go looks
// them up, merge.go merges what is no token. memo.go remembers paragraphs and
// prefix.go whole conversations. pipeline.go is the slower way: stages as the file
// has them, patterns run by regex.go. rebuilt.go knows what transformers makes of
// the files.
package tokenizer

//go:generate gen/generate.sh
