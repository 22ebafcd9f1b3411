// Package bpe computes the token ids that Hugging Face's tokenizers library computes from the same tokenizer.json, which is what
// engines run. It is pure Go and its ids are exact: byte-level BPE with the split patterns of real models and SentencePiece-style
// BPE with byte fallback have fast paths, and other BPE tokenizers a slower one. Unigram models, SentencePiece and tiktoken files
// have the ids of their own libraries. Load rejects any tokenizer that it cannot reproduce exactly, and gives the reason.
//
//	tok, err := bpe.Load(os.DirFS("models/qwen3"))
//	ids, err := tok.Encode(nil, "Hello", true)
//
// The slower path has its own regular expression engine. dlclark/regexp2 cannot parse all
// patterns of real models, takes 5 to 40 times as long, and limits the time per match, not per
// text (17.8 s for 20,000 digits with Aya's pattern, compared with 0.3 s of bounded work here).
package bpe

//go:generate gen/generate.sh
