"""Print what an engine's request models accept: schemas.py ENGINE > FILE

Run by the engine's own Python. What pydantic knows of each model (its core schema: types, bounds, names, what is required,
which functions check it further) is written as JSON with short keys, equal parts once:
{"engine": version, "apis": {API: node}, "parts": [node, ...]}. A node is an object with "t", or the number of a part.
"""
import collections
import enum
import json
import sys

engine = sys.argv[1]


def apis():
    if engine == "vllm":
        from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
        from vllm.entrypoints.pooling.embed.protocol import EmbeddingChatRequest, EmbeddingCompletionRequest
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
        from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest
        from vllm import __version__
        return __version__, {
            "chat": [ChatCompletionRequest], "completions": [CompletionRequest], "responses": [ResponsesRequest],
            "messages": [AnthropicMessagesRequest], "count_tokens": [AnthropicCountTokensRequest], "vllm_generate": [GenerateRequest],
            "embeddings": [EmbeddingCompletionRequest, EmbeddingChatRequest], "tokenize": [TokenizeCompletionRequest, TokenizeChatRequest]}
    from sglang.srt.entrypoints.anthropic import protocol as anthropic
    from sglang.srt.entrypoints.openai import protocol as openai
    from sglang.version import __version__
    return __version__, {
        "chat": [openai.ChatCompletionRequest], "completions": [openai.CompletionRequest], "responses": [openai.ResponsesRequest],
        "embeddings": [openai.EmbeddingRequest], "tokenize": [openai.TokenizeRequest], "messages": [anthropic.AnthropicMessagesRequest],
        "count_tokens": [anthropic.AnthropicCountTokensRequest]}


