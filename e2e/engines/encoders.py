"""Record what an engine makes of generated bodies: of chats for a model whose prompts vLLM encodes in code, or of any API of SGLang.

encoders.py KIND URL SEED COUNT OUT: posts COUNT bodies to URL/v1/chat/completions/render (harmony_responses: /v1/responses/render) of a vLLM that serves "tiny", and
writes a line each to OUT (gzipped): the body, and the ids or the status; sound: the body is what clients write. KIND selects special tokens that clients write:
harmony, deepseek; sglang: before it posts them to SGLang's chats. Two thirds are conversations with tools, results and thoughts, the rest is what bodies.py calls
valid, nearly valid or hostile, without sampling parameters. sglang_API, vllm_API: bodies.py's for an API, posted to where sglang_ids.py
serves it, or to vLLM's endpoint that shows the ids. encoders.py golden IN COUNT OUT: the first COUNT lines with a
hash in place of the ids. Run by any Python 3; encoders.sh starts the engine.
"""
import gzip
import hashlib
import json
import re
import sys
import urllib.error
import urllib.request

import bodies

SPECIAL = {
    "harmony": ["<|end|>", "<|start|>assistant", "<|channel|>analysis<|message|>", "<|call|>", "<|constrain|>json", "functions.", " to="],
    "mistral": ["[INST]", "[/INST]", "</s>", "<s>", "[TOOL_CALLS]", "[THINK]", "[/THINK]", "[TOOL_RESULTS]", " ", "  ", "\n\n", "▁", "☺"],
    "inkling": ["<|message_user|>", "<|end_message|>", "<|content_text|>", "<|content_", "tool_declare"],
    "deepseek": ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>", "｜DSML｜", "{content}", "<｜deepseek_image｜>"],
}


