package shape

import (
	"slices"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// profile is what one engine does differently when it makes the prompt of a request.
type profile struct {
	// parse reads a JSON value as the engine's own reader does.
	parse func(raw []byte) (jinja.Value, error)
	// longIntegers: bodies with integers of more than 4,300 digits are read.
	longIntegers bool
	// chat plans a chat, or the messages of a request to the tokenizing endpoint.
	chat func(m *Model, in input) (*plan, error)
	// assumed is Result.Assumed of a chat.
	assumed string
	// anthropic is how an Anthropic request becomes a chat.
	anthropic anthropicRules
	// truncation reads the fields by which a request shortens its prompt; nil: there are none.
	truncation func(m *Model, in input, p *plan) error
	// fixedSpecial: add_special_tokens of a plain prompt is not read outside the tokenizing endpoint.
	fixedSpecial bool
	// length refuses a prompt of n tokens that does not fit the engine's context.
	length func(m *Model, in input, n int) error
	// templateInKwargs: chat_template_kwargs may hold a chat_template.
	templateInKwargs bool
	// untrusted is the error for a request-supplied template that Options do not trust.
	untrusted error
	// raised is the engine's answer to an error that a template raised.
	raised func(e *jinja.Error) error
	// textOnly is the reason for refusing a part of kind where the model reads text alone.
	textOnly func(kind string) string
	// idsField is the path of the field that takes the ids of a chat; nil: there is none.
	idsField []string
	// tokenizePath is the tokenizing endpoint, "" if there is none; tokenizeFields are the fields that it reads.
	tokenizePath   string
	tokenizeFields []body.Field
	// renders: there are render endpoints for messages and responses.
	renders bool
}

// profiles are indexed by Engine.
var profiles = [...]*profile{
	VLLM: {
		parse:            jinja.ParseJSONSurrogates, // as Python's json: halves of surrogate pairs are errors only when they are printed
		chat:             (*Model).vllmChat,
		anthropic:        vllmAnthropic,
		truncation:       (*Model).vllmTruncation,
		length:           (*Model).vllmLength,
		templateInKwargs: true,
		untrusted: refuse("Chat template is passed with request, but --trust-request-chat-template is not set. Refused request with " +
			"untrusted chat template."),
		raised:         func(e *jinja.Error) error { return refuseWith(400, e.Message) },
		textOnly:       func(string) string { return "the model is not a multimodal model" },
		idsField:       []string{body.FieldKVTransferParams.String(), "prompt_token_ids"},
		tokenizePath:   "/tokenize",
		tokenizeFields: tokenizeFields,
		renders:        true,
	},
	SGLang: {
		parse:        func(raw []byte) (jinja.Value, error) { return jinja.ParseJSON(wideIntegers(raw)) },
		longIntegers: true,
		chat:         (*Model).sglangChat,
		anthropic:    sglangAnthropic,
		fixedSpecial: true,
		length:       (*Model).plainLength,
		raised:       sglangRaised,
		textOnly: func(kind string) string {
			return "Model only supports text input; received unsupported content type '" + kind + "'."
		},
		idsField:     []string{body.FieldInputIDs.String()},
		tokenizePath: "/v1/tokenize",
		tokenizeFields: append(slices.Clip(tokenizeFields), body.FieldReasoningEffort, body.FieldReasoning,
			body.FieldToolChoice),
	},
	TRTLLM: {
		parse:        jinja.ParseJSON,
		longIntegers: true,
		chat:         (*Model).trtllmChat,
		assumed:      "TensorRT-LLM's chat shape",
		anthropic:    vllmAnthropic,
		length:       (*Model).plainLength,
		untrusted:    ErrUntrustedTemplate,
		raised:       func(e *jinja.Error) error { return refuseWith(400, e.Message) },
		textOnly:     func(string) string { return "the model is not a multimodal model" },
	},
}

// tokenizeFields are the fields that the tokenizing endpoints of both engines read.
var tokenizeFields = []body.Field{body.FieldModel, body.FieldPrompt, body.FieldMessages, body.FieldTools, body.FieldChatTemplate,
	body.FieldChatTemplateKwargs, body.FieldAddGenerationPrompt, body.FieldContinueFinalMessage, body.FieldAddSpecialTokens}

func (e Engine) profile() *profile {
	if int(e) < len(profiles) {
		return profiles[e]
	}
	return profiles[VLLM]
}

// sglangRaised answers 500 for errors that are not about the template.
func sglangRaised(e *jinja.Error) error {
	if strings.Contains(e.Class, "Template") || e.Class == "UndefinedError" || e.Class == "TypeError" {
		return refuseWith(400, e.Message)
	}
	return refuseWith(500, "Internal server error: "+e.Message)
}
