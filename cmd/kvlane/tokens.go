package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kvlane/kvlane/internal/config"
	"github.com/kvlane/kvlane/internal/tokens/bpe"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
	"github.com/kvlane/kvlane/internal/tokens/shape"
	"github.com/kvlane/kvlane/internal/workers"
)

func runTokenize(ctx context.Context, io streams, args []string) error {
	f := flags("tokenize")
	dir := f.String("tokenizer", "", "`folder` with tokenizer.json and tokenizer_config.json, plain or gzipped, hf:Org/Model@revision, or builtin:qwen3")
	special := f.Bool("add-special-tokens", false, "add what the tokenizer puts around every text (BOS, EOS)")
	if err := parse(io, f, args, 0); err != nil {
		return err
	}
	if *dir == "" {
		return usageError{"needs --tokenizer DIR"}
	}
	files, err := openTokenizer(ctx, io, *dir)
	if err != nil {
		return err
	}
	loaded := during(io.err, "loading tokenizer "+*dir)
	tok, err := bpe.Load(files)
	loaded()
	if err != nil {
		return fmt.Errorf("tokenizer %s: %w", *dir, err)
	}
	return shape.TokenizeLines(io.in, io.out, tok, *special)
}

func runRender(ctx context.Context, io streams, args []string) error {
	f := flags("render")
	dir := f.String("tokenizer", "", "`folder` of the model's tokenizer, hf:Org/Model@revision, or builtin:qwen3")
	engineName := f.String("engine", "vllm", "engine `profile`: vllm, sglang, trtllm")
	path := f.String("path", "/v1/chat/completions", "request `path`")
	ids := f.Bool("tokens", false, "print the token ids too")
	tools := f.Bool("tool-parser", false, "the engine runs with a tool-call parser")
	trust := f.Bool("trust-request-templates", false, "the engine takes a chat_template of the request")
	context := f.Int("max-model-len", 0, "the engine's context in `tokens`: refuse what does not fit (0: nothing is too long)")
	file := f.String("template", "", "render this template `file` from its variables instead of request bodies")
	isContext := f.Bool("context", false, "with --template: lines are objects of template variables")
	nowText := f.String("now", "", "`time` that the template sees, like 2026-11-20T20:00:00")
	if err := parse(io, f, args, 0); err != nil {
		return err
	}
	if *context < 0 {
		return usageError{fmt.Sprintf("--max-model-len %d: want a number of tokens, or 0 for no limit", *context)}
	}
	var err error
	now := time.Now()
	if *nowText != "" {
		if now, err = time.ParseInLocation("2006-01-02T15:04:05", *nowText, time.Local); err != nil {
			return usageError{fmt.Sprintf("--now %q is not like 2026-11-20T20:00:00", *nowText)}
		}
	}
	var source []byte
	if *file != "" {
		if source, err = config.ReadFile(*file); err != nil {
			return err
		}
	}
	if *isContext {
		if *file == "" {
			return usageError{"--context needs --template FILE"}
		}
		return answered(shape.RenderContextLines(io.in, io.out, string(source), now))
	}
	if *dir == "" {
		return usageError{"needs --tokenizer DIR, or --template FILE --context"}
	}
	engine, err := shape.ParseEngine(*engineName)
	if err != nil {
		return usageError{err.Error()}
	}
	files, err := openTokenizer(ctx, io, *dir)
	if err != nil {
		return err
	}
	loaded := during(io.err, "loading tokenizer "+*dir)
	m, err := modelOf(*dir, files, shape.Options{ChatTemplate: string(source), ToolParser: *tools, MaxModelLen: *context, TrustTemplates: *trust, Now: func() time.Time { return now }})
	loaded()
	if syntax, ok := errors.AsType[*jinja.Error](err); ok && len(source) > 0 {
		return &templateError{*file, syntax}
	}
	if err != nil {
		return err
	}
	return answered(shape.RenderLines(io.in, io.out, m, shape.RenderOptions{Engine: engine, Path: *path, IDs: *ids}))
}

// answered turns refusals into answers, because render's output includes what an engine would refuse.
func answered(err error) error {
	if _, ok := errors.AsType[*shape.LinesError](err); ok {
		return nil
	}
	return err
}

// firstModel returns the first name that the engine lists.
func firstModel(ctx context.Context, url string) (string, error) {
	asker := workers.NewAsker(10 * time.Second)
	defer asker.Close()
	list, err := asker.Models(ctx, url)
	if err == nil && len(list) == 0 {
		err = workers.ErrNoModels
	}
	if errors.Is(err, workers.ErrNoModels) {
		err = fmt.Errorf("%w (name one with --model)", err)
	}
	if err != nil {
		return "", err
	}
	return list[0].ID, nil
}

// runTokensCheck compares a tokenizer with a live engine.
func runTokensCheck(ctx context.Context, io streams, args []string) error {
	f := flags("tokens-check")
	dir := f.String("tokenizer", "", "`folder` of the model's tokenizer, hf:Org/Model@revision, or builtin:qwen3")
	url := f.String("engine", "", "`URL` of the engine, like http://127.0.0.1:8000")
	kind := f.String("kind", "vllm", "engine kind: vllm or sglang")
	name := f.String("model", "", "model `name` to ask for (default: the engine's first)")
	if err := parse(io, f, args, 0); err != nil {
		return err
	}
	if *dir == "" || *url == "" {
		return usageError{"needs --tokenizer DIR and --engine URL"}
	}
	if !strings.HasPrefix(*url, "http://") && !strings.HasPrefix(*url, "https://") {
		return usageError{fmt.Sprintf("--engine %q is not like http://127.0.0.1:8000", *url)}
	}
	engine, err := shape.ParseEngine(*kind)
	if err != nil {
		return usageError{err.Error()}
	}
	defer during(io.err, "comparing with "+*url)()
	files, err := openTokenizer(ctx, io, *dir)
	if err != nil {
		return err
	}
	m, err := modelOf(*dir, files, shape.Options{})
	if err != nil {
		return err
	}
	oracle := &shape.Oracle{Engine: engine, URL: *url}
	if *name == "" {
		if *name, err = firstModel(ctx, *url); err != nil {
			return fmt.Errorf("the engine could not be compared: %w", err)
		}
	}
	differ, err := shape.TokensCheck(ctx, io.out, m, oracle, *name)
	if err != nil {
		return fmt.Errorf("the engine could not be compared: %w", err)
	}
	if differ > 0 {
		return fmt.Errorf("%s: prompts with other ids: %d", *url, differ)
	}
	return nil
}
