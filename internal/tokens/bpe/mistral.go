package bpe

import (
	"fmt"
	"io/fs"
	"strconv"
	"strings"
)

// MistralFile is the content of a mistral-common file besides the tokens.
type MistralFile struct {
	// Version of the format of conversations: 1, 2, 3, 7, 11, 13 or 15; 0 if it has none.
	Version int
	// Tekken: the file is a tekken.json.
	Tekken bool
	// Settings are the settings that a request may have, nil if there are none. Version 15.
	Settings *MistralSettings
}

// MistralSettings is the member model_settings_builder of tekken.json.
type MistralSettings struct {
	// Effort is nil if the reasoning effort of a request does not change the prompt.
	Effort *struct {
		Values  []string `json:"values"`
		Default string   `json:"default"`
	} `json:"reasoning_effort"`
	// Schema is not nil if the prompt names the schema of the answer.
	Schema *struct{} `json:"json_schema"`
}

// Mistral returns the tokenizer of mistral-common for a folder in Mistral's format, nil for other
// folders. It is the tokenizer itself if the folder has no tokenizer.json.
func (t *Tokenizer) Mistral() *Tokenizer { return t.mistral }

// loadMistral reads the file that mistral-common chooses: tekken.json, or the SentencePiece model whose name comes last.
func loadMistral(fsys fs.FS, config Config) (*Tokenizer, error) {
	name := tekkenFile
	if !exists(fsys, name+"*") {
		names, err := fs.Glob(fsys, spmFile+".v*")
		if err != nil {
			return nil, err
		}
		for _, n := range names {
			name = strings.TrimSuffix(n, ".gz") // in order
		}
	}
	raw, err := readFile(fsys, name)
	if err != nil {
		return nil, err
	}
	var t *Tokenizer
	if name == tekkenFile {
		t, err = parseTekken(raw, name, config)
	} else {
		config.MistralFile.Version = mistralVersion(strings.TrimPrefix(name, spmFile+"."))
		var m *spmModel
		if m, err = readSPM(raw); err == nil {
			t, err = m.tokenizer(config)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return t, nil
}

// mistralVersion returns the number of a version such as v3, or v7m1 with images; 0 for anything else.
func mistralVersion(name string) int {
	number, _, _ := strings.Cut(strings.TrimPrefix(name, "v"), "m")
	n, _ := strconv.Atoi(number)
	return n
}