class Maker(bodies.Maker):
    def __init__(self, seed, kind):
        super().__init__(seed)
        self.sglang, kind = kind.startswith("sglang:"), kind.removeprefix("sglang:")
        kind, _, version = kind.removesuffix("_responses").partition(":")
        self.version = int(version or 0)  # of Mistral's tokenizer
        self.kind = kind
        self.strict = kind == "mistral"  # it refuses most names and ids
        self.checked = self.strict or self.sglang  # schemas and parts are
        self.pieces = bodies.PIECES + SPECIAL[kind] + ["word "] * 20 + ["naïve ", "der Straße", "a_b", "x1y2", "\r\n", "…", "👩‍🚀"]

    def text(self):
        if self.one(40):
            return ""
        return "".join(self.pick(self.pieces) for _ in range(1 + self.r.randrange(30 if self.one(6) else 8)))

    def value(self, depth=0):
        if depth < 3 and self.one(4):
            return self.pick([lambda: [self.value(depth + 1) for _ in range(self.r.randrange(3))], lambda: {self.pick("abc"): self.value(depth + 1) for _ in range(self.r.randrange(3))}])()
        return self.pick([self.text(), 0, 1, -5, 1.0, 1.5, 1e15, 1e16, 1e-5, 1.25e-6, 10**17, 10**19, 2**64, 10**30, -(2**63) - 1, True, False, None, "x\"y\\z", "\u0001\u007f", "é"])

    def schema(self, depth=0):
        odd = not self.checked or self.one(40)  # Mistral's code, and SGLang, refuse what is no JSON schema
        kind = self.r.randrange(12)
        s = {}
        if kind < 5 or depth == 0:
            s["type"] = "object"
            if not self.one(8):
                s["properties"] = {self.pick(["city", "n", "unit", "a b", "é", "x-y"]) + str(i): self.schema(depth + 1) if depth < 3 else {"type": "string"} for i in range(self.r.randrange(4))}
                s["required"] = self.pick([list(s["properties"])[:1], list(s["properties"]), []] + ([[1], "city0"] if odd else []))
        elif kind < 8:
            s["type"] = self.pick(["string", "integer", "number", "boolean", "null", ["string", "null"]] + (["date", ["integer", 5], [], 5] if odd else []))
        elif kind == 8:
            s["type"] = "array"
            if not self.one(3):
                s["items"] = self.schema(depth + 1) if depth < 3 else self.pick([{}, True])
        elif kind == 9:
            s["oneOf"] = [self.schema(depth + 2) for _ in range(self.r.randrange(0 if odd else 1, 3))] if not odd or not self.one(5) else self.junk()
        elif kind == 10:
            s = {"type": "string", "enum": self.pick([["a", "b"], [], ["a", 1, None]] + (["x"] if odd else []))}
        else:
            s["anyOf"] = [{"type": "string"}, {"type": "null"}]
        for key in ["title", "description", "default", "nullable", "examples"]:
            if self.one(4):
                s[key] = {"title": self.text, "description": self.text, "default": self.value, "nullable": lambda: self.pick([True, True, False, 1]),
                          "examples": lambda: self.pick([["a", 'b"c'], [], [1, "z"]] + (["x"] if odd else []))}[key]()
        if "oneOf" in s and s["oneOf"] and isinstance(s["oneOf"], list) and "description" in s and self.one(2):
            first = s["oneOf"][0]
            if isinstance(first, dict):
                first["description"] = s["description"]
        return s

    def tool(self, n):
        f = {"name": self.pick(["tool_", "get-"] if self.strict and not self.one(30) else ["tool_", "get-", "ns.f", "é"]) + str(n), "description": self.text() + self.pick(["", "\n", "\r\nline", "\n\nmore"])}
        if not self.one(8):
            f["parameters"] = self.schema()
        if self.one(8):
            del f["description"]
        if self.one(8):
            f[self.pick(["strict", "x"])] = self.pick([True, False, None])
        return {"type": "function", "function": f}

    def turns(self):
        """A conversation as clients hold it."""
        out = []
        if self.one(2):
            out.append({"role": self.pick(["system", "system", "developer"]), "content": self.said()})
        calls = 0
        for _ in range(1 + self.r.randrange(4)):
            out.append({"role": "user", "content": self.said()})
            if self.strict and self.one(8):
                out.append({"role": "user", "content": self.said()})
            if self.one(12):
                out.append({"role": self.pick(["user", "system", "developer"]), "content": self.said()})
            for _ in range(self.r.randrange(3) if self.one(2) else 0):
                made = [{"id": f"call_{calls + i:0{9 if self.strict and not self.one(30) else 1}}", "type": "function", "function": {"name": self.pick(["tool_0", "get-1", "f"]), "arguments": self.pick(
                    [json.dumps({self.pick(["city", "q", "é"]): self.value() for _ in range(self.r.randrange(3))}, ensure_ascii=self.one(2)), "{}"] + (["", "{", "[]"] if not self.sglang or self.one(30) else []) + ['{"a": 1.50, "a": "é\\ud83d\\ude00"}'])}} for i in range(1 + self.r.randrange(3))]
                calls += len(made)
                out.append({"role": "assistant", "content": self.pick([None, ""] if self.strict and self.version < 7 and not self.one(20) else [None, "", self.text(), self.said()]), "tool_calls": made})
                if self.one(30 if self.strict and self.version < 11 else 3):
                    out[-1]["reasoning" if self.one(2) else "reasoning_content"] = self.text()
                results = [{"role": "tool", "tool_call_id": c["id"], "content": json.dumps(self.value()) if self.one(3) else self.said()} for c in made]
                if self.one(6):
                    results.reverse()
                if self.one(10):
                    results.pop()
                out += results
            if not self.one(5):
                out.append({"role": "assistant", "content": self.said()})
                if self.one(20 if self.strict and self.version < 11 else 2):
                    out[-1]["reasoning" if self.one(2) else "reasoning_content"] = self.text()
        if not self.one(30 if self.strict else 3) and out[-1]["role"] == "assistant" and "tool_calls" not in out[-1]:
            out.pop()
        return out

    def said(self):
        if not self.one(5):
            return self.text()
        if self.checked and not self.one(20):
            return [{"type": "text", "text": self.text()} for _ in range(self.r.randrange(4))]
        return [self.pick([{"type": "text", "text": self.text()}] * 9 + [{"type": "thinking", "thinking": self.text()}, {"type": "refusal", "refusal": "no"}]) for _ in range(self.r.randrange(4))]

    def conversation(self):
        if self.one(12 if self.strict else 3):
            body = {"model": "tiny", "messages": self.messages()}
        else:
            body = {"model": "tiny", "messages": self.turns()}
        if self.one(2):
            body["tools"] = [self.tool(n) for n in range(1 + self.r.randrange(3))]
            if self.one(4):
                body["tool_choice"] = self.pick(["auto", "none", "required"])
        if self.one(4):
            body["reasoning_effort"] = self.pick(["low", "medium", "high", "none", "minimal", "xhigh", "max", None, "x"])
        if self.strict and body["messages"] and isinstance(body["messages"], list) and isinstance(body["messages"][-1], dict) and body["messages"][-1].get("role") == "assistant" and not self.one(4):
            body.update({"continue_final_message": True, "add_generation_prompt": False})
        if self.one(40 if self.strict else 4):
            body["chat_template_kwargs"] = {self.pick(["thinking", "enable_thinking", "reasoning_effort", "drop_thinking", "documents", "x"]): self.pick([True, False, None, "auto", "low", "max", "none", "x", 1, 0, 50, 0.5, 0.125, -0.0])
                                            for _ in range(1 + self.r.randrange(2))}
        if self.one(20):
            body.update(self.pick([{"continue_final_message": True, "add_generation_prompt": False}, {"add_generation_prompt": False}, {"add_special_tokens": True}, {"documents": [{"text": "d"}]}]))
        return body


    # Responses.

    def input_text(self, role):
        if self.one(2):
            return self.text()
        kind = "output_text" if role == "assistant" else "input_text"
        parts = [{"type": kind, "text": self.text()} for _ in range(self.r.randrange(3))]
        if role == "assistant" and self.one(3):
            parts.append(self.pick([{"type": "refusal", "refusal": "no"}, {"type": kind, "text": self.text(), "annotations": [], "logprobs": None}]))
        return parts

    def said_item(self, role):
        item = {"role": role, "content": self.input_text(role)}
        if isinstance(item["content"], list) and role == "assistant" or self.one(2):
            item["type"] = "message"
        if self.one(5):
            item.update(self.pick([{"id": "msg_1"}, {"status": "completed"}, {"status": "in_progress", "id": "m"}, {"phase": "commentary"}]))
        return item

    def items(self):
        out = []
        if self.one(2):
            out.append(self.said_item(self.pick(["system", "developer"])))
        calls = 0
        for _ in range(1 + self.r.randrange(4)):
            out.append(self.said_item("user"))
            if self.one(8):
                out.append(self.said_item(self.pick(["user", "system", "developer", "assistant"])))
            for _ in range(self.r.randrange(3)):
                if self.one(2):
                    out.append({"type": "reasoning", "summary": self.pick([[], [{"type": "summary_text", "text": self.text()}]]),
                                **self.pick([{}, {"content": None}, {"content": [{"type": "reasoning_text", "text": self.text()} for _ in range(self.r.randrange(3))]}, {"content": [{"type": "reasoning_text", "text": self.text()}], "status": None, "encrypted_content": "x", "id": "rs_1"}])})
                made = [{"type": "function_call", "call_id": f"call_{calls + i}" if not self.one(10) else "call_0", "name": self.pick(["tool_0", "get-1", "f"]), "arguments": self.pick(['{"a": "é"}', "{}", "", "{", self.text()])} for i in range(1 + self.r.randrange(2))]
                calls += len(made)
                for call in made:
                    if self.one(3):
                        call.update(self.pick([{"id": "fc_1", "status": "completed"}, {"id": None}, {"status": None}, {"namespace": "n"}]))
                results = [{"type": "function_call_output", "call_id": c["call_id"], "output": self.text(), **self.pick([{}, {}, {"id": "o"}, {"status": "completed"}, {"id": "o", "status": "completed"}])} for c in made]
                if self.one(10):
                    results.pop()
                if self.one(40):
                    results.append({"type": "function_call_output", "call_id": "x", "output": ""})
                out += made + results
            if not self.one(4):
                out.append(self.said_item("assistant"))
        return out

    def sampling(self):
        return {}

    def response(self):
        """A response's body, and whether it is what clients write."""
        if self.one(4):
            return {k: v for k, v in self.responses().items() if k not in ("include", "text", "background")}, False
        body = {"model": "tiny", "input": self.items() if not self.one(12) else self.text()}
        if self.one(2):
            body["instructions"] = self.pick([self.text(), self.text(), "", None])
        if self.one(2):
            body["tools"] = [{"type": "function", **{k: v for k, v in self.tool(n)["function"].items() if k != "x"}} for n in range(1 + self.r.randrange(3))]
            if self.one(4):
                body["tool_choice"] = self.pick(["auto", "none", "required", {"type": "function", "name": body["tools"][0]["name"]}, {"type": "function", "name": "x"}])
        if self.one(4):
            body["reasoning"] = {"effort": self.pick(["low", "medium", "high", "none", "minimal", "xhigh", "max", None, "x"]), **self.pick([{}, {"summary": "auto"}])}
        if self.one(8):
            body["truncation"] = self.pick(["auto", "disabled"])
        sound = not self.one(8)
        return (body if sound else self.mutated(body) | {"model": "tiny"}), sound


