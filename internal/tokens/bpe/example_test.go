package bpe_test

import (
	"fmt"
	"os"

	"github.com/kvlane/kvlane/internal/tokens/bpe"
)

func ExampleLoad() {
	tok, err := bpe.Load(os.DirFS("../models/qwen3"))
	if err != nil {
		fmt.Println(err)
		return
	}
	ids, err := tok.Encode(nil, "<|im_start|>user\nHello, world", false)
	fmt.Println(ids, err)
	eos, _ := tok.Config().SpecialToken("eos_token")
	fmt.Println(eos)
	// Output:
	// [151644 872 198 9707 11 1879] <nil>
	// <|im_end|>
}
