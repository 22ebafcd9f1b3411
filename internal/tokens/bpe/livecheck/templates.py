#!/usr/bin/env python3
"""Writes what transformers.apply_chat_template makes of generated conversations (pip install transformers==5.19.0 jinja2==3.1.6).

  templates.py OUT.jsonl --tokenizer DIR [DIR ...] --templates DIR [DIR ...] --count N --seed S

For each *.jinja file and each tokenizer's own template N conversations: turns, tools, tool calls, reasoning, documents, parts,
fields that are null or absent, text in many scripts, numbers in all spellings, messages to be continued. A line holds the
arguments and the prompt with its ids, or the error. strftime_now sees 2026-11-20 20:00:00.
"""
import argparse
import copy
import datetime
import glob
import gzip
import json
import os
import random
import shutil
import tempfile

import transformers
from transformers.utils import chat_template_utils

TEXTS = ["Hello", "", " ", "\n", "Hi!\n\n  ", "  leading", "trailing \t\n", "<b>'x' & \"y\"</b>", "你好，世界 🎉", "Grüße aus Köln", "שלום", "नमस्ते", "e\u0301 \u212b \ufb01",
         "<think>\nhm\n</think>\n\nYes.", "a</think>b", "<think>open", "\\n \\u00e9 {{ x }} {% if %}", "def f(x):\n\treturn x ** 2\r\n", "1234567 0.1 1e5",
         "<|im_end|> [INST] </s> <s>", "<tool_response>\n{}\n</tool_response>", "x" * 300, "\u2028\u0085\u00a0\u200b", "null", "{\"a\": [1, 2.0, null]}", "[1]", "'", "/think", "/no_think",
         "👩‍👩‍👧‍👦\U0001f1e9\U0001f1ea", "\x00\x1f\x7f", "%s %d {}", "ǅ ß İ ς"]
NUMBERS = [0, 1, -1, 7, 10**15, 10**16, 2**53 + 1, 10**30, 1.0, -0.0, 0.1, 1e5, 1e16, 1e22, 1e-7, 1.5e300, 123456789.123456789, 5e-324, 3.14]
KEYS = ["a", "city", "naïve key", "类型", "items", "x-y", "keys", "", "type", "name", "q\"uote", "get", "values"]


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 11, 20, 20, 0, 0)


chat_template_utils.datetime = Clock


def odd(r, chance):
    """Half of the conversations are tame, so that templates render them; the others have oddities that make some raise."""
    return r.wild and r.random() < chance


def text(r):
    return "".join(r.choice(TEXTS) for _ in range(r.choice([1, 1, 1, 2, 3])))


def value(r, depth=3):
    k = r.randrange(9 if depth else 5)
    if k == 0:
        return r.choice([None, True, False])
    if k in (1, 2):
        return r.choice(NUMBERS)
    if k in (3, 4):
        return text(r)
    if k in (5, 6):
        return [value(r, depth - 1) for _ in range(r.randrange(4))]
    return {r.choice(KEYS): value(r, depth - 1) for _ in range(r.randrange(4))}


def schema(r, depth=2):
    kind = r.choice(["string", "number", "integer", "boolean", "array", "object", ["string", "null"], None])
    out = {} if kind is None else {"type": kind}
    if r.random() < .6:
        out["description"] = text(r)
    if r.random() < .2:
        out["enum"] = [value(r, 0) for _ in range(r.randrange(1, 4))] if r.random() < .3 else [text(r) for _ in range(r.randrange(1, 4))]
    if r.random() < .2:
        out["default"] = value(r, 1)
    if r.random() < .1:
        out["nullable"] = r.choice([True, False])
    if r.random() < .1 and depth:
        out["oneOf"] = [schema(r, depth - 1) for _ in range(2)]
    if kind == "array" and r.random() < .8:
        out["items"] = schema(r, depth - 1) if depth else {"type": "string"}
    if kind == "object" and depth:
        out["properties"] = {r.choice(KEYS): schema(r, depth - 1) for _ in range(r.randrange(3))}
    if odd(r, .15):
        out[r.choice(KEYS + ["$ref", "additionalProperties", "minimum"])] = value(r, 1)
    return out


