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

func ExampleCache() {
	tok, err := bpe.Load(os.DirFS("../models/qwen3"))
	if err != nil {
		fmt.Println(err)
		return
	}
	cache := bpe.NewCache(tok, 64<<20)
	chat := ""
	for i := range 100 {
		chat += fmt.Sprintf("<|im_start|>user\nQuestion number %d, please.<|im_end|>\n", i)
	}
	if _, _, err := cache.Encode(nil, chat, false); err != nil {
		fmt.Println(err)
		return
	}
	ids, prefix, err := cache.Encode(nil, chat+"<|im_start|>assistant\n", false)
	fmt.Println(len(ids)-prefix.Reused < 20, err)
	// Output: true <nil>
}
