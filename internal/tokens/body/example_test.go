package body_test

import (
	"fmt"
	"log"

	"github.com/kvlane/kvlane/internal/tokens/body"
)

func ExampleParse() {
	api, _ := body.Detect("POST", "/v1/completions")
	req, err := body.Parse(api, []byte(`{"model": "demo", "prompt": ["a", "b"], "n": 2}`))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(req.Model(), req.Count, req.Choices(false), string(req.FirstPrompt()))

	_, err = body.Parse(body.Chat, []byte(`{"messages": [{"role": "user", "content": nope}]}`))
	fmt.Println(err)
	// Output:
	// demo 2 4 "a"
	// invalid JSON at byte 42 ($.messages[0].content): null was expected
}

func ExampleApply() {
	raw := []byte(`{"model": "demo",  "temperature": 1.0, "stream": true}`)
	out, err := body.Apply(nil, raw, body.Delete("stream"), body.Set([]byte("true"), "kv_transfer_params", "do_remote_decode"))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(string(out))
	// Output: {"model": "demo",  "temperature": 1.0,"kv_transfer_params":{"do_remote_decode":true}}
}
