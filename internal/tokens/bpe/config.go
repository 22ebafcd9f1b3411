package bpe

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"regexp"
	"sort"
	"strconv"
	"strings"
)

// Config holds what the other files of a model configure, as transformers exposes it to chat templates.
type Config struct {
	// Special maps the names of the special tokens that are set (bos_token, eos_token, ...) to their content.
	Special map[string]string
	// ExtraSpecial is the list additional_special_tokens or extra_special_tokens.
	ExtraSpecial []string
	// Templates are the chat templates; a model's only template is named "default".
	Templates []Template
	// TokenizerClass is as in tokenizer_config.json, ModelType and Architecture (the first one) as in config.json.
	TokenizerClass          string
	ModelType, Architecture string
	// Mistral: vLLM renders chats with mistral-common, because the folder has a tokenizer for it and
	// weights in Mistral's format, or no other tokenizer.
	Mistral bool
	// MistralFile is the content of the tokenizer's file besides the tokens, for a tokenizer of such a file.
	MistralFile MistralFile
	// HasModel reports whether there is a config.json, Media whether it configures images, audio
	// or video. VocabSize is its number of ids, 0 if unset.
	HasModel, Media bool
	VocabSize       int
	// EOSTokenIDs are those of generation_config.json, else of config.json.
	EOSTokenIDs []uint32

	decoder []AddedToken    // added_tokens_decoder, by id
	named   map[string]bool // members of tokenizer_config.json, including null ones
	llama   llamaConfig
}

// llamaConfig is what transformers' LlamaTokenizer reads.
type llamaConfig struct {
	legacy, addPrefixSpace bool
	prefixSpaceSet         bool // other classes have another default
	addBOS, addEOS         bool // read without a tokenizer.json
	noBOS                  bool // add_bos_token is false
}

// maxTemplates bounds the bytes of a folder's chat templates. A model's have 25 KB; a compiled one takes 100 to 330 times its source.
const maxTemplates = 4 << 20

// Template is a named chat template.
type Template struct{ Name, Source string }

// SpecialToken returns the content of a special token by name, such as "bos_token".
func (c *Config) SpecialToken(name string) (string, bool) {
	s, ok := c.Special[name]
	return s, ok
}

// Template returns the source of a chat template by name; "" means "default".
func (c *Config) Template(name string) (string, bool) {
	if name == "" {
		name = "default"
	}
	for _, t := range c.Templates {
		if t.Name == name {
			return t.Source, true
		}
	}
	return "", false
}

// specialNames are transformers' SPECIAL_TOKENS_ATTRIBUTES.
var specialNames = []string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}

// mediaConfigs are the members of config.json that only multimodal models have.
var mediaConfigs = []string{"vision_config", "audio_config", "vision_tower_config", "mm_vision_tower", "image_token_id", "image_token_index", "video_token_id",
	"audio_token_id", "audio_token_index", "sound_config", "thinker_config", "visual", "img_processor", "embd_layer"}

// readConfig reads those of the files that exist. Only invalid JSON is an error.
func readConfig(fsys fs.FS) (Config, error) {
	c := Config{Special: map[string]string{}}
	var members map[string]json.RawMessage
	if err := readJSON(fsys, "tokenizer_config.json", &members); err != nil {
		return c, err
	}
	if err := c.fromTokenizerConfig(members); err != nil {
		return c, fmt.Errorf("tokenizer_config.json: %w", err)
	}
	if _, ok := members["added_tokens_decoder"]; !ok {
		var legacy map[string]json.RawMessage
		if err := readJSON(fsys, "special_tokens_map.json", &legacy); err != nil {
			return c, err
		}
		c.specials(legacy)
	}
	if err := c.templates(fsys, members["chat_template"]); err != nil {
		return c, err
	}
	if err := c.boundTemplates(); err != nil {
		return c, err
	}
	return c, c.fromModel(fsys)
}