class Compactor:
    def __init__(self):
        self.named = {}  # definitions by pydantic's names
        self.refs = {}  # number of the part of a definition
        self.parts = []
        self.keys = {}

    def share(self, node):
        """The number of a part equal to node, or node itself if it is small."""
        key = json.dumps(node, sort_keys=False)
        if len(key) < 60:
            return node
        if key not in self.keys:
            self.keys[key] = len(self.parts)
            self.parts.append(node)
        return self.keys[key]

    def ref(self, name):
        if name not in self.refs:
            self.refs[name] = len(self.parts)
            self.parts.append(None)
            self.parts[self.refs[name]] = self.node(self.named[name], inline=True)
        return self.refs[name]

    def node(self, s, inline=False):
        n = self.plain(s)
        return n if inline else (n if isinstance(n, int) else self.share(n))

    def fields(self, fields):
        out = {}
        for name, f in fields.items():
            key = f.get("validation_alias") or name
            if not isinstance(key, str):
                raise TypeError(f"alias {key!r}")
            schema = f["schema"]
            required = f.get("required", schema["type"] not in ("default",))
            out[key] = [self.node(schema), int(bool(required))]
        return out

    def plain(self, s):
        t = s["type"]
        if t == "definitions":
            for d in s["definitions"]:
                self.named[d["ref"]] = {k: v for k, v in d.items() if k != "ref"}
            return self.plain(s["schema"])
        if t == "definition-ref":
            return self.ref(s["schema_ref"])
        if t in ("default", "nullable") or t.startswith("function-"):
            if t == "default":
                return self.plain(s["schema"])
            if t == "nullable":
                return {"t": "null", "of": self.node(s["schema"])}
            name = s["function"]["function"]
            name = getattr(name, "__name__", type(name).__name__)
            if t == "function-plain":
                return {"t": "function", "name": name}
            inner = self.plain(s["schema"])
            if name in ("__log_extra_fields__",):
                return inner
            return {"t": t.removeprefix("function-"), "name": name, "of": inner if isinstance(inner, int) else self.share(inner)}
        if t in ("any", "none", "bool", "bytes", "date", "datetime"):
            return {"t": t}
        if t in ("int", "float", "str"):
            out = {"t": t}
            for k in ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern", "multiple_of", "strict"):
                if s.get(k) is not None:
                    out[k] = str(s[k]) if t == "int" and k in ("ge", "gt", "le", "lt") else s[k]
            return out
        if t == "literal":
            return {"t": "literal", "of": list(s["expected"])}
        if t == "enum":
            return {"t": "literal", "of": [m.value if isinstance(m, enum.Enum) else m for m in s["members"]]}
        if t in ("list", "set", "tuple", "generator"):
            out = {"t": t, "of": self.node(s.get("items_schema", {"type": "any"}))} if t != "tuple" else {
                "t": "tuple", "of": [self.node(x) for x in s["items_schema"]], "variadic": s.get("variadic_item_index")}
            for k in ("min_length", "max_length"):
                if s.get(k) is not None:
                    out[k] = s[k]
            return out
        if t == "dict":
            return {"t": "dict", "keys": self.node(s.get("keys_schema", {"type": "any"})), "of": self.node(s.get("values_schema", {"type": "any"})),
                    **{k: s[k] for k in ("min_length", "max_length") if s.get(k) is not None}}
        if t == "union":
            return {"t": "union", "of": [self.node(c[0] if isinstance(c, tuple) else c) for c in s["choices"]]}
        if t == "tagged-union":
            return {"t": "tagged", "by": s["discriminator"] if isinstance(s["discriminator"], str) else s["discriminator"].__name__,
                    "of": {str(k): self.node(v) for k, v in s["choices"].items()}}
        if t == "chain":
            return {"t": "all", "of": [self.node(x) for x in s["steps"]]}
        if t == "json-or-python":
            return self.plain(s["python_schema"])
        if t == "lax-or-strict":
            return self.plain(s["lax_schema"])
        if t == "is-instance":
            return {"t": "instance", "of": s.get("cls_repr") or s["cls"].__name__}
        if t == "model":
            inner = self.plain(s["schema"])
            if isinstance(inner, dict) and inner.get("t") == "model":
                inner["name"] = s["cls"].__name__
                if s.get("config", {}).get("extra_fields_behavior") == "forbid":
                    inner["forbid"] = 1
            return inner
        if t in ("model-fields", "typed-dict"):
            total = s.get("total", True)
            fields = s["fields"]
            if t == "typed-dict":
                fields = {k: {**f, "required": f.get("required", total)} for k, f in fields.items()}
            out = {"t": "model", "of": self.fields(fields)}
            behaviour = s.get("extra_behavior") or s.get("config", {}).get("extra_fields_behavior")
            if behaviour == "forbid":
                out["forbid"] = 1
            if t == "typed-dict" and s.get("cls"):
                out["name"] = s["cls"].__name__
            return out
        if t == "dataclass":
            return self.plain(s["schema"])
        if t == "dataclass-args":
            fields = {f["name"]: f for f in s["fields"] if f.get("init", True)}
            return {"t": "model", "of": self.fields(fields), "name": s["dataclass_name"], **({"forbid": 1} if s.get("extra_behavior") == "forbid" else {})}
        raise TypeError(t)


version, models = apis()
c = Compactor()
out = {"engine": f"{engine} {version}", "apis": {}}
for api, classes in models.items():
    nodes = []
    for cls in classes:
        c.refs = {}
        nodes.append(c.node(cls.__pydantic_core_schema__))
    out["apis"][api] = nodes[0] if len(nodes) == 1 else {"t": "union", "of": nodes}
lines = ",\n".join(json.dumps(p, separators=(",", ":")) for p in c.parts)
names = collections.Counter(p["name"] for p in c.parts if p["t"] in ("before", "after", "wrap", "function"))
print(f'{{"engine":{json.dumps(out["engine"])},\n"apis":{json.dumps(out["apis"])},\n"parts":[\n{lines}\n]}}')
print("functions:", dict(names), "instances:", {p["of"] for p in c.parts if p["t"] == "instance"}, file=sys.stderr)
