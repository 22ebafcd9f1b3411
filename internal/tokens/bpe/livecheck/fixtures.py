#!/usr/bin/env python3
"""Writes testdata/foreign: small tokenizers in every file format but plain BPE tokenizer.json, with ids of their own libraries.

  pip install mistral-common==1.13.1 tiktoken==0.14.0 tokenizers==0.23.3 sentencepiece==0.2.3 protobuf
  fixtures.py TESTDATA
  fixtures.py TESTDATA OUT SEED COUNT   to compare once: OUT/texts.jsonl.gz are COUNT new texts, made of pieces of those in TESTDATA

Each folder has the file as it lies in a model's folder (gzipped) and ids.jsonl.gz: a line per text of texts.jsonl.gz, without and with what is added to a text.
The vocabularies are the beginnings of mistral-common's tekken, and trained on the texts.
"""
import base64
import gzip
import json
import os
import random
import sys
import unicodedata

import mistral_common
import sentencepiece
import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import Unigram
from tokenizers.normalizers import NFC, Precompiled, Replace, Sequence, Strip
from tokenizers.pre_tokenizers import Metaspace, WhitespaceSplit
from tokenizers.pre_tokenizers import Sequence as Both
from tokenizers.processors import TemplateProcessing
from sentencepiece import sentencepiece_model_pb2 as protos
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

DATA = os.path.join(os.path.dirname(mistral_common.__file__), "data")
HAN = r"&&[^\p{Han}]]"
KIMI = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}%s*[\p{Ll}\p{Lm}\p{Lo}\p{M}%s+(?i:'s|'t|'re|'ve|'m|'ll|'d)?" % (HAN, HAN),
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}%s+[\p{Ll}\p{Lm}\p{Lo}\p{M}%s*(?i:'s|'t|'re|'ve|'m|'ll|'d)?" % (HAN, HAN),
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
])
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def zipped(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(gzip.compress(data, 9, mtime=0))


def golden(folder, texts, encode):
    lines = (json.dumps({"ids": ids, "ids_special": special}, separators=(",", ":")) for ids, special in map(encode, texts))
    zipped(os.path.join(folder, "ids.jsonl.gz"), "\n".join(lines).encode() + b"\n")


def tekken(folder, texts, size):
    with open(os.path.join(DATA, "tekken_240911.json")) as f:
        file = json.load(f)
    file["vocab"] = file["vocab"][:size + 50]  # those beyond the size do not count
    file["config"].update(default_vocab_size=size + 30, default_num_special_tokens=30, num_vocab_tokens=len(file["vocab"]))
    path = os.path.join(folder, "tekken.json")
    data = json.dumps(file).encode()
    zipped(path + ".gz", data)
    with open(path, "wb") as f:
        f.write(data)
    model = Tekkenizer.from_file(path)
    os.remove(path)
    golden(folder, texts, lambda s: (model.encode(s, bos=False, eos=False), model.encode(s, bos=True, eos=False)))
    return {base64.b64decode(t["token_bytes"]): t["rank"] for t in file["vocab"]}


def pieces(s, most=25_000):
    """The parts that Kimi's code passes to tiktoken."""
    for i in range(0, len(s), 400_000):
        part, start, run, space = s[i:i + 400_000], 0, 0, None
        for k, c in enumerate(part):
            run = run + 1 if c.isspace() == space else 1
            space = c.isspace()
            if run > most:
                yield part[start:k]
                start, run = k, 1
        yield part[start:]


def tiktoken_file(path, texts, ranks, pattern, special, parts):
    zipped(path + ".gz", b"".join(b"%s %d\n" % (base64.b64encode(t), r) for t, r in ranks.items()))
    old = NFC().normalize_str  # with the marks of an older Unicode than Python's
    encoding = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={t: len(ranks) + i for i, t in enumerate(special)})
    golden(os.path.dirname(path), texts, lambda s: (
        [i for p in parts(s) for i in encoding.encode(p, allowed_special="all")] if old(s) == unicodedata.normalize("NFC", s) else None, None))


def trained(folder, texts, **how):
    """A SentencePiece model of the texts, written to folder."""
    os.makedirs(folder, exist_ok=True)
    common = ("".join(c for c in s if " " <= c < "\u0250" or "\u4e00" <= c < "\u4e80" or c in "\n\u3000\u2581") for s in texts)
    lines = [line for s in common for line in s.split("\n") if line.strip()]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_prefix=os.path.join(folder, "tokenizer"), vocab_size=1500,
                                             character_coverage=0.999, num_threads=1, minloglevel=2, max_sentence_length=10000, **how)
    path = os.path.join(folder, "tokenizer.model")
    with open(path, "rb") as f:
        data = f.read()
    os.remove(path)
    os.remove(os.path.join(folder, "tokenizer.vocab"))
    return data


