package shape

import (
	"slices"
	"strings"

	"github.com/kvlane/kvlane/internal/tokens/body"
	"github.com/kvlane/kvlane/internal/tokens/jinja"
)

// profile holds the rules by which one engine builds the prompt of a request.
type profile struct {
	// surrogates: lone surrogates are errors only when they are printed, as in Python's json. wide: see wideIntegers.
	surrogates, wide bool
	// longIntegers: bodies with integers of more than 4,300 digits are accepted.
	longIntegers bool
	// chat plans a chat, or the messages of a request to the tokenizing endpoint.
	chat func(m *Model, in input) (*plan, error)
	// assumed is the value of Result.Assumed for a chat.
	assumed string
	// anthropic defines how an Anthropic request is converted to a chat.
	anthropic anthropicRules
	// truncation reads the fields by which a request truncates its prompt; nil: there are none.
	truncation func(m *Model, in input, p *plan) error
	// fixedSpecial: add_special_tokens of a plain prompt is ignored outside the tokenizing endpoint.
	fixedSpecial bool
	// length refuses a prompt of n tokens that does not fit the engine's context.
	length func(m *Model, in input, n int) error
	// templateInKwargs: chat_template_kwargs may contain a chat_template.
	templateInKwargs bool
	// untrusted is the error for a request-supplied template that Options do not trust.
	untrusted error
	// raised returns the engine's answer to an error that a template raised.
	raised func(e *jinja.Error) error
	// textOnly returns the reason for refusing a part of kind if the model accepts only text.
	textOnly func(kind string) string
	// idsField is the path of the field that takes a chat's ids; nil: there is none.
	idsField []string
	// tokenizePath is the tokenizing endpoint, "" if there is none; tokenizeFields are the fields that it reads.
	tokenizePath   string
	tokenizeFields []body.Field
	// renders: there are render endpoints for messages and responses.
	renders bool
	// cacheRules describe requests for which the engine reads less than it has cached; the first that applies counts.
	cacheRules []cacheRule
}

// profiles are indexed by Engine.
var profiles = [...]*profile{
	VLLM: {
		surrogates:       true,
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
		cacheRules:     vllmCacheRules,
	},
	SGLang: {
		wide:         true,
		longIntegers: true,
		chat:         (*Model).sglangChat,
		anthropic:    sglangAnthropic,
		fixedSpecial: true,
		length:       (*Model).plainLength,
		raised:       sglangRaised,
		textOnly: func(kind string) string {
			return "Model only supports text input; received unsupported content type '" + kind + "'."
		},
		idsField:       []string{body.FieldInputIDs.String()},
		tokenizePath:   "/v1/tokenize",
		tokenizeFields: append(slices.Clip(tokenizeFields), body.FieldReasoningEffort, body.FieldReasoning, body.FieldToolChoice),
		cacheRules:     sglangCacheRules,
	},
	TRTLLM: {
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

// sglangRaised returns 500 for errors that do not come from the template.
func sglangRaised(e *jinja.Error) error {
	if strings.Contains(e.Class, "Template") || e.Class == "UndefinedError" || e.Class == "TypeError" {
		return refuseWith(400, e.Message)
	}
	return refuseWith(500, "Internal server error: "+e.Message)
}