def ask(url, body, wait=60):
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    try:
        answer = json.load(urllib.request.urlopen(request, timeout=wait))
        answer = answer[0] if isinstance(answer, list) else answer  # of a batch, the first prompt
        return {"ids": answer["token_ids"] if "token_ids" in answer else answer["tokens"]}
    except urllib.error.HTTPError as e:
        answer = e.read()
        try:
            reason = json.loads(answer)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            reason = answer.decode(errors="replace")
        if "ids [" in reason:
            return {"ids": json.loads(reason[reason.index("[") : reason.index("]") + 1])}
        return {"status": e.code, "reason": reason[:200]}


def golden(recorded, count, out):
    with gzip.open(recorded, "rt") as lines, open(out, "wb") as raw, gzip.GzipFile("", "wb", 9, raw, 0) as f:
        for _, line in zip(range(int(count)), lines):
            case = json.loads(line)
            if "ids" in case:
                case["hash"] = hashlib.sha256(",".join(map(str, case.pop("ids"))).encode()).hexdigest()[:16]
            case.pop("reason", None)
            f.write((json.dumps(case, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass"))


PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses", "embeddings": "/v1/embeddings", "messages": "/v1/messages",
         "generate": "/generate"}


RENDERED = {api: path + "/render" for api, path in PATHS.items()} | {"tokenize": "/tokenize"}


def odd(engine, url, api, seed, count, out):
    """Bodies of bodies.py."""
    url += (PATHS if engine == "sglang" else RENDERED)[api]
    with gzip.open(out, "wt") as f:
        for body in bodies.bodies(api, seed, int(count)):
            if re.search(r'"n": [ "+]*[1-9][\d_]{3}', body):  # the engine makes a list of n elements
                continue
            try:
                answer = ask(url, body, 4)
            except (TimeoutError, ValueError, LookupError, TypeError):  # sampled several times, or of no prompt
                answer = {"status": 599, "reason": "no ids"}
            ids = answer.get("ids", [0])
            if engine == "sglang" and (not ids or any(type(i) is not int or not 0 <= i < 200000 for i in ids)):
                answer = {"status": 599, "reason": "the scheduler refuses it"}
            f.write(json.dumps({"body": body, **answer}) + "\n")


def main(kind, url, seed, count, out):
    engine, _, api = kind.partition("_")
    if engine in ("sglang", "vllm"):
        return odd(engine, url, api, seed, count, out)
    path = PATHS["chat"] if kind.startswith("sglang:") else "/v1/responses/render" if kind == "harmony_responses" else "/v1/chat/completions/render"
    maker = Maker(int(seed), kind)
    with gzip.open(out, "wt") as f:
        for _ in range(int(count)):
            body, sound = maker.response() if kind == "harmony_responses" else (maker.conversation(), True)
            body = bodies.dump(body)
            answer = ask(url + path, body)
            f.write(json.dumps({"body": body, "sound": sound, **answer}) + "\n")


if __name__ == "__main__":
    golden(*sys.argv[2:]) if sys.argv[1] == "golden" else main(*sys.argv[1:])