// fromModel reads config.json and generation_config.json.
func (c *Config) fromModel(fsys fs.FS) error {
	var model, generation map[string]json.RawMessage
	if err := readJSON(fsys, "config.json", &model); err != nil {
		return err
	}
	if err := readJSON(fsys, "generation_config.json", &generation); err != nil {
		return err
	}
	c.HasModel = model != nil
	c.Mistral = exists(fsys, "tekken.json*", "tokenizer.model.v*") && (exists(fsys, "consolidated*.safetensors") || !exists(fsys, "tokenizer.json*"))
	for _, name := range mediaConfigs {
		c.Media = c.Media || model[name] != nil
	}
	var architectures []string
	if err := members(model, map[string]any{"model_type": &c.ModelType, "vocab_size": &c.VocabSize, "architectures": &architectures}); err != nil {
		return fmt.Errorf("config.json: %w", err)
	}
	c.VocabSize = max(c.VocabSize, 0)
	if len(architectures) > 0 {
		c.Architecture = architectures[0]
	}
	if c.EOSTokenIDs = idList(generation["eos_token_id"]); c.EOSTokenIDs == nil {
		c.EOSTokenIDs = idList(model["eos_token_id"])
	}
	return nil
}

// exists reports whether a file matches one of the patterns.
func exists(fsys fs.FS, patterns ...string) bool {
	for _, p := range patterns {
		if found, err := fs.Glob(fsys, p); err == nil && len(found) > 0 {
			return true
		}
	}
	return false
}

