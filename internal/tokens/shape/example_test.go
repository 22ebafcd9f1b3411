package shape_test

import (
	"errors"
	"fmt"
	"log"
	"os"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/shape"
)

func ExampleModel_Prompt() {
	m, err := shape.Load(os.DirFS("../models/qwen3"), shape.Options{})
	if err != nil {
		log.Fatal(err)
	}
	for _, raw := range []string{
		`{"messages":[{"role":"user","content":"Hello, world"}]}`,
		`{"messages":[{"role":"user","content":null}]}`,
	} {
		req, err := body.Parse(body.Chat, []byte(raw))
		if err != nil {
			log.Fatal(err)
		}
		res, err := m.Prompt(req, shape.VLLM)
		if refusal, ok := errors.AsType[*shape.Refusal](err); ok {
			fmt.Println(refusal.Status, refusal.Reason)
			continue
		}
		fmt.Println(res.IDs)
	}
	// Output:
	// [151644 872 198 9707 11 1879 151645 198 151644 77091 198]
	// 400 messages.content: input should be a valid string
}
