// Package encoders contains the prompt encoders that engines implement in code, for models without a chat template: one
// independent file per encoder. An encoder gets a conversation as the engine's request parser leaves it and appends the
// prompt, either as text or, where the engine never reads special tokens out of a client's text, as text marked with
// token ids (bpe.Marked). The reference is vLLM 0.32.0.
package encoders