// members decodes those members of an object that are present.
func members(object map[string]json.RawMessage, to map[string]any) error {
	for name, v := range to {
		if raw, ok := object[name]; ok {
			if err := json.Unmarshal(raw, v); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return nil
}

// notFinite matches the non-finite floats that Python's json module reads and writes although JSON has none, such as
// Mamba's time_step_limit. It also matches strings, to skip their content.
var notFinite = regexp.MustCompile(`(?s)"(?:[^"\\]|\\.)*"|-?(?:NaN|Infinity)`)

// readJSON decodes the file into v, which stays unchanged if the file does not exist. Floats that are not finite become null.
func readJSON(fsys fs.FS, name string, v any) error {
	b, err := readFile(fsys, name)
	if err != nil || b == nil {
		return err
	}
	err = json.Unmarshal(b, v)
	if err != nil {
		err = json.Unmarshal(notFinite.ReplaceAllFunc(b, func(found []byte) []byte {
			if found[0] == '"' {
				return found
			}
			return []byte("null")
		}), v)
	}
	if err != nil {
		return fmt.Errorf("decode %s: %w", name, err)
	}
	return nil
}

// idList reads an id or a list of ids.
func idList(raw json.RawMessage) []uint32 {
	var ids []uint32
	if json.Unmarshal(raw, &ids) == nil {
		return ids
	}
	var id uint32
	if len(raw) > 0 && json.Unmarshal(raw, &id) == nil {
		return []uint32{id}
	}
	return nil
}

func (c *Config) fromTokenizerConfig(file map[string]json.RawMessage) error {
	c.specials(file)
	c.named = make(map[string]bool, len(file))
	for name := range file {
		c.named[name] = true
	}
	c.llama = llamaConfig{addPrefixSpace: true}
	if err := members(file, map[string]any{
		"tokenizer_class": &c.TokenizerClass, "legacy": &c.llama.legacy, "add_prefix_space": &c.llama.addPrefixSpace,
		"add_bos_token": &c.llama.addBOS, "add_eos_token": &c.llama.addEOS,
	}); err != nil {
		return err
	}
	c.llama.noBOS = string(file["add_bos_token"]) == "false"
	set, ok := file["add_prefix_space"]
	c.llama.prefixSpaceSet = ok && string(set) != "null"
	raw, ok := file["added_tokens_decoder"]
	if !ok {
		return nil
	}
	var decoder map[string]AddedToken
	if err := json.Unmarshal(raw, &decoder); err != nil {
		return fmt.Errorf("added_tokens_decoder: %w", err)
	}
	for key, token := range decoder {
		id, err := strconv.ParseUint(key, 10, 32)
		if err != nil {
			return fmt.Errorf("added_tokens_decoder: %w", err)
		}
		token.ID = uint32(id)
		c.decoder = append(c.decoder, token)
	}
	sort.Slice(c.decoder, func(i, j int) bool { return c.decoder[i].ID < c.decoder[j].ID })
	return nil
}

// specials reads the named special tokens: strings, or objects with a content.
func (c *Config) specials(members map[string]json.RawMessage) {
	for _, name := range specialNames {
		if s, ok := tokenContent(members[name]); ok {
			c.Special[name] = s
		}
	}
	for name, raw := range members {
		if strings.HasSuffix(name, "_token") {
			var s string
			if json.Unmarshal(raw, &s) == nil && s != "" {
				c.Special[name] = s
			}
		}
	}
	for _, name := range []string{"extra_special_tokens", "additional_special_tokens"} {
		var list []json.RawMessage
		if json.Unmarshal(members[name], &list) == nil && len(c.ExtraSpecial) == 0 {
			for _, raw := range list {
				if s, ok := tokenContent(raw); ok {
					c.ExtraSpecial = append(c.ExtraSpecial, s)
				}
			}
		}
		var named map[string]string
		if json.Unmarshal(members[name], &named) == nil {
			maps.Copy(c.Special, named)
		}
	}
}

func tokenContent(raw json.RawMessage) (string, bool) {
	if len(raw) == 0 || string(raw) == "null" {
		return "", false
	}
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s, true
	}
	var t AddedToken
	if json.Unmarshal(raw, &t) == nil {
		return t.Content, true
	}
	return "", false
}

// templates reads the chat templates: separate files take precedence over the entry of tokenizer_config.json.
func (c *Config) templates(fsys fs.FS, entry json.RawMessage) error {
	main, err := readFile(fsys, "chat_template.jinja")
	if err != nil {
		return err
	}
	if main != nil {
		c.Templates = append(c.Templates, Template{"default", string(main)})
	}
	extra, err := fs.Glob(fsys, "additional_chat_templates/*.jinja")
	if err != nil {
		return err
	}
	sort.Strings(extra)
	for _, name := range extra {
		src, err := readFile(fsys, name)
		if err != nil {
			return err
		}
		base := name[strings.LastIndexByte(name, '/')+1:]
		c.Templates = append(c.Templates, Template{strings.TrimSuffix(base, ".jinja"), string(src)})
		if err := c.boundTemplates(); err != nil {
			return err
		}
	}
	if len(c.Templates) > 0 {
		return nil
	}
	var legacy struct {
		ChatTemplate json.RawMessage `json:"chat_template"`
	}
	if err := readJSON(fsys, "chat_template.json", &legacy); err != nil {
		return err
	}
	if len(legacy.ChatTemplate) > 0 {
		entry = legacy.ChatTemplate
	}
	return c.templateEntry(entry)
}

func (c *Config) boundTemplates() error {
	size := 0
	for _, t := range c.Templates {
		size += len(t.Source)
	}
	if size > maxTemplates {
		return fmt.Errorf("the chat templates have more than %d bytes together", maxTemplates)
	}
	return nil
}

// templateEntry reads one template, a list of named ones, or an object of them.
func (c *Config) templateEntry(raw json.RawMessage) error {
	if len(raw) == 0 || string(raw) == "null" {
		return nil
	}
	var src string
	if json.Unmarshal(raw, &src) == nil {
		c.Templates = []Template{{"default", src}}
		return nil
	}
	var list []struct {
		Name     string `json:"name"`
		Template string `json:"template"`
	}
	if json.Unmarshal(raw, &list) == nil {
		for _, t := range list {
			c.Templates = append(c.Templates, Template{t.Name, t.Template})
		}
		return nil
	}
	var named map[string]string
	if err := json.Unmarshal(raw, &named); err != nil {
		return fmt.Errorf("chat_template: %w", err)
	}
	for name, src := range named {
		c.Templates = append(c.Templates, Template{name, src})
	}
	sort.Slice(c.Templates, func(i, j int) bool { return c.Templates[i].Name < c.Templates[j].Name })
	return nil
}
