package replay

import (
	"strings"
	"testing"
)

func TestTracesOfTables(t *testing.T) {
	for name, text := range map[string]string{
		"Azure 2023": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:03.9799600,4000,10\r\n2023-11-16 18:00:04.2299600,300,44\r\n",
		"Azure 2024": "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.259930+00:00,300,44\n\n2024-05-10 00:00:00.009930+00:00,4000,10\n",
		"BurstGPT": "\xef\xbb\xbfTimestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,4000,10,4010,Conversation log\n" +
			"5.25,GPT-4,300,44,344,\"API, log\"\n6,GPT-4,100,0,100,API log\n",
	} {
		w, err := ReadCSV(strings.NewReader(text), 0.5, -1)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		got := w.Generate(1)
		if len(got) != 2 || got[0].At != 0 || got[0].Prompt != 4000 || got[0].Output != 10 || got[1].At < 0.499 || got[1].At > 0.501 || got[1].Prompt != 300 ||
			got[1].Output != 44 || got[1].Blocks != nil || got[1].Conversation != "" {
			t.Errorf("%s: got %+v, want requests of 4000 and 300 tokens, half a second apart, that share nothing", name, got)
		}
	}
	const header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
	for text, want := range map[string]string{
		"":                              "the trace is empty",
		header:                          "the trace is empty",
		"a,b,c\n1,2,3\n":                "trace, line 1: want a header with TIMESTAMP",
		header + "1,2\n":                "trace, line 2: 2 columns, want more",
		header + "yesterday,2,3\n":      `trace, line 2: timestamp "yesterday": want seconds`,
		header + "-1,2,3\n":             `trace, line 2: timestamp "-1": want seconds`,
		header + "1,2,3\n2,two,3\n":     `trace, line 3: "two": want a number of tokens`,
		header + "1,2.5,3\n":            `trace, line 2: "2.5": want a number of tokens`,
		header + "1,2,-3\n":             `trace, line 2: "-3": want a number of tokens`,
		header + "1,\"2,3\n":            "trace, line 2:",
		`{"timestamp": 0}` + "\n" + "1": "trace, line 1:",
	} {
		if _, err := ReadCSV(strings.NewReader(text), 1, 0); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", text, err, want)
		}
	}
}
