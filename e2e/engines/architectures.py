"""List the architectures of generative models that engines register: architectures.py VLLM SGLANG, the folders of the two packages.

Prints "NAME vllm sglang", with "text", "media" or "-" for vLLM and "yes" or "-" for SGLang. The tests of
internal/tokens/shape read the list.
"""
import ast
import pathlib
import re
import sys

# Drafts, encoders and heads, and wrappers whose models have names of their own.
NOT_SERVED = re.compile("NextN$|MTP$|Draft|Eagle|DSpark|DFlash|Assistant|Classification|Reward|Embedding|Vision(Model|For)|^Transformers|Contriever|Bert|"
                        "Roberta|CLIP|Bidirectional|ASR|Image|(?<!Chat)Model$")


def vllm(package):
    registry = ast.parse((package / "model_executor/models/registry.py").read_text())
    out = {}
    for node in registry.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict):
            kind = {"_TEXT_GENERATION_MODELS": "text", "_MULTIMODAL_MODELS": "media"}.get(node.targets[0].id)
            if kind:
                out.update({key.value: kind for key in node.value.keys})
    return out


def sglang(package):
    for file in (package / "srt/models").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "EntryClass":
                for name in getattr(node.value, "elts", [node.value]):
                    if isinstance(name, ast.Name) and not NOT_SERVED.search(name.id):
                        yield name.id


if __name__ == "__main__":
    ours, theirs = vllm(pathlib.Path(sys.argv[1])), set(sglang(pathlib.Path(sys.argv[2])))
    for name in sorted(ours.keys() | theirs, key=str.lower):
        print(name, ours.get(name, "-"), "yes" if name in theirs else "-")