def tool(r):
    function = {"name": r.choice(["get_weather", "add", "größe", "f"]), "description": text(r)}
    if r.random() < .9:
        function["parameters"] = {"type": "object", "properties": {r.choice(KEYS): schema(r) for _ in range(r.randrange(4))}}
        if r.random() < .7:
            function["parameters"]["required"] = r.sample(KEYS, r.randrange(3))
    if odd(r, .15):
        function.pop("description")
    if odd(r, .2):
        function[r.choice(["strict", "return", "returns", "parameters"])] = value(r, 2)
    out = {"type": "function", "function": function}
    if odd(r, .08):
        out = function
    if odd(r, .08):
        out[r.choice(KEYS)] = value(r)
    return out


def tool_call(r):
    arguments = {r.choice(KEYS): value(r) for _ in range(r.randrange(4))}
    k = r.random() if r.wild else r.choice([0, .8])
    call = {"name": r.choice(["get_weather", "add", "größe"]), "arguments": arguments if k < .7 else json.dumps(arguments) if k < .93 else r.choice([None, "", "no json", []])}
    if odd(r, .08):
        call.pop("arguments")
    if odd(r, .15):
        return call
    out = {"id": r.choice(["abcdefghi", "123456789", "call_1", "functions.add:0"] if r.wild else ["abcdefghi"]), "type": "function", "function": call}
    if odd(r, .2):
        out.pop("id")
    if odd(r, .15):
        out.pop("type")
    return out


def parts(r):
    out = [{"type": "text", "text": text(r)} for _ in range(r.randrange(1, 4))]
    if odd(r, .2):
        out.insert(r.randrange(len(out) + 1), r.choice([{"type": "image"}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "bare", {"text": "t"}]))
    return out


def content(r):
    k = r.random() if r.wild else 0
    return text(r) if k < .85 else parts(r) if k < .93 else None if k < .98 else value(r, 2)


def assistant(r, calls):
    m = {"role": "assistant", "content": content(r)}
    if calls:
        m["tool_calls"] = [tool_call(r) for _ in range(r.choice([1, 1, 1, 2]))]
        m["content"] = r.choice([None, "", text(r)])
        if odd(r, .3):
            m.pop("content")
    elif odd(r, .1):
        m["tool_calls"] = r.choice([None, []])
    if r.random() < .25:
        m[r.choice(["reasoning_content", "reasoning", "thinking"])] = r.choice([text(r), text(r), None, ""] if r.wild else [text(r)])
    if odd(r, .05):
        m.pop("content", None)
    return m


def tool_result(r):
    m = {"role": "tool", "content": r.choice([text(r), json.dumps(value(r)), value(r, 2), parts(r)] if r.wild else [text(r), json.dumps(value(r))])}
    if not odd(r, .2):
        m["tool_call_id"] = r.choice(["abcdefghi", "123456789", "call_1", "functions.add:0"] if r.wild else ["abcdefghi"])
    if r.random() < .6:
        m["name"] = r.choice(["get_weather", "add"])
    return m


def conversation(r, tools):
    out = []
    if r.random() < .5:
        out.append({"role": r.choice(["system", "system", "system", "developer"] if r.wild else ["system"]), "content": content(r)})
    for _ in range(r.choice([1, 1, 2, 3])):
        out.append({"role": "user", "content": content(r)})
        if r.random() < .5 if tools else odd(r, .1):
            out.append(assistant(r, True))
            out.extend(tool_result(r) for _ in range(len(out[-1]["tool_calls"]) if not odd(r, .2) else 1))
            if odd(r, .3):
                continue
        if not odd(r, .2):
            out.append(assistant(r, False))
    if r.random() < .7 and out[-1]["role"] == "assistant":
        out.append({"role": "user", "content": content(r)})
    if odd(r, .15):
        out.insert(r.randrange(len(out) + 1), {"role": r.choice(["system", "user", "assistant", "tool", "ipython", "observation", "", "control"]), "content": text(r)})
    if odd(r, .08):
        r.choice(out).pop("content", None)
    if odd(r, .08):
        r.choice(out)[r.choice(["name", "prefix", "recipient", "weight", "content_type"])] = value(r, 1)
    return out


