#!/usr/bin/env python3
"""Answers for the Go tests with Hugging Face's own library (pip install tokenizers==0.23.2).

Standard input: one JSON object {"tokenizer": path}, {"folder": path} (as transformers loads it, 5.19.0) or
{"pre_tokenizer": {...}}, then one {"text": ...} a line. Another such object goes on with another tokenizer.
Standard output, same order: {"ids": [...], "ids_special": [...]} or {"ends": [...]}, ends counted in code points.
A tokenizer.json may be gzipped.
"""
import gzip
import json
import sys

from tokenizers import Tokenizer


def load(task):
    if "tokenizer" in task:
        path = task["tokenizer"]
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as f:
            tok = Tokenizer.from_buffer(f.read())
            tok.no_truncation()  # as transformers does for every call
            tok.no_padding()
            return tok
    return Tokenizer.from_str(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": task["pre_tokenizer"], "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "x"},
    }))


class Folder:
    """AutoTokenizer with the interface that is used here."""
    def __init__(self, path):
        from transformers import AutoTokenizer
        self.auto = AutoTokenizer.from_pretrained(path)

    def encode(self, text, add_special_tokens):
        self.ids = self.auto(text, add_special_tokens=add_special_tokens).input_ids
        return self


def main():
    task = json.loads(sys.stdin.readline())
    tok = Folder(task["folder"]) if "folder" in task else load(task)
    for line in sys.stdin:
        given = json.loads(line)
        if "text" not in given:  # another task
            task = given
            tok = Folder(task["folder"]) if "folder" in task else load(task)
            continue
        text = given["text"]
        if "pre_tokenizer" not in task:
            plain = tok.encode(text, add_special_tokens=False).ids
            out = {"ids": plain, "ids_special": tok.encode(text, add_special_tokens=True).ids}
        else:
            out = {"ends": [end for _, (_, end) in tok.pre_tokenizer.pre_tokenize_str(text)]}
        print(json.dumps(out, separators=(",", ":")))


main()
