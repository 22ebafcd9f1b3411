"""Hugging Face's tokenizers on the texts of BenchmarkEncode, in MB per second of processor time.

Usage: reference.py TOKENIZER_JSON_GZ FOLDER, where FOLDER has one file per kind of text with a JSON list of prompts.
Like the Go side, each kind takes the best of several rounds over all prompts.
"""
import gzip, json, os, sys, time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
import tokenizers

tok = tokenizers.Tokenizer.from_str(gzip.open(sys.argv[1], "rt", encoding="utf-8").read())
rates = []
for kind in ("en", "code", "zh", "json"):
    with open(os.path.join(sys.argv[2], kind + ".json"), encoding="utf-8") as f:
        prompts = json.load(f)[:40]
    size = sum(len(p.encode()) for p in prompts)
    best = 0.0
    for _ in range(3):
        start = time.process_time()
        for p in prompts:
            tok.encode(p, add_special_tokens=False)
        best = max(best, size / 1e6 / (time.process_time() - start))
    rates.append(f"{kind} {best:.1f}")
print(f"Hugging Face tokenizers {tokenizers.__version__}, qwen3, MB per CPU-second: " + "  ".join(rates))
