"""Hugging Face's tokenizers on the texts of BenchmarkEncode, in MB per second of processor time.

Usage: reference.py TEXTS MODEL..., where TEXTS has one file per kind of text with a JSON list of prompts, and each MODEL is a
folder with tokenizer.json.gz. Like the Go side, each kind takes the best of several rounds over all prompts.
"""
import gzip, json, os, sys, time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
import tokenizers

print(f"Hugging Face tokenizers {tokenizers.__version__}, MB per CPU-second:")
for model in sys.argv[2:]:
    with gzip.open(os.path.join(model, "tokenizer.json.gz"), "rt", encoding="utf-8") as f:
        tok = tokenizers.Tokenizer.from_str(f.read())
    rates = []
    for kind in ("en", "code", "zh", "json"):
        with open(os.path.join(sys.argv[1], kind + ".json"), encoding="utf-8") as f:
            prompts = json.load(f)[:20]
        size = sum(len(p.encode()) for p in prompts)
        best = 0.0
        for _ in range(3):
            start = time.process_time()
            for p in prompts:
                tok.encode(p, add_special_tokens=False)
            best = max(best, size / 1e6 / (time.process_time() - start))
        rates.append(f"{kind} {best:.1f}")
    print(f"  {os.path.basename(model)}: " + "  ".join(rates))
