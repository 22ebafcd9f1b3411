"""Print generated request bodies, one a line: bodies.py API SEED COUNT

API: chat, completions, responses, messages, count_tokens, tokenize, embeddings, generate. Bodies are valid, nearly valid or
hostile: every declared field with values of every JSON type and some that pydantic converts, odd content parts and roles,
tools and choices, lone surrogates, equal keys, large numbers, NaN. The same seed gives the same bodies. Run by any Python 3.
"""
import json
import random
import sys


class Raw(str):
    """JSON text that goes into the body as it is."""


def dump(v):
    if isinstance(v, Raw):
        return str(v)
    if isinstance(v, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {dump(x)}" for k, x in v.items()) + "}"
    if isinstance(v, list):
        return "[" + ", ".join(map(dump, v)) + "]"
    return json.dumps(v, ensure_ascii=False)


SURROGATE = Raw(r'"a\ud800b"')
PIECES = ["the", " quick", "\n", "\n\n", "\t", "  ", "I'm", "é", "東京", "한국어", "🙂", "\u200b", "0", "42", "3.14", "{", "}", '"', "\\", "</b>", "<|im_end|>",
          "<|im_start|>", "<think>", "</think>", "<tool_call>", "<tool_response>", "İ", "\ufeff", "x\u0327", "x-anthropic-billing-header: x\n"]
JUNK = [None, True, False, 0, 1, -1, 2, 1.0, 0.5, 1.5, -0.0, 7, 1e5, Raw("1E2"), Raw("1e400"), Raw("NaN"), Raw("-Infinity"), 10**9, 2**31, 2**53, 2**63 - 1, 2**63, 2**64,
        -2**63 - 1, 10**30, "", "1", "0", "1.0", " 2 ", "+3", "1_0", "1e2", "-1", "true", "Yes", "off", "null", "auto", "none", "low", "text", "abc", [], {}, [1], ["a"], [""],
        [None], {"a": 1}, {"type": "text"}, [[1]], [{}], SURROGATE, [SURROGATE], {"a": SURROGATE}, Raw(r'{"\ud800": 1}')]


