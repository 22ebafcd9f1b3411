"""A model's folder without weights, for vllm launch render: encoder_models.py TOKENIZER TARGET."""
import base64
import json
import pathlib
import sys

import transformers

import tiny_model


def main(tokenizer, target):
    tokenizer, target = pathlib.Path(tokenizer), pathlib.Path(target)
    target.mkdir(parents=True, exist_ok=True)
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]:
        if text := tiny_model.text(tokenizer, name):
            (target / name).write_text(text)
    vocabulary = json.loads(tiny_model.text(tokenizer, "tokenizer.json"))["model"]["vocab"]
    shape = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=64, intermediate_size=64,
                 max_position_embeddings=16384)
    if tokenizer.name == "gptoss":
        config = transformers.GptOssConfig(**shape, num_local_experts=4).to_dict() | {"architectures": ["GptOssForCausalLM"]}
        tiktoken_file(vocabulary, target / "o200k_base.tiktoken")
    else:  # the encoder is chosen by --tokenizer-mode
        config = transformers.Qwen3Config(**shape, vocab_size=129280).to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    (target / "config.json").write_text(json.dumps(config))


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
