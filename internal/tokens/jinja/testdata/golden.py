#!/usr/bin/env python3
"""Writes what Python Jinja2 3.1.6 makes of templates, as transformers sets it up.

  golden.py goldens OUT.json.gz          real templates, features.txt and random templates
  golden.py fuzz OUT.json.gz COUNT SEED  random small templates

Needs: pip install jinja2==3.1.6. The Go tests read the files that it writes.
"""
import copy, datetime, gzip, json, os, random, sys, warnings
import jinja2, jinja2.ext, jinja2.nodes, jinja2.sandbox, jinja2.meta

class Generation(jinja2.ext.Extension):
    tags = {"generation"}
    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)
    def _body(self, caller):
        return caller()

def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)

def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

def strftime_now(format):
    return datetime.datetime(2026, 11, 20, 20, 0, 0).strftime(format)

env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
plain_globals = set(env.globals)
env.filters["tojson"] = tojson
env.globals["raise_exception"] = raise_exception
env.globals["strftime_now"] = strftime_now

def run(source, variables):
    """The text, or the error as "Class: message"."""
    try:
        # a copy: indent() of a list changes it in place before it fails
        return env.from_string(source).render(**copy.deepcopy(variables)), None
    except RecursionError:
        return None, "RecursionError: maximum recursion depth exceeded"
    except Exception as e:
        return None, f"{type(e).__name__}: {e}"

def undeclared(source):
    try:
        names = jinja2.meta.find_undeclared_variables(env.parse(source))
        return sorted(names | ({"raise_exception", "strftime_now"} & {n.name for n in env.parse(source).find_all(jinja2.nodes.Name)}))
    except Exception:
        return None

user = lambda t: {"role": "user", "content": t}
answer = lambda t, **kw: {"role": "assistant", "content": t, **kw}
system = lambda t: {"role": "system", "content": t}
call = lambda args: {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": args}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds <two> & 'more' \"numbers\": ünï 数", "parameters": {
    "type": "object", "properties": {"a": {"type": "number", "default": 1.0}, "b": {"type": ["integer", "null"], "maximum": 1e16, "enum": [1, 2]},
    "items": {"type": "array", "items": {"type": "string"}}}, "required": ["a"]}}}]
