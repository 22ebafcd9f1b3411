"""List the architectures of models that engines register: architectures.py VLLM SGLANG, the folders of the two packages.

Prints "NAME vllm sglang", with "text", "media", "pooling" or "-" for vLLM and "yes" or "-" for SGLang, of which only generative
models are listed. With a third argument, modes, it
prints what else decides how chats become prompts, "REGISTRY NAME ...": vLLM's renderers, its tokenizers and the architectures
for which it chooses them; SGLang's encodings of chats in code, and its conversation templates by model type; and where vLLM
decides that a request does not read the prefix cache. The tests of internal/tokens/shape read both lists.
"""
import ast
import pathlib
import re
import sys

# Drafts, encoders and heads, and wrappers whose models have names of their own.
NOT_SERVED = re.compile("NextN$|MTP$|Draft|Eagle|DSpark|DFlash|Assistant|Classification|Reward|Embedding|Vision(Model|For)|^Transformers|Contriever|Bert|"
                        "Roberta|CLIP|Bidirectional|ASR|Image|(?<!Chat)Model$")


POOLING = ["_EMBEDDING_MODELS", "_LATE_INTERACTION_MODELS", "_REWARD_MODELS", "_TOKEN_CLASSIFICATION_MODELS", "_SEQUENCE_CLASSIFICATION_MODELS"]


def vllm(package):
    registry = ast.parse((package / "model_executor/models/registry.py").read_text())
    out = {}
    for node in registry.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict):
            kind = {"_TEXT_GENERATION_MODELS": "text", "_MULTIMODAL_MODELS": "media", **dict.fromkeys(POOLING, "pooling")}.get(node.targets[0].id)
            for key in node.value.keys if kind else []:
                if key is not None and (kind != "pooling" or key.value not in out):
                    out[key.value] = kind
    return out


def unread(package):
    """The functions, or classes, that name the member of a request which says that its prompt is not read from the cache."""
    for file in sorted(package.rglob("*.py")):
        if "skip_reading_prefix_cache" not in (source := file.read_text()):
            continue
        scopes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
        for number, line in enumerate(source.splitlines(), 1):
            if "skip_reading_prefix_cache" in line:
                around = [node for node in scopes if node.lineno <= number <= node.end_lineno]
                yield file.relative_to(package), max(around, key=lambda node: node.lineno).name if around else "-"


def sglang(package):
    for file in (package / "srt/models").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "EntryClass":
                for name in getattr(node.value, "elts", [node.value]):
                    if isinstance(name, ast.Name) and not NOT_SERVED.search(name.id):
                        yield name.id


def assigned(file, name):
    """The keys of a dict, and their values if they are constants."""
    for node in ast.parse(file.read_text()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == name and isinstance(node.value, ast.Dict):
            return [(key.value, getattr(value, "value", "")) for key, value in zip(node.value.keys, node.value.values)]
    raise SystemExit(f"{file} has no {name}")


def defaults(file):
    """The tokenizer modes that vLLM sets, with the architectures for which it does."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Assign) and "tokenizer_mode" in ast.unparse(node.body[0].targets[0]):
            for name in ast.walk(node.test):
                if isinstance(name, ast.Constant):
                    yield name.value, node.body[0].value.value


def modes(ours, theirs):
    for name, _ in assigned(ours / "renderers/registry.py", "_VLLM_RENDERERS"):
        yield "vllm-renderer", name
    for name, _ in assigned(ours / "tokenizers/registry.py", "_VLLM_TOKENIZERS"):
        yield "vllm-tokenizer", name
    for architecture, mode in defaults(ours / "config/model.py"):
        yield "vllm-default", mode, architecture
    resolve = next(f for f in ast.parse((theirs / "srt/entrypoints/openai/chat_encoding.py").read_text()).body
                   if getattr(f, "name", "") == "resolve_chat_encoding_spec")
    for node in ast.walk(resolve):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant) and node.value.value:
            yield "sglang-encoding", node.value.value
    for file, name in unread(ours):
        yield "vllm-unread", str(file), name
    for type_, name in assigned(theirs / "srt/parser/conversation.py", "MODEL_TYPE_TO_TEMPLATE"):
        yield "sglang-conversation", type_, name


if __name__ == "__main__":
    packages = [pathlib.Path(folder) for folder in sys.argv[1:3]]
    if sys.argv[3:] == ["modes"]:
        print(*sorted({" ".join(row) for row in modes(*packages)}), sep="\n")
        sys.exit()
    ours, theirs = vllm(packages[0]), set(sglang(packages[1]))
    for name in sorted(ours.keys() | theirs, key=lambda name: (name.lower(), name)):
        print(name, ours.get(name, "-"), "yes" if name in theirs else "-")
