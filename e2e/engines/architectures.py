"""List the architectures of models that engines register: architectures.py VLLM SGLANG, the folders of the two packages.

Prints "NAME vllm sglang" for every name of the two registries, with "text", "media" or "pooling" for vLLM, "yes" or "pooling" for
SGLang, "other" for what no model of its own has (drafts, encoders, wrappers of other libraries), and "-" if an engine lacks it.
With a third argument, modes, it prints what else decides how chats become prompts, "REGISTRY NAME ...": vLLM's renderers, its
tokenizers and the architectures for which it chooses them, and the model types for which it has a template if the folder has
none; SGLang's encodings of chats in code, and its conversation templates by model type; and where vLLM decides that a request
does not read the prefix cache. The tests of internal/tokens/shape read both lists.
"""
import ast
import pathlib
import re
import sys

# The parts of vLLM's registry, _VLLM_MODELS. Where a name is in several of them, the first of this order counts.
KINDS = {
    "_TEXT_GENERATION_MODELS": "text", "_MULTIMODAL_MODELS": "media", "_TRANSFORMERS_SUPPORTED_MODELS": "text",
    "_EMBEDDING_MODELS": "pooling", "_LATE_INTERACTION_MODELS": "pooling", "_REWARD_MODELS": "pooling",
    "_TOKEN_CLASSIFICATION_MODELS": "pooling", "_SEQUENCE_CLASSIFICATION_MODELS": "pooling",
    "_SPECULATIVE_DECODING_MODELS": "other", "_TRANSFORMERS_BACKEND_MODELS": "other",
}

# SGLang has one list of classes. These are its drafts, wrappers and one encoder; those that pool are named by a function and so.
OTHER = re.compile("NextN$|MTP$|Draft|Eagle|DSpark|DFlash|Assistant|^Transformers|^PixtralVisionModel$")
POOLING = re.compile("Classification|Embedding")


def vllm(package):
    dicts = {}
    for node in ast.parse((package / "model_executor/models/registry.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict):
            dicts[node.targets[0].id] = node.value
    if (parts := {value.id for value in dicts["_VLLM_MODELS"].values}) != KINDS.keys():
        raise SystemExit(f"vLLM's registry has the parts {sorted(parts)}")
    out = {}
    for part, kind in KINDS.items():
        for key, value in zip(dicts[part].keys, dicts[part].values):
            if key is not None:  # else names of another part
                wraps = part == "_TRANSFORMERS_SUPPORTED_MODELS" and value.elts[1].value.startswith("TransformersMultiModal")
                out.setdefault(key.value, "media" if wraps else kind)
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
    config = ast.parse((package / "srt/configs/model_config.py").read_text())
    generates = next(node for node in config.body if getattr(node, "name", "") == "is_generation_model")
    pools = {node.left.value for node in ast.walk(generates) if isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant)}
    out = {}
    for file in (package / "srt/models").glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "EntryClass":
                for name in getattr(node.value, "elts", [node.value]):
                    pooling = name.id in pools or POOLING.search(name.id)
                    out[name.id] = "other" if OTHER.search(name.id) else "pooling" if pooling else "yes"
    if lost := pools - out.keys():
        raise SystemExit(f"SGLang pools {sorted(lost)}, which it does not register")
    return out


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
    for type_, _ in assigned(ours / "transformers_utils/chat_templates/registry.py", "_MODEL_TYPE_TO_CHAT_TEMPLATE_FALLBACK"):
        yield "vllm-fallback", type_
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
    ours, theirs = vllm(packages[0]), sglang(packages[1])
    for name in sorted(ours.keys() | theirs.keys(), key=lambda name: (name.lower(), name)):
        print(name, ours.get(name, "-"), theirs.get(name, "-"))