def unigram(folder, texts, data, normalizer, pre_tokenizer, fallback):
    proto = protos.ModelProto.FromString(data)
    tok = Tokenizer(Unigram([(p.piece, p.score) for p in proto.pieces], proto.trainer_spec.unk_id, fallback))
    if normalizer:
        tok.normalizer = normalizer(proto.normalizer_spec.precompiled_charsmap)
    tok.pre_tokenizer = pre_tokenizer
    tok.add_special_tokens(["<s>", "</s>"])
    tok.add_tokens([AddedToken("<mask>", lstrip=True, normalized=False), AddedToken("\u00e9!", normalized=True)])
    tok.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    text = tok.to_str()
    tok = Tokenizer.from_str(text)  # scores are rounded when they are read
    zipped(os.path.join(folder, "tokenizer.json.gz"), text.encode())
    golden(folder, texts, lambda s: (tok.encode(s, add_special_tokens=False).ids, tok.encode(s).ids))


def spm(folder, texts, data):
    zipped(os.path.join(folder, "tokenizer.model.gz"), data)
    model = sentencepiece.SentencePieceProcessor(model_proto=data)
    golden(folder, texts, lambda s: (model.encode(s), [model.bos_id()] + model.encode(s)))


def main():
    out = sys.argv[1]
    with gzip.open(os.path.join(out, "texts.jsonl.gz"), "rt") as f:
        texts = [json.loads(line)["text"] for line in f]
    if len(sys.argv) > 2:
        out, known, r = sys.argv[2], "\n".join(texts), random.Random(int(sys.argv[3]))

        def piece():
            at = r.randrange(len(known))
            return known[at:at + r.choice([1, 1, 2, 3, 8, 20, 60, 400])]

        texts = ["".join(piece() for _ in range(r.choice([1, 3, 10, 30]))) for _ in range(int(sys.argv[4]))]
        zipped(os.path.join(out, "texts.jsonl.gz"), "".join(json.dumps({"text": s}) + "\n" for s in texts).encode())
    out = os.path.join(out, "foreign")
    ranks = tekken(os.path.join(out, "tekken"), texts, 3000)
    n = len(ranks)
    tiktoken_file(os.path.join(out, "qwen", "qwen.tiktoken"), texts, ranks, QWEN,
                  ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + ["<|extra_%d|>" % i for i in range(205)], lambda s: [unicodedata.normalize("NFC", s)])
    tiktoken_file(os.path.join(out, "kimi", "tiktoken.model"), texts, ranks, KIMI, ["<|reserved_token_%d|>" % i for i in range(n, n + 258)], pieces)
    rules = trained(os.path.join(out, "unigram"), texts, model_type="unigram")
    plain = trained(os.path.join(out, "unigram_bytes"), texts, model_type="unigram", byte_fallback=True, normalization_rule_name="identity",
                    remove_extra_whitespaces=False)
    unigram(os.path.join(out, "unigram"), texts, rules, Precompiled, Both([WhitespaceSplit(), Metaspace(prepend_scheme="always")]), False)
    unigram(os.path.join(out, "unigram_strip"), texts, plain, lambda _: Sequence([Strip(), Replace(Regex(" {2,}"), " ")]), Metaspace(prepend_scheme="always"), True)
    unigram(os.path.join(out, "unigram_bytes"), texts, plain, None, Metaspace(prepend_scheme="first", split=False), True)
    spm(os.path.join(out, "spm_unigram"), texts, plain)
    spm(os.path.join(out, "spm_bpe"), texts, trained(os.path.join(out, "spm_bpe"), texts, model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
                                                     remove_extra_whitespaces=False, split_digits=True, allow_whitespace_only_pieces=True, user_defined_symbols=["<|im_start|>", "\t"]))
    spm(os.path.join(out, "spm_bpe_rules"), texts, trained(os.path.join(out, "spm_bpe_rules"), texts, model_type="bpe"))
    proto = protos.ModelProto.FromString(gzip.open(os.path.join(out, "spm_bpe", "tokenizer.model.gz")).read())
    for p in proto.pieces:  # as those of Llama 2 and Mistral
        if len(p.piece) > 1 and not p.piece.strip("\u2581"):
            p.score = -1e9
    assert sum(p.score == -1e9 for p in proto.pieces) > 3
    spm(os.path.join(out, "spm_blanks"), texts, proto.SerializeToString())


main()
