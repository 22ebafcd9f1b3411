package bpe

// Contractions, letters and ends that the patterns below share.
const (
	reContraction = `(?i:'s|'t|'re|'ve|'m|'ll|'d)`
	reUpper       = `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`
	reLower       = `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`
	reUpperNotHan = `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]`
	reLowerNotHan = `[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]`
	reBlank       = `\s*[\r\n]+|\s+(?!\S)|\s+`
	rePrefix      = `[^\r\n\p{L}\p{N}]?`
)

// patterns maps the split patterns of known models, compared literally, to their splitters. It lists all spellings of a pattern.
var patterns = map[string]splitter{
	// Qwen 2, 2.5, 3
	reQwen: wordSplit{digits: 1},
	// cl100k as converted, Llama 3, GLM 4, Phi 4, OLMo 2
	reContraction + `|` + rePrefix + `\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|` + reBlank: wordSplit{digits: 3},
	// the same two in tiktoken's spelling: possessive, which changes no match here, and with one
	// line end, before which \s* consumes the others
	reTiktoken(`\p{N}`):      wordSplit{digits: 1},
	reTiktoken(`\p{N}{1,3}`): wordSplit{digits: 3},
	// numbers of any length, two digits
	reContraction + `|` + rePrefix + `\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|` + reBlank:     wordSplit{},
	reContraction + `|` + rePrefix + `\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|` + reBlank: wordSplit{digits: 2},
	// Qwen 3.5: marks belong to words
	reQwenMarks: wordSplit{digits: 1, marks: true},
	// o200k: gpt-oss, Llama 4
	caseWords(reUpper, reLower, reContraction+`?`) + `|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|` + reBlank: caseSplit{digits: 3, contractions: true, slash: true},
	// tekken: Mistral Nemo and after, Nemotron
	caseWords(reUpper, reLower, ``) + `|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|` + reBlank: caseSplit{digits: 1, slash: true},
	// the same with numbers of three digits
	caseWords(reUpper, reLower, ``) + `|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|` + reBlank: caseSplit{digits: 3, slash: true},
	// Kimi K2
	reKimi: caseSplit{digits: 3, contractions: true, han: true},
	// GPT-2, where it is spelled out
	reGPT2: gpt2Split{},
}

// reTiktoken returns cl100k's pattern in tiktoken's spelling.
func reTiktoken(numbers string) string {
	return `'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|` + numbers + `| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+`
}

const reQwen = reContraction + `|` + rePrefix + `\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|` + reBlank

const reQwenMarks = reContraction + `|` + rePrefix + `[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|` + reBlank

var reKimi = `[\p{Han}]+|` + caseWords(reUpperNotHan, reLowerNotHan, reContraction+`?`) + `|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|` + reBlank

const reGPT2 = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`

// caseWords returns the two alternatives for words of the o200k family.
func caseWords(upper, lower, tail string) string {
	return rePrefix + upper + `*` + lower + `+` + tail + `|` + rePrefix + upper + `+` + lower + `*` + tail
}

// stages are DeepSeek V3's three patterns.
var stages = []string{
	`\p{N}{1,3}`,
	`[一-龥぀-ゟ゠-ヿ]+`,
	"[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
}