BASE = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
CONTEXTS = {
    "one": {"messages": [user("Hello & <b>'hi'</b>\n")]},
    "turns": {"messages": [system("Be kind."), user("1+1?"), answer("  2 \n"), user("你好 🎉")]},
    "no_prompt": {"messages": [user("a"), answer("b")], "add_generation_prompt": False},
    "think": {"messages": [user("a"), answer("<think>\nx\n</think>\n\nb"), user("c")], "enable_thinking": False, "thinking": True},
    "reasoning": {"messages": [user("a"), answer("b", reasoning_content="\nbecause\n"), user("c")], "thinking_budget": 512},
    "tools": {"messages": [system("s"), user("a")], "tools": TOOLS},
    "tools_alone": {"messages": [user("a")], "tools": TOOLS},
    "call_dict": {"messages": [user("a"), answer("", tool_calls=[call({"a": 1, "b": None, "t": True, "s": "é<"})]),
                               {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": "3"}, user("d")], "tools": TOOLS},
    "call_text": {"messages": [user("a"), answer(None, tool_calls=[call('{"a": 1}')]),
                               {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": '{"x": 3}'}], "tools": TOOLS},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}]},
    "documents": {"messages": [user("a")], "documents": [{"title": "t", "text": "body", "doc_id": 1}]},
    "empty": {"messages": []},
    "none": {},
}
VARS = {"s": "Hello, Wörld", "e": "", "n": 7, "neg": -3, "f": 2.5, "big": 10**30, "t": True, "no": None, "l": [3, 1, 2], "ls": ["b", "A", "c"],
        "d": {"b": 1, "a": [1, {"x": None}], "items": "it", "c d": "q'\"\\\n"}, "ld": [{"k": "x", "v": 2}, {"k": "Y", "v": 1}, {"k": "x", "v": 3}],
        "html": "<a href='x'>&</a>", "ws": " \t a  b\nc ", "empty_l": [], "empty_d": {}, "nested": [[1, 2], [3, [4, 5]]], "uni": "ßΣς ǆ İ ﬁ é \u00a0\u2028x", "messages": []}

FEATURES = open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "features.txt"), encoding="utf-8").read().split("\n=====\n")

ATOMS = ["s", "e", "n", "neg", "f", "big", "t", "no", "l", "ls", "d", "ld", "html", "ws", "empty_l", "empty_d", "nested", "uni", "missing", "1", "0", "-1", "2",
         "3.0", "1e20", "0.1", "'x'", "'a b'", "''", "'%s-%d'", "[1, 'a', none]", "(1, 2)", "{'k': 1, 2: 'z'}", "true", "none", "range(4)", "d.items()", "d.keys()", "ls|map('lower')",
         "'ab,c,,d'", "' x '", "'{} {0}'", "'{:>5}|'", "l|list", "d.a", "d['b']", "ld[0]", "ld[0].k", "()", "(1,)", "dict(a=1)", "namespace(x=1)", "s|safe", "'1_0'", "'0x1f'", "' 12 '", "'1e3'", "True", "'ABC'"]
FILTERS = ["capitalize", "count", "d('D')", "d('D', true)", "default('x')", "dictsort", "first", "indent", "indent(2, true)", "indent(width=3, first=true, blank=true)", "indent('> ')", "int", "int(9)", "join", "join(', ')", "join('-', attribute='k')", "last", "length", "list", "lower", "items|list", "map('upper')|list", "map(attribute='k')|list", "map(attribute='zz', default='q')|join", "map('int')|list", "map('string')|join('|')", "max", "min", "max(attribute='v')", "min(attribute='v')", "reject('none')|list", "reject|list", "select|list", "select('string')|list", "select('gt', 1)|list", "select('in', [1, 2])|list", "rejectattr('k', 'equalto', 'x')|list", "selectattr('k')|list", "selectattr('v', 'ge', 2)|list", "replace('a', 'Z')", "replace('l', 'L', 1)", "reverse", "reverse|list", "safe", "sort", "sort(reverse=true)", "sort(attribute='k')", "sort(case_sensitive=true)", "string", "title", "trim", "trim('Hd')", "unique|list", "unique(attribute='k')|list", "upper", "tojson", "tojson(indent=2)", "tojson(sort_keys=true)", "tojson(ensure_ascii=true)", "tojson(separators=(',', ':'))", "tojson(indent='\\t')", "tojson(indent=0)", "nosuch"]
TESTS = ["defined", "undefined", "none", "boolean", "true", "false", "integer", "float", "number", "string", "mapping", "sequence", "iterable", "callable", "odd", "even", "eq 1", "ne('x')", "gt 2", "le 2", "in [1, 's']", "nosuch"]
METHODS = ["upper()", "lower()", "title()", "capitalize()", "strip()", "strip('Hx ')", "lstrip()", "rstrip('d')", "split()", "split(',')", "split('l', 1)", "split(none, 1)", "split(maxsplit=1)", "splitlines()", "splitlines(true)", "startswith('H')", "startswith(('x', 'H'))", "endswith('d')", "endswith('')", "replace('l', 'L')", "replace('', '-')", "replace('l', 'L', 1)", "join(['a', 'b'])", "join(l)", "join('xyz')", "removeprefix('He')", "removesuffix('d')", "items()", "keys()", "values()", "items()|list", "values()|list", "get('b')", "get('zz', 5)", "get(1)", "pop('b')", "update({})", "append(1)", "b", "a", "items", "keys", "_private", "zz", "zz.y", "k", "0", "strip", "nosuch()"]
OPS = ["+", "-", "*", "/", "//", "%", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or"]
SLICES = ["0", "-1", "1:", ":2", "::-1", "1:-1", "::2", "-2:", "'b'", "'a'", "none", "n", "5", "t", "1.0", "::0", "'x':", "(1, 2)", "'items'", "l", "'upper'"]

def expr(r, depth):
    if depth <= 0 or r.random() < 0.12:
        return r.choice(ATOMS)
    k = r.randrange(10)
    sub = lambda: expr(r, depth - 1)
    if k < 3: return f"({sub()})|{r.choice(FILTERS)}"
    if k == 3: return f"({sub()}) is {r.choice(['', 'not '])}{r.choice(TESTS)}"
    if k == 4: return f"({sub()}).{r.choice(METHODS)}"
    if k < 7: return f"({sub()}) {r.choice(OPS)} ({sub()})"
    if k == 7: return f"({sub()})[{r.choice(SLICES)}]"
    if k == 8: return f"({sub()} if {sub()}" + (f" else {sub()})" if r.random() < .8 else ")")
    return r.choice([f"[{sub()}, {sub()}]", f"{{'q': {sub()}}}", f"({sub()},)", f"not {sub()}", f"-({sub()})", f"({sub()}, {sub()})"])

def text(r):
    return r.choice(["", " ", "\n", "x", " y\n", "\n  ", "\t", "{", "}", "a b\n\n", "{# c #}", "{#- c -#}\n", "  {#+ c #}", "{% raw %}{{ r }}{% endraw %}\n", "  {%- raw -%} q {%- endraw +%}"])

def tag(r, body):
    return "{%" + r.choice(["", "-", "+", ""]) + " " + body + " " + r.choice(["", "-", "+", ""]) + "%}"

def target(r):
    return r.choice(["x", "y", "s", "n", "ns.x", "x, y", "l", "z"])

def stmts(r, depth, loop=False):
    return "".join(stmt(r, depth, loop) for _ in range(r.randrange(1, 4)))

def stmt(r, depth, loop):
    e = lambda: expr(r, r.choice([0, 0, 1, 1, 2]))
    v = lambda: r.choice(["x", "y", "s", "n", "z", "ns.x", "x", "loop.index" if loop else "x", "m(x)", "loop.last", "m(1, y=n)", "caller()"])
    k = r.randrange(12) if depth > 0 else r.randrange(5)
    inner = lambda lp=loop: text(r) + stmts(r, depth - 1, lp) + text(r)
    if k == 0: return text(r)
    if k == 1: return r.choice(["{{ ", "{{- "]) + e() + r.choice([" }}", " -}}"])
    if k == 2: return "{{ " + v() + " }}"
    if k == 3: return tag(r, f"set {target(r)} = {e()}")
    if k == 4: return r.choice([tag(r, r.choice(["break", "continue"])) if loop and r.random() < .3 else "", "{{ " + v() + " }}"])
    if k == 5:
        return tag(r, f"if {e()}") + inner() + (tag(r, f"elif {v()}") + inner() if r.random() < .3 else "") + (tag(r, "else") + inner() if r.random() < .5 else "") + tag(r, "endif")
    if k in (6, 7):
        t = r.choice(["x", "y", "x, y", "s"])
        it = r.choice([e(), "l", "ls", "d.items()", "nested", "range(3)", "ld", "ls|select", "s"])
        return tag(r, f"for {t} in {it}" + (f" if {v()}" if r.random() < .3 else "")) + inner(True) + (tag(r, "else") + inner() if r.random() < .3 else "") + tag(r, "endfor")
    if k == 8:
        name = r.choice(["m", "m2"])
        return tag(r, f"macro {name}({r.choice(['', 'x', 'x, y=2', 'x=1, y=n', 'y, s=x'])})") + inner(False) + tag(r, "endmacro")
    if k == 9: return tag(r, f"set {r.choice(['x', 'y', 'z'])}{r.choice(['', '|upper', '|trim|length'])}") + inner() + tag(r, "endset")
    if k == 10: return tag(r, f"filter {r.choice(['upper', 'trim', 'indent(2)', 'replace(1, s)'])}") + inner() + tag(r, "endfilter")
    return tag(r, f"call{r.choice(['', '(x)', '(x, q=1)'])} m({r.choice(['', '1', 'x', 'y=2'])})") + inner(False) + tag(r, "endcall")

def fuzz(count, seed):
    r = random.Random(seed)
    for i in range(count):
        if i % 2:
            yield "{{ " + expr(r, r.choice([1, 2, 2, 3])) + " }}"
        else:
            yield r.choice(["", "{% set ns = namespace(x=0) %}", "{% macro m(x, y=2) %}{{ x }}/{{ y }}{{ caller is defined }}{% endmacro %}"]) + "".join(stmt(r, 3, False) for _ in range(r.randrange(1, 6)))

def stable(source, out, err):
    """False for what no second run could repeat (addresses, hash order) and for
    what Package jinja's doc names as other: constants that Jinja2 folds by
    other rules when it compiles, sets."""
    nodes = jinja2.nodes
    branching = (nodes.CondExpr, nodes.And, nodes.Or)
    try:
        tree = env.parse(source)
        if any(item.find(nodes.Call) for item in tree.find_all(nodes.Sub)):
            return False
        for item in tree.find_all((nodes.And, nodes.Or)):
            if any(f.name == "nosuch" for f in item.find_all((nodes.Filter, nodes.Test))):
                return False
        for item in tree.find_all(nodes.Getitem):
            if isinstance(item.arg, nodes.Slice) and not isinstance(item.node, nodes.Name) and (
                    item.node.find(nodes.Name) is None or isinstance(item.node, branching) or item.node.find(branching)):
                return False
    except jinja2.TemplateError:
        pass
    return " at 0x" not in (out or "") + (err or "")

def write(path, doc):
    with gzip.GzipFile(path, "wb", mtime=0) as f:
        f.write(json.dumps(doc, ensure_ascii=False).encode())

def main():
    warnings.simplefilter("ignore")
    if sys.argv[1] == "goldens":
        here = os.path.dirname(os.path.abspath(__file__))
        real = []
        for name in sorted(os.listdir(os.path.join(here, "templates"))):
            if not name.endswith(".jinja"): continue
            source = open(os.path.join(here, "templates", name), encoding="utf-8").read()
            for ctx, variables in CONTEXTS.items():
                out, err = run(source, {**BASE, **variables})
                real.append({"template": name, "ctx": ctx, "out": out, "err": err, "undeclared": undeclared(source)})
        cases = []
        for source in FEATURES:
            out, err = run(source, VARS)
            assert " at 0x" not in (out or "") + (err or ""), source
            cases.append({"source": source, "out": out, "err": err, "undeclared": undeclared(source)})
        for source in fuzz(3000, 7):
            out, err = run(source, VARS)
            if stable(source, out, err) and len(out or "") < 5000 and " object at " not in source and "map(" not in source:
                cases.append({"source": source, "out": out, "err": err, "undeclared": undeclared(source)})
        write(sys.argv[2], {"base": BASE, "contexts": CONTEXTS, "real": real, "vars": VARS, "cases": cases, "written": len(FEATURES)})
        print(len(real), "real,", len(cases), "features,", sum(c["err"] is None for c in real + cases), "render")
        return
    cases = []
    for source in fuzz(int(sys.argv[3]), int(sys.argv[4])):
        out, err = run(source, VARS)
        if stable(source, out, err) and len(out or "") < 100000:
            cases.append({"source": source, "out": out, "err": err, "undeclared": undeclared(source)})
    write(sys.argv[2], {"vars": VARS, "cases": cases, "written": 0})
    print(len(cases), "cases,", sum(c["err"] is None for c in cases), "render")

if __name__ == "__main__":
    main()
