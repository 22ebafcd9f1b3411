"""A model that fits a CPU: a real tokenizer around a few random layers."""
import contextlib
import fcntl
import gzip
import hashlib
import importlib.metadata
import json
import pathlib
import re
import shutil


PICTURES = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}\
{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def text(folder, name):
    """A file of the folder, plain or gzipped; None if it is in neither form."""
    plain, packed = folder / name, folder / (name + ".gz")
    if plain.exists():
        return plain.read_text()
    return gzip.open(packed, "rt").read() if packed.exists() else None


def recipe(tokenizer, *more):
    """What a folder is made of: these programs, the tokenizer's files, the packages that write it, and more."""
    tokenizer, own = pathlib.Path(tokenizer), pathlib.Path(__file__).parent
    parts = [tokenizer.name, *map(str, more), *((own / name).read_text() for name in ("tiny_model.py", "encoder_models.py"))]
    parts += [text(tokenizer, name) or "" for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")]
    for package in ("torch", "transformers", "mistral_common"):
        parts += [package, *(found.version for found in importlib.metadata.distributions(name=package))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def once(target, wanted, write):
    """Fill the folder by write(), unless a finished one of the same recipe is there. Engines that start together wait."""
    target.parent.mkdir(parents=True, exist_ok=True)
    mark = target / "recipe"
    with contextlib.closing(open(f"{target}.lock", "w")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if mark.exists() and mark.read_text() == wanted:
            return
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        write()
        mark.write_text(wanted)


def make(tokenizer, target, kind="qwen3", template=None, adapters=()):
    """Write the model; a finished one of the same recipe stays. The weights are seeded: greedy answers repeat, and with untied
    embeddings they depend on the whole context (mix)."""
    wanted = recipe(tokenizer, kind, pathlib.Path(template).read_text() if template else None, adapters)
    once(target, wanted, lambda: write(pathlib.Path(tokenizer), target, kind, template, adapters))


def write(tokenizer, target, kind, template, adapters):
    import torch
    import transformers

    vocabulary = json.loads(text(tokenizer, "tokenizer.json"))
    config = json.loads(text(tokenizer, "tokenizer_config.json"))
    if template:
        config["chat_template"] = pathlib.Path(template).read_text()
    (target / "tokenizer.json").write_text(text(tokenizer, "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False))
    if own := text(tokenizer, "chat_template.jinja"):
        (target / "chat_template.jinja").write_text(own)

    added = {t["content"]: t["id"] for t in vocabulary["added_tokens"]}
    top = max([*vocabulary["model"]["vocab"].values(), *added.values()])

    def special(name):
        value = config.get(name)
        return added.get(value["content"] if isinstance(value, dict) else value)

    shape = dict(
        vocab_size=(top // 64 + 1) * 64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=16384, tie_word_embeddings=kind != "qwen3",
        bos_token_id=special("bos_token"), eos_token_id=special("eos_token"), pad_token_id=special("pad_token"))
    configs = {
        "qwen3": lambda: transformers.Qwen3Config(**shape),
        "llama": lambda: transformers.LlamaConfig(**shape),
        "mistral": lambda: transformers.MistralConfig(**shape, sliding_window=None),
        # All layers have one window: no group has full attention.
        "windowed": lambda: transformers.MistralConfig(**shape, sliding_window=1024),
        # Some tokenizer classes read other ids out of the same files if the configuration names another kind of model.
        "deepseek_v3": lambda: transformers.DeepseekV3Config(
            **{**shape, "head_dim": 32, "num_key_value_heads": 2}, moe_intermediate_size=32, n_routed_experts=4, n_group=1,
            topk_group=1, num_experts_per_tok=2, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16,
            v_head_dim=32),
        # Images become a run of one token, as many as their size asks for.
        "qwen2_vl": lambda: transformers.Qwen2VLConfig(
            text_config={**{k: v for k, v in shape.items() if k != "head_dim"},
                         "rope_parameters": {"rope_type": "default", "type": "mrope", "mrope_section": [4, 6, 6], "rope_theta": 1e4}},
            vision_config=dict(depth=1, embed_dim=32, hidden_size=64, num_heads=2, mlp_ratio=2), tie_word_embeddings=True,
            image_token_id=added.get("<|image_pad|>"), video_token_id=added.get("<|video_pad|>"),
            vision_start_token_id=added.get("<|vision_start|>"), vision_end_token_id=added.get("<|vision_end|>")),
        # Layers with a sliding window among layers with full attention: two groups in the KV cache.
        "hybrid": lambda: transformers.Gemma3TextConfig(**{**shape, "num_hidden_layers": 4}, sliding_window=64,
                                                        layer_types=["sliding_attention", "full_attention"] * 2),
        # Layers with a recurrent state among layers with full attention, also two groups.
        "recurrent": lambda: transformers.Lfm2Config(**{**shape, "num_hidden_layers": 4, "head_dim": 32}, conv_dim=64, block_dim=64,
                                                     block_ff_dim=128, layer_types=["conv", "full_attention"] * 2),
    }
    torch.manual_seed(7)
    if kind == "qwen2_vl":
        model = transformers.Qwen2VLForConditionalGeneration(configs[kind]()).to(torch.bfloat16)
        (target / "preprocessor_config.json").write_text(json.dumps(dict(
            image_processor_type="Qwen2VLImageProcessor", processor_class="Qwen2VLProcessor", min_pixels=3136, max_pixels=200704)))
        (target / "chat_template.jinja").write_text(PICTURES)
    else:
        model = transformers.AutoModelForCausalLM.from_config(configs[kind]()).to(torch.bfloat16)
        if kind == "qwen3":
            words = [i for token, i in vocabulary["model"]["vocab"].items() if re.fullmatch("\u0120[a-z]{3,}", token)]
            model = mix(model, words)
    for seed, name in enumerate(adapters):
        adapter(model, target, target / f"adapter-{name}", seed)
    model.save_pretrained(target)


def fill(target, words):
    """Put weights into a folder that has its configuration, for which answers are of these tokens and depend on the context."""
    import torch
    import transformers

    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(target))
    mix(model, words).save_pretrained(target)


def mix(model, words):
    """Return the model in float32, with weights for which its answers depend on every block of the context: attention
    picks few tokens, and what it adds outweighs the last token's embedding. Answers are these tokens. In bfloat16 rounding
    would decide between words, so that two computations of one prompt differed."""
    import torch

    normed = any("q_norm" in name for name, _ in model.named_parameters())
    factors = {"embed_tokens": 0.1, "o_proj": 4, "q_norm" if normed else "q_proj": 3}
    said = torch.zeros(model.config.vocab_size, 1)
    said[words] = 1
    model = model.float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0, weight.shape[1] ** -0.5)
            weight.mul_(factors.get(name.split(".")[-2], 1))
        model.lm_head.weight.mul_(said)
    return model


def adapter(model, base, target, seed):
    """A LoRA adapter of rank 4 on the attention's queries and values."""
    import safetensors.torch
    import torch

    torch.manual_seed(1000 + seed)
    weights, modules = {}, ("q_proj", "v_proj")
    for number, layer in enumerate(model.model.layers):
        for module in modules:
            linear = getattr(layer.self_attn, module)
            name = f"base_model.model.model.layers.{number}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(4, linear.in_features)
            weights[f"{name}.lora_B.weight"] = torch.randn(linear.out_features, 4)
    target.mkdir(exist_ok=True)
    safetensors.torch.save_file(weights, target / "adapter_model.safetensors")
    (target / "adapter_config.json").write_text(json.dumps(dict(
        peft_type="LORA", task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.0, bias="none",
        target_modules=list(modules), base_model_name_or_path=str(base), inference_mode=True)))
