#!/usr/bin/env python3
"""Compares `kvlane tokenize` with the ids of a corpus, tokenizer by tokenizer.

  corpus.py KVLANE CORPUS IDS DIR [DIR ...]

CORPUS has a JSON object {"text": ...} a line, maybe gzipped. The ids of the tokenizer in DIR are in IDS/ids.NAME.jsonl[.gz], NAME
being the last part of DIR: {"ids": [...]} and maybe "ids_special" a line, in the same order; without such a file they are computed: by
transformers if DIR has a tokenizer_config.json (AutoTokenizer if there is a config.json, too), else by tokenizers. Prints equal and different documents; exits 1 if one differs or a tokenizer does not load.
"""
import gzip
import json
import os
import subprocess
import sys


def lines(path):
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def computed(folder, texts):
    if os.path.exists(os.path.join(folder, "tokenizer.json")) and os.path.exists(os.path.join(folder, "tokenizer_config.json")):
        import transformers
        kind = transformers.AutoTokenizer if os.path.exists(os.path.join(folder, "config.json")) else transformers.PreTrainedTokenizerFast
        tok = kind.from_pretrained(folder)
        return [{"ids": tok(s, add_special_tokens=False).input_ids, "ids_special": tok(s).input_ids} for s in texts]
    from tokenizers import Tokenizer
    for name, opener in ("tokenizer.json", open), ("tokenizer.json.gz", gzip.open):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            with opener(path, "rb") as f:
                tok = Tokenizer.from_buffer(f.read())
    tok.no_truncation()
    tok.no_padding()
    return [{"ids": tok.encode(s, add_special_tokens=False).ids, "ids_special": tok.encode(s).ids} for s in texts]


def main():
    kvlane, corpus, ids, folders = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
    texts = [d["text"] for d in lines(corpus)]
    given = "".join(json.dumps({"text": s}, ensure_ascii=False) + "\n" for s in texts).encode()
    failed = False
    for folder in folders:
        name = os.path.basename(folder.rstrip("/"))
        recorded = [p for p in (os.path.join(ids, "ids.%s.jsonl%s" % (name, end)) for end in ("", ".gz")) if os.path.exists(p)]
        want, source = (lines(recorded[0]), "recorded") if recorded else (computed(folder, texts), "computed")
        assert len(want) == len(texts), "%s: ids of %d documents for %d" % (name, len(want), len(texts))
        for column, flags in ("ids", []), ("ids_special", ["--add-special-tokens"]):
            if column not in want[0] and column == "ids_special":
                continue
            run = subprocess.run([kvlane, "tokenize", "--tokenizer", folder, *flags], input=given, capture_output=True)
            got = [json.loads(line) for line in run.stdout.splitlines()]
            if len(got) != len(texts):
                failed = True
                print("%s: %s" % (name, run.stderr.decode().strip()))
                break
            bad = [i for i, d in enumerate(got) if d.get("ids") != want[i].get(column, want[i]["ids"])]
            failed = failed or bool(bad)
            print("%s, %s (%s): %d documents equal, %d differ%s" % (name, column, source, len(texts) - len(bad), len(bad), ": %s" % bad[:5] if bad else ""), flush=True)
    sys.exit(failed)


main()