class Maker:
    def __init__(self, seed):
        self.r = random.Random(seed)

    def one(self, n):
        return self.r.randrange(n) == 0

    def pick(self, items):
        return items[self.r.randrange(len(items))]

    def text(self):
        return "".join(self.pick(PIECES) for _ in range(1 + self.r.randrange(8)))

    def junk(self):
        return self.pick(JUNK)

    def mutated(self, v):
        """v, perhaps with something of it replaced, added or gone."""
        if isinstance(v, dict) and v:
            out = dict(v)
            key = self.pick(list(out))
            how = self.r.randrange(4)
            if how == 0:
                del out[key]
            elif how == 1:
                out[key] = self.junk()
            elif how == 2 and isinstance(out[key], (dict, list)):
                out[key] = self.mutated(out[key])
            else:
                out[self.pick(["extra", "name", "type", "id"])] = self.junk()
            return out
        if isinstance(v, list) and v:
            out = list(v)
            i = self.r.randrange(len(out))
            out[i] = self.mutated(out[i]) if isinstance(out[i], (dict, list)) and not self.one(3) else self.junk()
            return out
        return self.junk()

    def maybe(self, v, n=6):
        return self.mutated(v) if self.one(n) else v

    # What messages are made of.

    def schema(self):
        return {"type": "object", "properties": {"city": {"type": "string", "description": self.text()}, "n": {"type": "integer", "default": self.pick([1e5, 1.0, 10**20, 3])}},
                "required": ["city"]}

    def tool(self, n):
        f = {"name": f"tool_{n}", "description": self.text(), "parameters": self.schema()}
        for key in list(f)[1:]:
            if self.one(5):
                del f[key]
        if self.one(5):
            f[self.pick(["strict", "defer_loading", "x"])] = self.pick([True, False, None, "yes", 1])
        t = {"type": "function", "function": f}
        if self.one(8):
            t[self.pick(["defer_loading", "strict", "x"])] = self.pick([True, False, None, "no"])
        return self.maybe(t, 10)

    def part(self):
        parts = [{"type": "text", "text": self.text()}] * 12 + [
            {"type": "text", "text": None}, {"type": "text", "text": ""}, {"type": "text"}, {"text": self.text()}, {"type": "refusal", "refusal": self.text()},
            {"type": "input_text", "text": self.text()}, {"type": "output_text", "text": self.text()}, {"type": "thinking", "thinking": self.text()},
            {"type": "tool_reference", "name": "t"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
            {"type": "image_url", "image_url": "http://127.0.0.1:9/x.png"}, {"image_url": "http://127.0.0.1:9/x.png"},
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}},
            {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
            {"type": "file", "file": {"file_data": "x"}}, {"type": "image_embeds", "image_embeds": "AAAA"}, {"type": "unknown", "text": "x"}, self.text(), self.junk()]
        p = self.pick(parts)
        return self.maybe(p, 15) if isinstance(p, dict) else p

    def content(self):
        if self.one(25):
            return self.junk()
        if not self.one(4):
            return self.text()
        return [self.part() for _ in range(self.r.randrange(4))]

    def call(self, n):
        c = {"id": f"call_{n}", "type": "function", "function": {"name": "tool_0", "arguments": self.pick([
            '{"city": "x", "n": 1.0}', '{"a": [1, 2.50, null, true], "b": 1e5}', "", "{", "[]", "null", '"x"', '{"big": 123456789012345678901234567890}', {"city": "x"}, None, "{}"])}}
        return self.maybe(c, 8)

    def message(self, n):
        role = self.pick(["user"] * 5 + ["assistant"] * 5 + ["system", "tool", "developer", "function", "wizard", "User", "latest_reminder"])
        m = {"role": role, "content": self.content()}
        if role == "assistant" or self.one(20):
            if self.one(4):
                m["tool_calls"] = self.pick([[self.call(n)], [self.call(n), self.call(n + 1)], [], None])
                if self.one(2):
                    m["content"] = self.pick([None, ""])
            if self.one(5):
                m[self.pick(["reasoning", "reasoning_content", "thinking"])] = self.pick([self.text(), None, "", 1, [{"type": "text", "text": "x"}]])
            if self.one(12):
                m[self.pick(["refusal", "audio", "function_call", "prefix"])] = self.pick([None, "x", {"id": "a"}, {"name": "f", "arguments": "{}"}, True])
        if role == "tool" and not self.one(4):
            m["tool_call_id"] = "call_0"
        if self.one(10):
            m[self.pick(["name", "tool_call_id", "task", "tools", "x"])] = self.pick(["n", None, 1, [self.tool(9)], [], ""])
        if self.one(20):
            del m[self.pick(list(m))]
        return self.maybe(m, 25)

    def messages(self):
        if self.one(60):
            return self.junk()
        out = [self.message(n) for n in range(1 + self.r.randrange(5))]
        if not self.one(3):
            out = [{"role": "user", "content": self.text()}] + out
        if not self.one(3):
            out.append({"role": "user", "content": self.text()})
        return out

    def choice(self):
        return self.pick(["auto", "none", "required", "any", None, "", {"type": "function", "function": {"name": "tool_0"}}, {"type": "function", "function": {"name": "other"}},
                          {"function": {"name": "tool_0"}}, {"type": "function"}, {"type": "function", "function": {"name": ""}}, {"type": "function", "name": "tool_0"}, self.junk()])

    def sampling(self):
        """Fields of one kind with values around their bounds."""
        numbers = {"temperature": [0, 0.0, 1, 2, 2.1, -0.1, "0.5", 0.005], "top_p": [0, 1, 1.1, 0.5, "1", -1], "top_k": [-2, -1, 0, 1, 5, 1.0, 1.5, "5"],
                   "min_p": [0, 1, 1.1, -0.1], "presence_penalty": [-2, 2, 2.1, -3], "frequency_penalty": [-2, 2, 2.1, -3], "repetition_penalty": [0, 1, 0.1, -1, 2, 2.5],
                   "n": [0, 1, 2, -1, 20000, 1.0, "1", True], "seed": [0, -1, 5, 2**63 - 1, 2**63, 1.0], "min_tokens": [0, 1, 5, -1, 10**6], "max_tokens": [0, 1, 5, -1, 1024, 1025, 10**9, 1.0, "5"],
                   "max_completion_tokens": [0, 1, 5, -1, 1024, 1025, 10**30], "logprobs": [True, False, 0, 1, 5, 20, 21, -1, -2, 1.0, "1"], "top_logprobs": [0, 1, 5, 20, 21, -1, -2, 1.5, "1"],
                   "prompt_logprobs": [0, 1, 20, 21, -1, -2, True], "logprob_token_ids": [[], [1], [1, 2], [10**6], [-1], list(range(129))], "echo": [True, False], "stream": [True, False, "true"],
                   "stream_options": [{"include_usage": True}, {}, {"include_usage": 1}, {"include_usage": "x"}], "stop": ["", "a", [], ["a"], ["a", ""], ["a"] * 4, ["a"] * 5, [1]],
                   "stop_token_ids": [[], [1], [-1], [10**6], [1.0], ["1"]], "allowed_token_ids": [[], [1], [-1], [10**6]], "bad_words": [[], ["a"], [""], ["a", "b"], [" "]],
                   "logit_bias": [{}, {"1": 1}, {"x": 1}, {"1": "1"}, {"-1": 0}, {"10000000": 0}, {"1.5": 1}, {" 1 ": 101}], "best_of": [1, 2, 0], "use_beam_search": [False, 0],
                   "ignore_eos": [True, 1, "x"], "skip_special_tokens": [False], "user": ["u", 1], "priority": [0, "0", 0.0], "suffix": ["x", ""],
                   "thinking_token_budget": [-1, -2, 0, 5, 1.0, True, "5"], "include_reasoning": [True, False, 0], "parallel_tool_calls": [True, False], "cache_salt": ["", "a", "a/b", "x" * 128, "x" * 129, "é", 1],
                   "truncate_prompt_tokens": [-2, -1, 0, 1, 5, 1024, 1025, 5.0, "5", "x", True], "truncation_side": ["left", "right", "middle", ""], "add_special_tokens": [True, False, "true", 0],
                   "repetition_detection": [{}, {"max_pattern_size": 2, "min_count": 2}, {"max_pattern_size": 2}, {"min_pattern_size": 1}, {"max_pattern_size": -1}],
                   "stream_interval": [0, 1, 5], "routed_experts_prompt_start": [0, -1], "mm_payload": ["tensors", "none", "x"], "return_mm_kwargs": [True, False], "request_id": ["r", 1],
                   "session_id": ["s", 1], "vllm_xargs": [{}, {"a": 1}, {"a": [1, "b", 1.5]}, {"a": {}}, {"a": 2**64}, {"a": None}, {"a": True}], "length_penalty": [1, "x"],
                   "kv_transfer_params": [{}, {"a": 1}, {"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": []}, {"prompt_token_ids": [1.0]}, {"prompt_token_ids": [True]}, {"prompt_token_ids": None},
                                          {"prompt_token_ids": [10**7]}, {"prompt_token_ids": "x"}, {"a": 2**65}],
                   "mm_processor_kwargs": [{}, {"a": 1}], "media_io_kwargs": [{}, {"image": {"a": 1}}, {"image": 1}],
                   "response_format": [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}, {"type": "json_schema"},
                                       {"type": "json_schema", "json_schema": {"name": "x"}}, {"type": "json_schema", "json_schema": {"schema": {}}}, {"type": "x"}, {}, {"type": "structural_tag"},
                                       {"type": "json_schema", "json_schema": {"name": "x", "schema": None}}, {"type": "json_schema", "json_schema": None}],
                   "structured_outputs": [{}, {"json": {"type": "object"}}, {"regex": "a+"}, {"regex": "("}, {"choice": ["a", "b"]}, {"choice": []}, {"json": "", }, {"json": "{"}, {"grammar": ""},
                                          {"json_object": True}, {"json_object": False}, {"json": {}, "regex": "a"}, {"json": {"type": "nonsense"}}, {"regex": "a\u0000"}, {"choice": "a"}, {"choice": [1]}],
                   # SGLang's
                   "regex": ["a+", 1], "ebnf": ["x", 1], "rid": ["a", ["a"], 1], "extra_key": ["a", ["a", "b"], 1], "lora_path": [None, 1], "stop_regex": ["a", ["a"], 1], "no_stop_trim": [True, "x"],
                   "return_hidden_states": [False, "last", "x"], "custom_params": [{}, 1], "watermark": [None, 1], "input_ids": [None, [1, 2, 3], [], ["1"], [1.5]], "session_params": [None, {}, 1],
                   "task": ["action", "x"], "thinking": [{}, None, "x"], "images_config": [{}, 1], "data_parallel_rank": [0, "0", "x"], "routed_dp_rank": [0, "x"], "bootstrap_room": [1, "x", [1]],
                   "service_tier": ["auto", "default", "x"], "metadata": [{}, {"a": "b"}, {"a": 1}, 1], "store": [True, "x"], "service": [1], "skip_reading_prefix_cache": [True]}
        key = self.pick(list(numbers))
        return {key: self.junk() if self.one(4) else self.pick(numbers[key])}

    def reasoning(self):
        return self.pick([{"reasoning_effort": self.pick(["none", "minimal", "low", "high", "max", "ultra", "x", None, 0.5, "0.5", 1, 0.99, True])},
                          {"reasoning": self.pick([{"effort": "low"}, {"effort": "none"}, {"enabled": True}, {"enabled": "yes"}, {"effort": 0.5}, {"effort": "x"}, {}, None, "x", {"effort": None}])}])

    def template(self):
        k = self.r.randrange(6)
        if k == 0:
            return {"chat_template_kwargs": self.pick([{"enable_thinking": False}, {"enable_thinking": "no"}, {"enable_thinking": None}, {"enable_thinking": "auto"}, {"tools": None}, {"documents": "auto"}, {}, None, {"messages": []}, {"tools": []}, {"tokenize": False}, {"x": 10**30}, {"x": 1e400 and 1.5},
                                                       {"add_generation_prompt": False}, {"continue_final_message": True}, {"documents": []}, {"conversation": 1}, {"chat_template": "x"}, {"chat_template": None},
                                                       {"return_dict": True}, {"bos_token": "B"}, {"enable_thinking": SURROGATE}, {"tokenizer_kwargs": {}}, {"padding": True}, [], "x"])}
        if k == 1:
            return {"add_generation_prompt": self.pick([True, False, "false", 0, None, "x", 1.0])}
        if k == 2:
            return self.pick([{"continue_final_message": True, "add_generation_prompt": False}, {"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": True},
                              {"continue_final_message": "yes", "add_generation_prompt": "no"}, {"continue_final_message": None}])
        if k == 3:
            return {"documents": self.pick([[], [{"title": "a", "text": "b"}], [{"a": 1}], [1], None, {}, [{}], [{"a": None}]])}
        if k == 4:
            return {"tools": self.pick([[self.tool(0)], [self.tool(0), self.tool(1)], [], None, self.junk()]), **({"tool_choice": self.choice()} if self.one(2) else {})}
        return {"tool_choice": self.choice()}

    def chat(self):
        if self.one(4):
            return self.maybe(self.agent_chat(), 3)
        body = {"model": "tiny", "messages": self.messages()}
        if self.one(3):
            body["tools"] = [self.tool(n) for n in range(1 + self.r.randrange(2))]
            if self.one(3):
                body["tool_choice"] = self.choice()
        for _ in range(self.r.randrange(3)):
            body.update(self.pick([self.sampling, self.sampling, self.template, self.reasoning])())
        return body

    def tokenize(self):
        if self.one(3):
            body = {"model": "tiny", "prompt": self.pick([self.text(), self.text(), "", [self.text()], [1, 2], self.junk()])}
        else:
            body = {"model": "tiny", "messages": self.messages()}
        for _ in range(self.r.randrange(3)):
            body.update(self.pick([self.template, self.template, self.sampling, lambda: {"return_token_strs": self.junk()}])())
        return body

    def completions(self):
        prompts = [self.text()] * 8 + [[self.text(), self.text()], [1, 2, 3], [[1, 2], [3]], [], "", [""], [[]], [[], [1]], ["a", 1], [1, "a"], [1, [2]], [True, False], [1.0, 2.0], ["1", "2"], [-1], [10**7],
                                       [[-1]], None, {"prompt_token_ids": [1]}, {"prompt": "x"}, [None], [["a"]], self.text() * 400, [5] * 1024, [5] * 1023, [5] * 1010, [5] * 1100, SURROGATE, [SURROGATE], self.junk()]
        body = {"model": "tiny", "prompt": self.pick(prompts)}
        if self.one(30):
            body["prompt_embeds"] = self.pick([None, "AAAA", [], ["AAAA"]])
        if self.one(40):
            del body["prompt"]
        for _ in range(self.r.randrange(3)):
            body.update(self.sampling())
        return body

    def embeddings(self):
        body = {"model": "tiny"}
        if self.one(4):
            body["messages"] = self.messages()
        else:
            body["input"] = self.completions().get("prompt")
        if self.one(2):
            body.update(self.pick([{"encoding_format": self.pick(["float", "base64", "x"])}, {"dimensions": self.junk()}, self.sampling(), self.template()]))
        return body

    def generate(self):
        body = self.pick([{"text": self.text()}, {"text": self.text()}, {"text": [self.text(), self.text()]}, {"input_ids": [1, 2, 3]}, {"input_ids": [[1, 2], [3]]}, {"text": "x", "input_ids": [1]}, {},
                          {"text": ""}, {"input_ids": []}, {"text": self.junk()}, {"input_ids": self.junk()}])
        params = {}
        for _ in range(self.r.randrange(3)):
            params.update(self.sampling())
        params = {{"max_tokens": "max_new_tokens"}.get(k, k): v for k, v in params.items()}
        if self.one(2):
            body["sampling_params"] = params
        if self.one(5):
            body.update(self.sampling())
        return body

    # Anthropic's API.

    def block(self, role):
        blocks = [{"type": "text", "text": self.text()}] * 8 + [
            {"type": "tool_use", "id": "c0", "name": "tool_0", "input": {"city": "x", "n": 1.0}}, {"type": "tool_result", "tool_use_id": "c0", "content": self.text()},
            {"type": "tool_result", "tool_use_id": "c0", "content": [{"type": "text", "text": self.text()}]}, {"type": "tool_result", "tool_use_id": "c0", "content": None, "is_error": True},
            {"type": "thinking", "thinking": self.text(), "signature": "s"}, {"type": "redacted_thinking", "data": "x"}, {"type": "tool_reference", "tool_name": "t"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}, {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "t"}},
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "t"}}, {"type": "document", "source": {}}, {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "x"}]},
            {"type": "text"}, {"type": "text", "text": None}, {"type": "tool_use"}, {"type": "tool_result"}, self.junk()]
        b = self.pick(blocks)
        return self.maybe(b, 12) if isinstance(b, dict) else b

    def anthropic_message(self):
        role = self.pick(["user"] * 4 + ["assistant"] * 4 + ["system", "tool"])
        content = self.text() if self.one(2) else [self.block(role) for _ in range(self.r.randrange(4))]
        return self.maybe({"role": role, "content": content}, 20)

    def messages_api(self, counted=False):
        if self.one(3):
            return self.maybe(self.agent_messages(), 3)
        body = {"model": "tiny", "messages": [{"role": "user", "content": self.text()}] + [self.anthropic_message() for _ in range(self.r.randrange(4))]}
        if not counted:
            body["max_tokens"] = self.pick([5] * 8 + [0, -1, 1024, 2000, "5", 5.0, None, 1030])
        if self.one(3):
            body["system"] = self.pick([self.text(), [{"type": "text", "text": self.text()}], [self.block("system")], "", None, self.junk(), [{"type": "text", "text": "x-anthropic-billing-header: a"}, {"type": "text", "text": "b"}]])
        if self.one(3):
            body["tools"] = [self.maybe(self.pick([{"name": "tool_0", "description": self.text(), "input_schema": self.schema()}, {"name": "t", "input_schema": {}},
                                                   {"type": "web_search_20250305", "name": "web_search"}, {"type": "custom", "name": "x", "input_schema": {"type": "object"}},
                                                   {"type": "bash_20250124", "name": "bash"}]), 6) for _ in range(self.r.randrange(3))]
        if self.one(6):
            body["tool_choice"] = self.pick([{"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "tool_0"}, {"type": "tool"}, {"type": "tool", "name": "x"}, None, "auto", {"type": "x"}])
        if self.one(6):
            body["thinking"] = self.pick([{"type": "enabled", "budget_tokens": 1024}, {"type": "enabled", "budget_tokens": 100}, {"type": "disabled"}, {"type": "adaptive"}, {"type": "enabled"}, None, "x", {"type": "x"},
                                          {"type": "adaptive", "display": "summarized"}, {"type": "enabled", "budget_tokens": 4}])
        if self.one(8):
            body["output_config"] = self.pick([{"effort": "low"}, {"effort": "x"}, {}, None, {"format": {"type": "json_schema", "schema": {"type": "object"}}}, {"effort": None}, {"format": {"type": "x"}}])
        for _ in range(self.r.randrange(2)):
            body.update(self.pick([self.sampling, lambda: {"stop_sequences": self.pick([[], ["a"], [""], ["a"] * 5, "a", None])}, self.template])())
        if self.one(40):
            del body[self.pick(list(body))]
        return body

    # OpenAI's responses.

    def item(self):
        items = [{"role": "user", "content": self.text()}] * 6 + [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": self.text()}]}] * 3 + [
            {"role": "system", "content": self.text()}, {"role": "developer", "content": self.text()}, {"role": "assistant", "content": self.text()},
            {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [{"type": "output_text", "text": self.text(), "annotations": []}]},
            {"type": "message", "role": "assistant", "id": "m", "status": "incomplete", "content": [{"type": "output_text", "text": self.text(), "annotations": []}]},
            {"type": "function_call", "call_id": "c", "name": "tool_0", "arguments": '{"city": "x"}'}, {"type": "function_call_output", "call_id": "c", "output": self.text()},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": self.text()}]}, {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}, {"type": "item_reference", "id": "x"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]}, {"type": "x"}, {"role": "wizard", "content": "x"}, {"role": "user"}, {"role": "user", "content": []}, self.junk()]
        i = self.pick(items)
        return self.maybe(i, 12) if isinstance(i, dict) else i

    def responses(self):
        if self.one(2):
            return self.maybe(self.agent_response(), 3)
        body = {"model": "tiny", "input": self.text() if self.one(3) else [{"role": "user", "content": self.text()}] + [self.item() for _ in range(self.r.randrange(4))]}
        if self.one(25):
            body["input"] = self.junk()
        if self.one(3):
            body["instructions"] = self.pick([self.text(), "", None, self.junk()])
        if self.one(3):
            body["tools"] = [self.maybe(self.pick([{"type": "function", "name": "tool_0", "description": self.text(), "parameters": self.schema(), "strict": True}, {"type": "function", "name": "t", "parameters": None, "strict": None},
                                                   {"type": "function", "name": "t"}, {"type": "web_search"}, {"type": "custom", "name": "c"}]), 8) for _ in range(self.r.randrange(3))]
            if self.one(2):
                body["tool_choice"] = self.pick(["auto", "none", "required", {"type": "function", "name": "tool_0"}, {"type": "function", "name": "x"}, "x", None])
        for _ in range(self.r.randrange(3)):
            body.update(self.pick([self.sampling, self.sampling, self.reasoning, lambda: {"max_output_tokens": self.pick([0, 1, 5, -1, 1024, 1025, "5", None])},
                                   lambda: {"text": self.pick([{}, {"format": {"type": "text"}}, {"format": {"type": "json_object"}}, {"format": {"type": "json_schema", "name": "x", "schema": {}}}, None, "x"])},
                                   lambda: {"truncation": self.pick(["auto", "disabled", "x", None])}, lambda: {"background": self.pick([True, False, None])}, lambda: {"include": self.pick([[], ["x"], None])},
                                   lambda: {"previous_response_id": self.pick([None, "resp_1", "x"])}, self.template])())
        return body


    # What coding agents send: long conversations with tools. Most of these bodies are valid.

    def result(self, kind):
        """A tool's result: text, or a list of text parts."""
        return self.pick([self.text()] * 4 + ["", [], [{"type": kind, "text": self.text()}], [{"type": kind, "text": self.text()}, {"type": kind, "text": ""}]])

    def some(self, fields):
        """Some of the fields."""
        return {key: value for key, value in fields.items() if self.one(2)}

    def agent_chat(self):
        cached = {"cache_control": {"type": "ephemeral"}}
        messages = [{"role": self.pick(["system", "developer"]), "content": self.pick([self.text(), [{"type": "text", "text": self.text(), **cached}]])}]
        for turn in range(1 + self.r.randrange(3)):
            messages.append({"role": "user", "content": self.pick([self.text(), [{"type": "text", "text": self.text()}, {"type": "text", "text": self.text(), **cached}]])})
            for step in range(self.r.randrange(3)):
                ids = [f"call_{turn}{step}{i}" for i in range(1 + self.r.randrange(2))]
                calls = [{"id": i, "type": "function", "function": {"name": f"tool_{self.r.randrange(2)}", "arguments": self.pick(['{"city": "x"}', "{}", "", '{"a": [1, {"b": null}]}'])}} for i in ids]
                thought = self.some({self.pick(["reasoning", "reasoning_content"]): self.text(), "refusal": None, "annotations": [], "audio": None, "function_call": None})
                messages.append({"role": "assistant", "content": self.pick([None, "", self.text()]), "tool_calls": [{**c, **self.some({"index": 0})} for c in calls], **thought})
                messages += [{"role": "tool", "tool_call_id": i, "content": self.result("text"), **({"name": "tool_0"} if self.one(3) else {})} for i in ids]
            if self.one(2):
                messages.append({"role": "assistant", "content": self.text(), **self.some({"reasoning_content": self.text(), "tool_calls": []})})
            if self.one(5):
                messages.append({"role": "system", "content": self.text()})
        body = {"model": "tiny", "messages": messages, "tools": [self.tool(n) for n in range(2)], "tool_choice": self.pick(["auto", "none", "required"]),
                **self.some({"stream": True, "parallel_tool_calls": True, "max_completion_tokens": 64, "temperature": 0.5, "store": False, "metadata": {"user": "u"}, "prompt_cache_key": "k"}), **self.pick([{}, {}, self.reasoning(), self.template()])}
        if messages[-1]["role"] == "assistant" and self.one(2):
            body.update({"continue_final_message": True, "add_generation_prompt": False})
        return body

    def agent_messages(self):
        cached = {"cache_control": self.pick([{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}, None])}
        text = lambda: {"type": "text", "text": self.pick([self.text(), self.text(), "<system-reminder>\n" + self.text() + "</system-reminder>"]), **self.pick([{}, {}, cached])}  # noqa: E731
        messages, calls = [], 0
        for _ in range(1 + self.r.randrange(4)):
            messages.append({"role": "user", "content": self.pick([self.text(), [text()], [text(), text()]])})
            for _ in range(self.r.randrange(3)):
                ids = [f"toolu_{calls + i}" for i in range(1 + self.r.randrange(3))]
                calls += len(ids)
                thoughts = [{"type": "thinking", "thinking": self.pick([self.text(), self.text(), ""]), "signature": "s"}, {"type": "redacted_thinking", "data": "x"}][:self.r.randrange(3)]
                uses = [{"type": "tool_use", "id": i, "name": f"tool_{self.r.randrange(2)}", "input": self.pick([{"city": "x"}, {}, {"a": [1, 2.5, None, {"b": "é"}]}]), **self.pick([{}, {}, cached, {"caller": {"type": "direct"}}])} for i in ids]
                server = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}, {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}] if self.one(25) else []
                messages.append({"role": "assistant", "content": thoughts + [text()] * self.r.randrange(2) + server + uses})
                results = [{"type": "tool_result", "tool_use_id": i, "content": self.result("text"), **self.some({"is_error": self.one(2)}), **self.pick([{}, {}, cached])} for i in ids]
                if self.one(8):
                    results[0]["content"] = self.pick([[{"type": "tool_reference", "tool_name": "tool_1"}], [{"type": "text", "text": "x"}, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}], None])
                if self.one(8):
                    del results[0]["content"]
                messages.append({"role": "user", "content": results + [text()] * self.r.randrange(2)})
                if self.one(6):
                    messages.append({"role": "system", "content": self.pick([self.text(), [text()], [text(), text()]])})
            if self.one(2):
                messages.append({"role": "assistant", "content": self.pick([self.text(), [text()], [{"type": "thinking", "thinking": self.text(), "signature": ""}, text()]])})
        tools = [{"name": f"tool_{n}", "description": self.text(), "input_schema": {"$schema": "http://json-schema.org/draft-07/schema#", **self.schema(), "additionalProperties": False}, **self.pick([{}, {}, cached, {"defer_loading": True}, {"strict": True}, {"eager_input_streaming": True}])} for n in range(2)]
        if self.one(12):
            tools.append(self.pick([{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}, {"type": "custom", "name": "c", "input_schema": {"type": "object", "properties": {}}}, {"type": "tool_search_tool_regex_20251119", "name": "tool_search"}]))
        return {"model": "tiny", "max_tokens": 64, "messages": messages, "tools": tools,
                "system": self.pick([[{"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=0;"}, {"type": "text", "text": self.text(), **cached}, {"type": "text", "text": self.text()}], [text()], self.text()]),
                **self.some({"stream": True, "metadata": {"user_id": "u"}, "temperature": 1, "thinking": self.pick([{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}]), "output_config": {"effort": self.pick(["low", "high", "max"])},
                             "tool_choice": self.pick([{"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": True}, {"type": "any"}]), "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}})}

    def agent_tools(self):
        """Tools of a response: functions, some in a namespace, custom ones, and some that the engine runs itself."""
        def function(name):
            return {"type": "function", "name": name, "description": self.text(), "parameters": self.schema(), **self.pick([{"strict": False}, {"strict": None}, {}, {"strict": True, "defer_loading": True}])}
        custom = {"type": "custom", "name": "apply_patch", "description": self.text(), **self.pick([{}, {"format": {"type": "text"}}, {"format": {"type": "text"}}, {"format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}}])}
        space = {"type": "namespace", "name": self.pick(["mcp__fs", "n"]), "description": self.text(), "tools": self.pick([[function("tool_0")], [function("read"), function("write")], [function("a"), {"type": "custom", "name": "c"}], []])}
        own = [{"type": "web_search"}, {"type": "web_search_preview", "search_context_size": "low"}, {"type": "local_shell"}, {"type": "shell"}, {"type": "image_generation"}, {"type": "apply_patch"}, {"type": "file_search", "vector_store_ids": ["v"]},
               {"type": "mcp", "server_label": "m", "server_url": "http://127.0.0.1:9"}, {"type": "code_interpreter", "container": {"type": "auto"}}, {"type": "tool_search"}, {"type": "nonsense"}]
        tools = [function("tool_0")] + [self.pick([function("tool_1"), custom, space, self.pick(own)]) for _ in range(self.r.randrange(4))]
        self.r.shuffle(tools)
        return tools

    def agent_response(self):
        parts = lambda *texts: [{"type": "input_text", "text": text} for text in texts]  # noqa: E731
        items = [{"type": "message", "role": "developer", "content": parts(self.text())}, {"type": "message", "role": "user", "content": parts("<environment_context>\n" + self.text(), self.text())}][self.r.randrange(3):]
        calls = 0
        for _ in range(1 + self.r.randrange(3)):
            items.append({"type": "message", "role": "user", "content": parts(self.text())})
            for _ in range(self.r.randrange(3)):
                if self.one(2):
                    items.append({"type": "reasoning", "summary": self.pick([[], [{"type": "summary_text", "text": self.text()}]]), **self.some({"id": "rs_1", "content": self.pick([None, [{"type": "reasoning_text", "text": self.text()}]]), "encrypted_content": "x" if self.one(20) else None})})
                if self.one(3):
                    items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": self.text(), **self.some({"annotations": []})}], **self.some({"id": "msg_1", "status": self.pick(["completed", "in_progress"]), "phase": "commentary"})})
                made = []
                for _ in range(1 + self.r.randrange(2)):
                    calls += 1
                    made.append(self.pick([("function_call", {"arguments": self.pick(['{"city": "x"}', "{}", "", "{"]), **self.some({"namespace": self.pick(["mcp__fs", "n", "", None])})})] * 3 + [("custom_tool_call", {"input": self.pick(["*** Begin Patch\n+é\"\\", "", self.text()])})]
                                          + ([("local_shell_call", {"action": {"type": "exec", "command": ["ls"], "env": {}}, "status": "completed"}), ("web_search_call", {"status": "completed", "action": {"type": "search", "query": "x"}}), ("tool_search_call", {"arguments": {}, "execution": "client"})] if self.one(8) else []))
                                + (f"call_{calls}",))
                items += [{"type": kind, "call_id": call, **({"name": self.pick(["tool_0", "tool_1", "read"])} if "arguments" in more or "input" in more else {}), **more, **self.some({"id": "fc_1", "status": "completed"})} for kind, more, call in made]
                items += [{"type": kind + "_output", "call_id": call, "output": self.result("input_text"), **({"status": "completed"} if self.one(4) else {})} for kind, _, call in made]
            if self.one(2):
                items.append({"type": "message", "role": "assistant", "id": "msg_2", "status": self.pick(["completed", "completed", "incomplete"]), "content": [{"type": "output_text", "text": self.text(), "annotations": []}]})
        return {"model": "tiny", "instructions": self.text(), "input": items, "tools": self.agent_tools(), "tool_choice": self.pick(["auto"] * 6 + ["required", "none", {"type": "custom", "name": "apply_patch"}, {"type": "function", "name": "tool_0"}]), "store": False,
                **self.some({"stream": True, "parallel_tool_calls": self.one(2), "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "reasoning": {"effort": self.pick(["low", "medium", "high"]), "summary": "auto"}, "text": {"verbosity": "low"}, "max_output_tokens": 64})}


def bodies(api, seed, count):
    for n in range(count):
        m = Maker(f"{api} {seed} {n}")
        make = {"chat": m.chat, "completions": m.completions, "responses": m.responses, "messages": m.messages_api, "count_tokens": lambda: m.messages_api(True), "tokenize": m.tokenize,
                "embeddings": m.embeddings, "generate": m.generate}[api]
        text = dump(make())
        if m.one(60):  # equal keys: the last one counts
            text = text[:-1] + ', "' + m.pick(["messages", "prompt", "n", "add_generation_prompt", "model"]) + '": ' + dump(m.junk()) + "}"
        if m.one(120):
            text = text[:-m.r.randrange(1, 5)]  # no JSON
        yield text


if __name__ == "__main__":
    for body in bodies(sys.argv[1], sys.argv[2], int(sys.argv[3])):
        print(body)