VARIABLES = {
    "enable_thinking": [True, False, None], "thinking": [True, False], "thinking_budget": [0, 512, -1], "reasoning_effort": ["low", "high", None],
    "builtin_tools": [["browser"], ["python", "browser"], ["brave_search", "wolfram_alpha"]], "date_string": ["26 Jul 2024"], "tools_in_user_message": [True, False],
    "model_identity": ["I am x."], "xml_tools": [["<x/>"]], "custom_tools": [None], "controls": [{"length": "short"}], "available_tools": [[]], "citation_mode": ["fast"],
    "preserve_thinking": [True], "clear_thinking": [True, False], "add_vision_id": [True], "bos_token": ["<B>"], "safety_mode": ["none", "STRICT"], "strict": [1.0],
    "today": ["2026-01-01"], "keep_past_thinking": [True], "skip_special": [[]], "functions": ["[]"], "datetime": ["now"],
}


def case(r):
    r.wild = r.random() < .5
    with_tools = r.random() < .4
    args = {"conversation": conversation(r, with_tools)}
    if with_tools and not odd(r, .15):
        args["tools"] = [tool(r) for _ in range(r.choice([1, 1, 2, 0] if r.wild else [1, 2]))]
    if r.random() < .1:
        args["documents"] = [{"title": text(r), "text": text(r), **({"doc_id": r.choice([1, "a"])} if r.random() < .5 else {})} for _ in range(r.randrange(3))]
    continued = r.random() < .12 and args["conversation"][-1]["role"] == "assistant" or odd(r, .04)
    if continued:
        args["continue_final_message"] = True
    args["add_generation_prompt"] = not continued and r.random() < .8
    for name in r.sample(sorted(VARIABLES), r.choice([0, 0, 0, 1, 1, 2, 3])):
        args[name] = r.choice(VARIABLES[name])
    return args


def load(folder):
    """The tokenizer as engines load it: AutoTokenizer where there is a config.json, else tokenizer.json as it is."""
    copied = tempfile.mkdtemp()
    try:
        for path in glob.glob(os.path.join(folder, "**"), recursive=True):
            if os.path.isdir(path) or os.path.getsize(path) > 1 << 28:
                continue
            to = os.path.join(copied, os.path.relpath(path, folder))
            os.makedirs(os.path.dirname(to), exist_ok=True)
            if path.endswith(".gz"):
                with gzip.open(path) as f, open(to[:-3], "wb") as g:
                    shutil.copyfileobj(f, g)
            else:
                shutil.copyfile(path, to)
        kind = transformers.AutoTokenizer if os.path.exists(os.path.join(copied, "config.json")) else transformers.PreTrainedTokenizerFast
        return kind.from_pretrained(copied)
    finally:
        shutil.rmtree(copied)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--tokenizer", nargs="+", required=True)
    parser.add_argument("--templates", nargs="*", default=[])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tokenizers = [(folder, load(folder)) for folder in options.tokenizer]
    jobs = [(None, None, pair) for pair in tokenizers if pair[1].chat_template is not None]
    for number, path in enumerate(p for d in options.templates for p in sorted(glob.glob(os.path.join(d, "*.jinja")))):
        with open(path, encoding="utf-8") as f:
            jobs.append((path, f.read(), tokenizers[number % len(tokenizers)]))
    with open(options.out, "w", encoding="utf-8") as out:
        for path, source, (folder, tokenizer) in jobs:
            r = random.Random(f"{options.seed} {path or folder}")
            for _ in range(options.count):
                args = case(r)
                line = {"tokenizer": folder, "template": path, "args": args}
                given = copy.deepcopy(args)
                try:
                    messages = given.pop("conversation")
                    line["prompt"] = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=source, **given)
                    line["ids"] = tokenizer(line["prompt"], add_special_tokens=False).input_ids
                except Exception as e:
                    line["error"] = f"{type(e).__name__}: {e}"
                try:
                    out.write(json.dumps(line, ensure_ascii=False) + "\n")
                except UnicodeEncodeError:
                    pass  # a slice of an emoji: no JSON text
    print(len(jobs), "templates,", len(jobs) * options.count, "conversations")


main()
