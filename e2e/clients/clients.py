"""Runs the clients that people use through Envoy and Kvlane, and prints a table of client and feature.

clients.py URL KVLANE_ADMIN ENVOY_ADMIN TOKENIZER   URL of Envoy, such as http://127.0.0.1:8080; TOKENIZER is a folder for aiperf and vLLM
AIPERF and VLLM in the environment are the programs; without them their rows are SKIPPED with the reason, which STRICT=1 takes for a failure.
Exits with 1 if a check fails.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request

# Nothing outside of this machine is asked.
os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", LANGCHAIN_TRACING_V2="false",
                  OPENAI_API_KEY="none", VLLM_NO_USAGE_STATS="1", PYTHONWARNINGS="ignore")
# Its services are a dozen processes, which start slowly on a busy machine.
os.environ.update({"AIPERF_SERVICE_" + name + "_TIMEOUT": "600" for name in ("REGISTRATION", "PROFILE_CONFIGURE", "PROFILE_START", "START")})
url, admin, proxy, tokenizer = sys.argv[1:5]
MODEL = "demo"
SYSTEM = "You answer briefly and name the shelf. " * 12
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city", "days"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
QUESTION = {"type": "text", "text": "What is this?"}
IMAGE = [QUESTION, {"type": "image_url", "image_url": {"url": "data:image/png;base64," + PIXEL}}]
rows = []


def check(client, feature):
    """Adds a row for the decorated function, which returns what it saw, or raises."""
    def run(f):
        try:
            rows.append((client, feature, "ok", str(f())))
        except Skip as e:
            rows.append((client, feature, "SKIPPED", str(e)))
        except Exception as e:  # a client may raise anything
            rows.append((client, feature, "FAILED", f"{type(e).__name__}: {e}"))
        print("  %-20s %-18s %-8s %s" % (*rows[-1][:3], rows[-1][3].replace("\n", " ")[:300]), flush=True)
    return run


class Skip(Exception):
    pass


def want(condition, what):
    if not condition:
        raise AssertionError(what)


def want_placeholder(prompt_tokens):
    """The engine counts more tokens for a question with an image than for the question alone: the image arrived."""
    plain, image = prompt_tokens([QUESTION]), prompt_tokens(IMAGE)
    want(image > plain > 0, f"{image} prompt tokens with an image, {plain} without")
    return f"{image} prompt tokens, {plain} without the image"


def with_openai():
    import openai
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Maps?"}]

    @check("openai", "models")
    def _():
        names = [m.id for m in client.models.list()]
        want(MODEL in names, names)
        return names

    @check("openai", "chat, cached")
    def _():
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
        r = client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, max_tokens=8)
        usage, matched = r.parse().usage, int(r.headers["x-kvlane-matched-tokens"])
        want(usage.prompt_tokens_details.cached_tokens == matched > 0, f"{usage} and {matched} predicted")
        return f"{matched} of {usage.prompt_tokens} tokens cached, as predicted"

    @check("openai", "streaming")
    def _():
        chunks = list(client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        want(text and chunks[-1].usage.completion_tokens == 8, chunks[-1])
        return f"{len(chunks)} chunks"

    @check("openai", "completions")
    def _():
        r = client.completions.create(model=MODEL, prompt=["One text", "Another"], max_tokens=4)
        want(len(r.choices) == 2, r)
        return f"{len(r.choices)} choices"

    @check("openai", "responses")
    def _():
        r = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8)
        want(r.output_text and r.usage.output_tokens == 8, r)
        return r.status

    @check("openai", "embeddings")
    def _():
        r = client.embeddings.create(model=MODEL, input=["One text", "Another"])
        want(len(r.data) == 2 and all(isinstance(x, float) for x in r.data[1].embedding), r)
        return f"2 vectors of {len(r.data[0].embedding)}"

    @check("openai", "image")
    def _():
        return want_placeholder(lambda content: client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=4).usage.prompt_tokens)

    @check("openai", "tool required")
    def _():
        r = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], tool_choice="required", max_tokens=32)
        call = r.choices[0].message.tool_calls[0]
        want(r.choices[0].finish_reason == "tool_calls" and set(json.loads(call.function.arguments)) == {"city", "days"}, r)
        again = messages + [r.choices[0].message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "Rain"}]
        client.chat.completions.create(model=MODEL, messages=again, tools=[TOOL], max_tokens=8)
        return call.function.arguments

    @check("openai", "tool, streaming")
    def _():
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=[TOOL], tool_choice="required", max_tokens=32) as s:
            message = s.get_final_completion().choices[0].message
        want(message.tool_calls[0].function.name == "weather", message)
        return message.tool_calls[0].function.arguments

    @check("openai", "error")
    def _():
        try:
            client.chat.completions.create(model="no-such-model", messages=messages)
        except openai.NotFoundError as e:
            return e.status_code
        raise AssertionError("an unknown model was answered")


def with_anthropic():
    import anthropic
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    ask = dict(model=MODEL, max_tokens=8, system=SYSTEM, messages=[{"role": "user", "content": "Maps?"}])
    tools = [{"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA}]

    @check("anthropic", "messages")
    def _():
        r = client.messages.create(**ask)
        want(r.content[0].text, r)
        return r.usage.output_tokens

    @check("anthropic", "count_tokens")
    def _():
        counted = client.messages.count_tokens(**{k: v for k, v in ask.items() if k != "max_tokens"}).input_tokens
        usage = client.messages.create(**ask).usage
        used = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        want(counted == used, f"{counted} counted, {used} used")
        return f"{counted} tokens, {usage.cache_read_input_tokens} cached"

    @check("anthropic", "streaming")
    def _():
        with client.messages.stream(**ask) as s:
            text = "".join(s.text_stream)
        want(text, "no text")
        return f"{len(text)} characters"

    @check("anthropic", "tool required")
    def _():
        r = client.messages.create(**{**ask, "tools": tools, "tool_choice": {"type": "any"}})
        want(r.stop_reason == "tool_use" and set(r.content[0].input) == {"city", "days"}, r)
        more = ask["messages"] + [{"role": "assistant", "content": [r.content[0].model_dump(exclude_none=True)]},
                                  {"role": "user", "content": [{"type": "tool_result", "tool_use_id": r.content[0].id, "content": "Rain"}]}]
        client.messages.create(**{**ask, "tools": tools, "messages": more})
        return r.content[0].input

    @check("anthropic", "tool, streaming")
    def _():
        with client.messages.stream(**{**ask, "tools": tools, "tool_choice": {"type": "tool", "name": "weather"}}) as s:
            r = s.get_final_message()
        want(r.content[0].input == {"city": "text", "days": 1}, r)
        return r.content[0].input

    @check("anthropic", "image")
    def _():
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}

        def prompt_tokens(content):
            content = [QUESTION] if content == [QUESTION] else [image, QUESTION]
            usage = client.messages.create(**{**ask, "messages": [{"role": "user", "content": content}]}).usage
            return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        return want_placeholder(prompt_tokens)


def with_langchain():
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings
    chat = ChatOpenAI(base_url=url + "/v1", api_key="none", model=MODEL, max_tokens=8, max_retries=0)

    @check("langchain", "chat")
    def _():
        r = chat.invoke([("system", SYSTEM), ("user", "Maps?")])
        want(r.content, r)
        return r.usage_metadata["input_token_details"]

    @check("langchain", "streaming")
    def _():
        chunks = list(chat.stream("Maps?"))
        want("".join(c.content for c in chunks), chunks)
        return f"{len(chunks)} chunks"

    @check("langchain", "tool required")
    def _():
        r = chat.bind_tools([TOOL], tool_choice="required").invoke("Weather?")
        want(r.tool_calls[0]["args"] == {"city": "text", "days": 1}, r)
        return r.tool_calls[0]["args"]

    @check("langchain", "image")
    def _():
        return want_placeholder(lambda content: chat.invoke([{"role": "user", "content": content}]).usage_metadata["input_tokens"])

    @check("langchain", "embeddings")
    def _():
        # Its default sends ids of an OpenAI tokenizer, which it would download.
        vectors = OpenAIEmbeddings(base_url=url + "/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False).embed_documents(["One", "Two"])
        want(len(vectors) == 2, vectors)
        return f"{len(vectors)} vectors"


def with_litellm():
    import litellm
    litellm.telemetry = False
    ask = dict(model="hosted_vllm/" + MODEL, api_base=url + "/v1", api_key="none", max_tokens=8, num_retries=0, messages=[{"role": "user", "content": "Maps?"}])

    @check("litellm", "chat")
    def _():
        r = litellm.completion(**ask)
        want(r.choices[0].message.content, r)
        return r.usage.total_tokens

    @check("litellm", "streaming")
    def _():
        text = "".join(c.choices[0].delta.content or "" for c in litellm.completion(**ask, stream=True))
        want(text, "no text")
        return f"{len(text)} characters"

    @check("litellm", "tool required")
    def _():
        r = litellm.completion(**ask, tools=[TOOL], tool_choice="required")
        call = r.choices[0].message.tool_calls[0].function
        want(r.choices[0].finish_reason == "tool_calls" and call.name == "weather" and json.loads(call.arguments) == {"city": "text", "days": 1}, r)
        return call.arguments

    @check("litellm", "image")
    def _():
        return want_placeholder(lambda content: litellm.completion(**{**ask, "messages": [{"role": "user", "content": content}]}).usage.prompt_tokens)

    @check("litellm", "embeddings")
    def _():
        r = litellm.embedding(model="hosted_vllm/" + MODEL, api_base=url + "/v1", api_key="none", input=["One", "Two"])
        want(len(r.data) == 2, r)
        return f"{len(r.data)} vectors"


def program(variable, *arguments, **environment):
    path = os.environ.get(variable, "")
    if not path or not os.access(path, os.X_OK):
        raise Skip(f"{variable} names no program: make clients {variable}=/path/to/{variable.lower()}")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=900, check=False, env={**os.environ, **environment})
    want(done.returncode == 0, (done.stdout + done.stderr)[-2000:])
    return done.stdout


def with_benchmarks():
    @check("aiperf", "chat, streaming")
    def _():
        with tempfile.TemporaryDirectory() as folder:
            # Offline it reads no folder, only the hub's cache.
            cached, commit = os.path.join(folder, "hub", "models--kvlane--qwen3"), "0" * 40
            shutil.copytree(tokenizer, os.path.join(cached, "snapshots", commit))
            os.mkdir(os.path.join(cached, "refs"))
            with open(os.path.join(cached, "refs", "main"), "w", encoding="ascii") as f:
                f.write(commit)
            program("AIPERF", "profile", "--model", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming", "--request-count", "8", "--concurrency", "2",
                    "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16", "--tokenizer", "kvlane/qwen3", "--artifact-dir", folder, "--ui", "none",
                    HF_HUB_CACHE=os.path.join(folder, "hub"))
            reports = [os.path.join(d, f) for d, _, files in os.walk(folder) for f in files if f.endswith("aiperf.json")]
            report = json.load(open(reports[0], encoding="utf-8"))
            want(report["request_count"]["avg"] == 8, report["request_count"])
            return "8 requests, time to first token " + str(round(report["time_to_first_token"]["avg"])) + " ms"

    @check("vllm bench serve", "chat, streaming")
    def _():
        with tempfile.TemporaryDirectory() as folder:
            program("VLLM", "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", url, "--model", MODEL,
                    "--tokenizer", tokenizer, "--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16", "--num-prompts", "8",
                    "--save-result", "--result-dir", folder, "--result-filename", "result.json")
            result = json.load(open(os.path.join(folder, "result.json"), encoding="utf-8"))
            want(result["completed"] == 8, result["completed"])
            return "8 requests, time to first token " + str(round(result["mean_ttft_ms"])) + " ms"


for clients in (with_openai, with_anthropic, with_langchain, with_litellm, with_benchmarks):
    clients()


@check("Kvlane", "decisions")
def _():
    """All that was sent went through Kvlane, it knew the prompts, and the engines had in their caches what it predicted."""
    def get(url):
        return urllib.request.urlopen(url, timeout=10).read().decode()
    status, decisions = json.loads(get(admin + "/debug/status")), json.loads(get(admin + "/debug/decisions?n=1000"))
    sent = int(get(proxy + "/stats?filter=^cluster.model_servers.upstream_rq_total$").split()[-1])
    placed = sum("target" in d for d in decisions)
    want(sent == placed, f"Envoy sent {sent} requests to engines, Kvlane placed {placed}")
    want(len(decisions) == status["requests_total"], f"{len(decisions)} of {status['requests_total']} decisions are logged")
    rejected = [(d["rejected"], d["reason"]) for d in decisions if d.get("rejected")]
    want(rejected == [(404, "kvlane_model_not_found")], rejected)
    prompts = {"chat": 18, "completions": 1, "responses": 1, "embeddings": 3, "messages": 8, "count_tokens": 1}  # what is sent above
    prompts["chat"] += 8 * sum(name in ("aiperf", "vllm bench serve") and state == "ok" for name, _, state, _ in rows)
    for api, least in prompts.items():
        of = [d for d in decisions if d["api"] == api and not d.get("rejected")]
        want(len(of) >= least, f"{len(of)} decisions of {api}, {least} or more were sent")
        for d in of:
            # Images are engine_would_refuse: to Kvlane the demonstration's model is one without vision.
            known = d["prompt_tokens"] > 0 or d.get("degraded") == "engine_would_refuse" or api == "count_tokens"
            want(known and d["after"].get("status") == 200 and d.get("degraded") in (None, "engine_would_refuse", "shorter_than_a_block"), d)
    want(sum(d.get("degraded") == "engine_would_refuse" for d in decisions) == 4, "other than four requests had an image")
    # An engine may have cached what stands for an image, which Kvlane does not predict.
    both = [(d["matched_tokens"], d["after"]["cached_tokens"]) for d in decisions if "cached_tokens" in d["after"] and not d.get("degraded")]
    predicted, reported = map(sum, zip(*both))
    want(predicted == reported > 0, f"{predicted} cached tokens predicted, {reported} reported")
    return f"{placed} requests reached engines, each placed by Kvlane; {reported} cached tokens, as predicted"


features = list(dict.fromkeys(f for _, f, _, _ in rows))
print("\n| client | " + " | ".join(features) + " |\n|---|" + "---|" * len(features))
for name in dict.fromkeys(c for c, _, _, _ in rows):
    print(f"| {name} | " + " | ".join(next((s for c, f, s, _ in rows if (c, f) == (name, feature)), "") for feature in features) + " |")
for client, feature, state, text in rows:
    if state != "ok":
        print(f"{state}: {client}, {feature}: {text}")
count = [sum(s == state for _, _, s, _ in rows) for state in ("ok", "FAILED", "SKIPPED")]
print("%d passed, %d failed, %d skipped" % tuple(count))
sys.exit(count[1] > 0 or os.environ.get("STRICT") == "1" and count[2] > 0)
