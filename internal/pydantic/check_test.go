package pydantic

import (
	"strings"
	"testing"
)

const schemas = `{"engine":"test 1","apis":{"a":3,"m":6},"parts":[
{"t":"model","of":{"role":[{"t":"literal","of":["user"]},1],"content":[{"t":"union","of":[{"t":"str"},{"t":"generator","of":1}]},1]}},
{"t":"model","of":{"type":[{"t":"literal","of":["text"]},1],"text":[{"t":"str"},1]}},
{"t":"model","of":{"role":[{"t":"str"},1],"content":[{"t":"union","of":[{"t":"str"},{"t":"list","of":{"t":"union","of":[1,{"t":"str"}]}}]},0],"id":[{"t":"str"},0]}},
{"t":"model","of":{"n":[{"t":"null","of":{"t":"int","ge":"0","le":"10"}},0],"x":[{"t":"float","gt":0},0],"flag":[{"t":"bool"},0],"name":[{"t":"str","min_length":1,"max_length":3,"pattern":"^a"},0],
"word":[{"t":"str"},0],"kinds":[{"t":"dict","keys":{"t":"str"},"of":{"t":"int"}},0],"one":[{"t":"tagged","by":"type","of":{"text":1}},0],"even":[{"t":"after","name":"even","of":{"t":"int"}},0],
"list":[{"t":"list","of":{"t":"int"},"max_length":2},0],"pair":[{"t":"tuple","of":[{"t":"int"},{"t":"str"}]},0],"none":[{"t":"none"},0],"by":[{"t":"tagged","by":"_kind","of":{"text":1}},0],"some":[{"t":"all","of":[{"t":"instance","of":"Sequence"},{"t":"list","of":{"t":"str"}}]},0]}},
{"t":"union","of":[0,2]},
{"t":"any"},
{"t":"model","of":{"messages":[{"t":"list","of":4},1]},"forbid":1}
]}`

func load(t *testing.T) *Set {
	t.Helper()
	set, err := Load([]byte(schemas), Functions{"even": func(raw []byte, next func([]byte) error) error {
		if n, err := Int(raw); err == nil && n.Bit(0) == 1 {
			return &Error{Reason: "odd"}
		}
		return next(raw)
	}}, Tags{"_kind": func([]byte) string { return "text" }})
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// TestLaxConversions: each line was tried with pydantic 2.14.
func TestLaxConversions(t *testing.T) {
	schema := load(t).Schema("a")
	for _, c := range []struct {
		fits   bool
		bodies string
	}{
		{true, `{"n":1} {"n":null} {"n":"1"} {"n":" 2 "} {"n":1.0} {"n":"1.0"} {"n":"+3"} {"n":"1_0"} {"n":true} {"n":1e1} {"n":-0.0} {"n":10} {}`},
		{false, `{"n":11} {"n":-1} {"n":"x"} {"n":1.5} {"n":""} {"n":"1e1"} {"n":"0x1"} {"n":[]} {"n":{}} {"n":NaN} {"n":1e400} {"n":"1__0"} {"n":99999999999999999999} [] 1`},
		{true, `{"x":1} {"x":0.5} {"x":"0.5"} {"x":true} {"x":"inf"} {"x":1e400} {"x":" 1e3 "}`},
		{false, `{"x":0} {"x":-1} {"x":"x"} {"x":false} {"x":NaN} {"x":null} {"x":"0x1p3"}`},
		{true, `{"flag":true} {"flag":"yes"} {"flag":"OFF"} {"flag":1} {"flag":0.0} {"flag":"t"}`},
		{false, `{"flag":2} {"flag":" yes "} {"flag":null} {"flag":[]} {"flag":""}`},
		{true, `{"name":"a"} {"name":"abc"} {"word":"a\ud800"} {"kinds":{"a":1,"b":"2"}} {"one":{"type":"text","text":"x","y":1}} {"even":2} {"list":[1,"2"]} {"pair":[1,"x"]} {"none":null} {"some":["a"]} {"by":{"type":"text","text":"x"}}`},
		{false, `{"name":""} {"name":"abcd"} {"name":"b"} {"name":1} {"name":"a\ud800"} {"word":1} {"kinds":{"a":"x"}} {"one":{"type":"x"}} {"one":{}} {"one":[]} {"even":1} {"even":"x"} {"list":[1,2,3]} {"list":{}} {"list":"12"} {"pair":[1]} {"none":1} {"some":"a"} {"by":{"type":"text"}}`},
		{true, `{"unknown":1,"n":2} {"n":"x","n":2}`},
	} {
		for body := range strings.SplitSeq(c.bodies, "} ") {
			if !strings.HasSuffix(body, "}") && strings.HasPrefix(body, "{") {
				body += "}"
			}
			if err := schema.Check([]byte(body)); (err == nil) != c.fits {
				t.Errorf("%s: %v", body, err)
			}
		}
	}
}

// TestIterablesOfUnions: of two types that fit, the one that sets more fields is taken; the elements of an Iterable are looked at
// later.
func TestIterablesOfUnions(t *testing.T) {
	schema := load(t).Schema("m")
	for body, fits := range map[string]bool{
		`{"messages":[{"role":"user","content":"x"}]}`:                                    true,
		`{"messages":[{"role":"user","content":["x"]}]}`:                                  false, // an Iterable, by the first type
		`{"messages":[{"role":"user","content":["x",{"type":"text","text":"y"}]}]}`:       true,  // the second type counts more fields
		`{"messages":[{"role":"user","content":[{"type":"text"}]}]}`:                      false,
		`{"messages":[{"role":"user","content":{}}]}`:                                     true,
		`{"messages":[{"role":"user","content":{"a":1}}]}`:                                false,
		`{"messages":[{"role":"other","content":["x"]}]}`:                                 true,
		`{"messages":[{"role":"user","content":["x"],"id":"1"}]}`:                         true,
		`{"messages":[{"role":"user","content":[{"type":"text","text":"y"},{"a":"b"}]}]}`: false,
		`{"messages":[{"role":"user","content":null}]}`:                                   false,
		`{"messages":[],"more":1}`:                                                        false,
		`{}`:                                                                              false,
	} {
		if err := schema.CheckAll([]byte(body)); (err == nil) != fits {
			t.Errorf("%s: %v", body, err)
		}
	}
}

// A number has an end: what follows would take quadratic time.
func TestIntegersHaveAnEnd(t *testing.T) {
	for digits, fits := range map[int]bool{4300: true, 4301: false, 1 << 20: false} {
		for _, raw := range []string{"-%", "\"%\""} {
			raw = strings.Replace(raw, "%", strings.Repeat("7", digits), 1)
			if _, err := Int([]byte(raw)); (err == nil) != fits {
				t.Errorf("%d digits: %v", digits, err)
			}
		}
	}
}

func TestLoadRefusesWhatItDoesNotKnow(t *testing.T) {
	for _, bad := range []string{`{`, `{"parts":[{"t":"quux"}]}`, `{"parts":[{"t":"list","of":7}]}`, `{"parts":[{"t":"str","pattern":"("}]}`,
		`{"apis":{"a":3},"parts":[]}`, `{"parts":[{"t":"model","of":3}]}`, `{"parts":[{"t":"union","of":3}]}`, `{"parts":[{"t":"tagged","of":3}]}`,
		`{"parts":[{"t":"literal","of":3}]}`, `{"parts":[{"t":"instance","of":3}]}`, `{"parts":[{"t":"dict","keys":9}]}`} {
		if _, err := Load([]byte(bad), nil, nil); err == nil {
			t.Errorf("%s: no error", bad)
		}
	}
}
