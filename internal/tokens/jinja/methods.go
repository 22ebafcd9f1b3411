package jinja

import (
	"strings"
	"unsafe"
)

var strMethods = map[string]filterFunc{
	"strip": stripper("strip", true, true), "lstrip": stripper("lstrip", true, false), "rstrip": stripper("rstrip", false, true),
	"lower": caser("lower", lower), "upper": caser("upper", upper), "capitalize": caser("capitalize", capitalize), "title": strTitle,
	"startswith": affix("startswith", strings.HasPrefix), "endswith": affix("endswith", strings.HasSuffix),
	"removeprefix": remover("removeprefix", strings.TrimPrefix), "removesuffix": remover("removesuffix", strings.TrimSuffix),
	"split": strSplit, "splitlines": strSplitlines, "replace": strReplace, "join": strJoin,
}

var dictMethods = map[string]filterFunc{
	"get":  dictGet,
	"keys": viewMethod("keys", viewKeys), "values": viewMethod("values", viewValues), "items": viewMethod("items", viewItems),
}

func stripper(name string, left, right bool) filterFunc {
	return func(m *machine, v Value, a *arguments) Value {
		a.positional(name, 0, 1)
		if len(a.pos) == 0 || a.pos[0].kind == KindNone {
			return like(v, strip(v.str(), left, right))
		}
		if a.pos[0].kind != KindString {
			raisef("TypeError", "%s arg must be None or str", name)
		}
		return like(v, m.trimChars(v.str(), a.pos[0].str(), left, right))
	}
}

func caser(name string, f func(string) string) filterFunc {
	return func(m *machine, v Value, a *arguments) Value {
		a.positional(name, 0, 0)
		m.work(4 * len(v.str()))
		m.chargeCase(v.str())
		return like(v, f(v.str()))
	}
}

func strTitle(m *machine, v Value, a *arguments) Value {
	if !isASCII(v.str()) {
		unsupportedf("method %q of text beyond ASCII", "title")
	}
	return caser("title", titleASCII)(m, v, a)
}

func affix(name string, has func(s, affix string) bool) filterFunc {
	return func(m *machine, v Value, a *arguments) Value {
		a.withoutBounds(name)
		options := a.pos
		if a.pos[0].kind == KindTuple {
			options = a.pos[0].seq()
		}
		for _, o := range options {
			m.operands(o, &noArguments)
			if o.kind != KindString {
				raisef("TypeError", "%s first arg must be str or a tuple of str, not %s", name, typeName(a.pos[0]))
			}
			if has(v.str(), o.str()) {
				return Bool(true)
			}
		}
		return Bool(false)
	}
}

// withoutBounds requires exactly one argument. Start and end positions, which Python also accepts, are Unsupported.
func (a *arguments) withoutBounds(name string) {
	if len(a.pos) == 2 || len(a.pos) == 3 {
		unsupportedf("method %q with bounds", name)
	}
	a.positional(name, 1, 1)
}

func remover(name string, trim func(s, affix string) string) filterFunc {
	return func(_ *machine, v Value, a *arguments) Value {
		a.positional(name, 1, 1)
		return like(v, trim(v.str(), needText(name, a.pos[0])))
	}
}

func (m *machine) texts(v Value, parts []string) Value {
	m.charge((len(parts) + 1) * valueSize)
	out := make([]Value, len(parts))
	for i, p := range parts {
		out[i] = like(v, p)
	}
	return List(out)
}

func strSplit(m *machine, v Value, a *arguments) Value {
	p := a.bind("split", 0, "sep", "maxsplit")
	limit := int64(-1)
	if given(p[1]) {
		limit = index(p[1])
	}
	s := v.str()
	if given(p[0]) && p[0].kind != KindNone {
		sep := needText("split", p[0])
		if sep == "" {
			raisef("ValueError", "empty separator")
		}
		if limit < 0 || limit > int64(len(s)) {
			limit = int64(len(s)) + 1
		}
		m.chargeRepeat(min(int64(strings.Count(s, sep)), limit)+1, 16)
		return m.texts(v, strings.SplitN(s, sep, int(limit)+1))
	}
	var parts []string
	for s = strip(s, true, false); s != ""; s = strip(s, true, false) {
		m.charge(2 * valueSize)
		if limit == 0 {
			parts = append(parts, s)
			break
		}
		limit--
		end := strings.IndexFunc(s, isSpace)
		if end < 0 {
			end = len(s)
		}
		parts = append(parts, s[:end])
		s = s[end:]
	}
	return m.texts(v, parts)
}

func strSplitlines(m *machine, v Value, a *arguments) Value {
	p := a.bind("splitlines", 0, "keepends")
	m.chargeLines(v.str(), 2*valueSize)
	return m.texts(v, splitLines(v.str(), isTrue(p[0])))
}

func strReplace(m *machine, v Value, a *arguments) Value {
	a.positional("replace", 2, 3)
	count := int64(-1)
	if len(a.pos) > 2 {
		count = index(a.pos[2])
	}
	with := needText("replace", a.pos[1])
	plainOnly(v, a.pos[1])
	return like(v, m.replace(v.str(), needText("replace", a.pos[0]), with, count))
}

func strJoin(m *machine, v Value, a *arguments) Value {
	a.positional("join", 1, 1)
	if !canIterate(a.pos[0]) {
		raisef("TypeError", "can only join an iterable")
	}
	items := m.items(a.pos[0])
	m.charge(len(items) * valueSize)
	parts := make([]string, len(items))
	n := 0
	for i, item := range items {
		if item.kind != KindString {
			raisef("TypeError", "sequence item %d: expected str instance, %s found", i, typeName(item))
		}
		if v.safe {
			plainOnly(v, item)
		}
		parts[i] = item.str()
		n += len(parts[i])
	}
	m.charge(n)
	m.chargeRepeat(int64(len(items)), len(v.str()))
	return like(v, strings.Join(parts, v.str()))
}

func dictGet(m *machine, v Value, a *arguments) Value {
	a.positional("get", 1, 2)
	if i := m.find(v.dict(), a.pos[0]); i >= 0 {
		return v.dict().entries[i].value
	}
	if len(a.pos) > 1 {
		return a.pos[1]
	}
	return None()
}

func viewMethod(name string, of viewOf) filterFunc {
	return func(_ *machine, v Value, a *arguments) Value {
		a.positional(name, 0, 0)
		return Value{kind: kindView, p: unsafe.Pointer(&dictView{v.dict(), of})}
	}
}
