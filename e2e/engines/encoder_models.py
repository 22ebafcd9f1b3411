"""A model's folder without weights, for vllm launch render: encoder_models.py TOKENIZER TARGET.

TOKENIZER is a folder, inkling, or mistral_VERSION for a folder in Mistral's format with a file of mistral-common: mistral_v3 has a
SentencePiece model, mistral_tekken_v3 a tekken.json. mistral-common has no files of versions above 7, which differ by their
special tokens only.
"""
import base64
import json
import pathlib
import re
import struct
import sys

import transformers

import tiny_model


MISTRAL = {"mistral_v1": "tokenizer.model.v1", "mistral_v2": "mistral_instruct_tokenizer_240216.model.v2",
           "mistral_v3": "mistral_instruct_tokenizer_240323.model.v3", "mistral_v7": "mistral_instruct_tokenizer_241114.model.v7"}
LATER = ["[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]"]


def mistral(name, target):
    import mistral_common
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    data = pathlib.Path(mistral_common.__file__).parent / "data"
    version = name.rpartition("_")[2]
    words = []
    if name in MISTRAL:
        (target / f"tokenizer.model.{version}").write_bytes((data / MISTRAL[name]).read_bytes())
    else:
        file = json.loads((data / "tekken_240718.json").read_text())
        file["config"]["version"] = version
        if int(version[1:]) > 7:
            names = [t["token_str"] for t in Tekkenizer.DEPRECATED_SPECIAL_TOKENS] + LATER
            file["special_tokens"] = [{"rank": i, "token_str": n, "is_control": True} for i, n in enumerate(names)]
        if version == "v15":
            file["model_settings_builder"] = {"reasoning_effort": {"type": "enum", "values": ["none", "high"], "accepts_none": True, "default": "none"}}
        (target / "tekken.json").write_text(json.dumps(file))
        words = [1000 + t["rank"] for t in file["vocab"][:100000] if re.fullmatch(rb" [a-z]{3,}", base64.b64decode(t["token_bytes"]))]
    (target / "consolidated.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    config = transformers.MistralConfig(**SHAPE, vocab_size=131072).to_dict() | {"architectures": ["MistralForCausalLM"]}
    (target / "config.json").write_text(json.dumps(config))
    return words


INKLING = [f"<|{name}|>" for name in """message_user message_model message_system message_tool content_text content_image content_model_end_sampling
           content_thinking content_audio_input unused_200024 content_invoke_tool_json end_message audio_end""".split()]
SHAPE = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=64, intermediate_size=64,
             max_position_embeddings=16384)


def main(tokenizer, target):
    """Write the folder, and return the ids of plain words."""
    tokenizer, target = pathlib.Path(tokenizer), pathlib.Path(target)
    target.mkdir(parents=True, exist_ok=True)
    if tokenizer.name.startswith("mistral_v") or tokenizer.name.startswith("mistral_tekken"):
        return mistral(tokenizer.name, target)
    added = INKLING if tokenizer.name == "inkling" else []
    if added:  # its own tokenizer is on the model hub only
        tokenizer = tokenizer.parent / "deepseek_v3"
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]:
        if text := tiny_model.text(tokenizer, name):
            if added and name == "tokenizer.json":
                file = json.loads(text)
                first = max(t["id"] for t in file["added_tokens"]) + 1
                file["added_tokens"] += [dict(id=first + i, content=t, special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)
                                         for i, t in enumerate(added)]
                text = json.dumps(file)
            elif added and name == "tokenizer_config.json":  # the other model's type says how transformers loads it
                text = json.dumps(json.loads(text) | {"tokenizer_class": "PreTrainedTokenizerFast"})
            (target / name).write_text(text)
    vocabulary = json.loads(tiny_model.text(tokenizer, "tokenizer.json"))["model"]["vocab"]
    if tokenizer.name == "gptoss":
        config = transformers.GptOssConfig(**SHAPE, num_local_experts=4).to_dict() | {"architectures": ["GptOssForCausalLM"]}
        tiktoken_file(vocabulary, target / "o200k_base.tiktoken")
    else:  # the encoder is chosen by --tokenizer-mode
        config = transformers.Qwen3Config(**SHAPE, vocab_size=129280).to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    (target / "config.json").write_text(json.dumps(config))
    return [i for token, i in vocabulary.items() if re.fullmatch("\u0120[a-z]{3,}", token)]


def tiktoken_file(vocabulary, path):
    """The vocabulary as openai-harmony reads it, which checks its hash."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    byte = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
    with open(path, "wb") as f:
        for token, rank in sorted(vocabulary.items(), key=lambda item: item[1]):
            f.write(base64.b64encode(bytes(byte[c] for c in token)) + b" %d\n" % rank)


if __name__ == "__main__":
    main(*sys.argv[1:])
