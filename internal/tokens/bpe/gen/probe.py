#!/usr/bin/env python3
"""Probes the Hugging Face tokenizers library for the Unicode facts that it uses, and writes them as JSON.

    pip install tokenizers==0.23.2 && python3 probe.py > unicode.json && go run . unicode.json ../tables.go

The library's regex engine and its normalization tables come from different Unicode versions, and neither is Go's:
so both are asked, code point by code point, and not taken from the Unicode database.
Classes are hex ranges. NFC: decomp (code point -> full canonical decomposition), comp (pair -> code point), ccc
(combining class as a number that only has to sort like the library sorts).
"""
import json
import sys
import unicodedata

from tokenizers import Regex, normalizers, pre_tokenizers

ALL = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
PROPERTIES = ("L", "N", "M", "P", "S", "Z", "Lu", "Ll", "Lt", "Lm", "Lo", "Nd", "Nl", "No", "Mn", "Mc", "Han", "Hiragana", "Katakana", "Hangul", "Latin", "Cyrillic",
              "Greek", "Arabic", "Hebrew", "Thai", "Devanagari")
CLASSES = {n: r"\p{%s}" % n for n in PROPERTIES} | {"WS": r"\s", "OnigWord": r"\w", "OnigDigit": r"\d"}


def ranges(cps):
    out = []
    for c in cps:
        if out and out[-1][1] == c - 1:
            out[-1][1] = c
        else:
            out.append([c, c])
    return ["%x" % a if a == b else "%x-%x" % (a, b) for a, b in out]


def members(pattern):
    """Code points that the regex engine matches: a split that removes everything else leaves them."""
    found = []
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    for at in range(0, len(ALL), 4096):
        for piece, _ in split.pre_tokenize_str("".join(map(chr, ALL[at:at + 4096]))):
            found += [ord(ch) for ch in piece]
    return ranges(sorted(found))


def words():
    """Word characters of the other regex engine, which added tokens with flags use."""
    word, split = [], pre_tokenizers.Whitespace()
    for at in range(0, len(ALL), 4096):
        part = ALL[at:at + 4096]
        text = "".join("a" + chr(c) for c in part)
        kept = {}
        for piece, (start, _) in split.pre_tokenize_str(text):
            for k, ch in enumerate(piece):
                kept[start + k] = start
        word += [c for k, c in enumerate(part) if 2 * k + 1 in kept and kept[2 * k + 1] == kept[2 * k]]
    return ranges(word)


def digits():
    split = pre_tokenizers.Digits(individual_digits=True)
    out = []
    for at in range(0, len(ALL), 4096):
        part = ALL[at:at + 4096]
        text = "".join("a" + chr(c) for c in part)
        starts = {start for _, (start, _) in split.pre_tokenize_str(text)}
        out += [c for k, c in enumerate(part) if 2 * k + 1 in starts]
    return ranges(out)


def apart(split):
    """Code points that the pre-tokenizer sets apart from letters on both sides."""
    out = []
    for at in range(0, len(ALL), 4096):
        part = ALL[at:at + 4096]
        bounds = {o for _, o in split.pre_tokenize_str("".join("a" + chr(c) for c in part))}
        out += [c for k, c in enumerate(part) if (2 * k + 1, 2 * k + 2) in bounds]
    return ranges(out)


def mapping(normalizer, other):
    """Code points of which the normalizers make different things, and what the first one makes."""
    out, mark = [], "\u2603"
    for at in range(0, len(ALL), 4096):
        part = ALL[at:at + 4096]
        text = mark.join(chr(c) for c in part if chr(c) != mark)
        made = normalizer.normalize_str(text).split(mark)
        same = other.normalize_str(text).split(mark)
        assert len(made) == len(same)
        out += [[c] + [ord(x) for x in d] for c, d, s in zip([c for c in part if chr(c) != mark], made, same) if d != s]
    return out


def main():
    nfd, nfc = normalizers.NFD(), normalizers.NFC()
    decomp = {}
    for c in ALL:
        d = nfd.normalize_str(chr(c))
        if d != chr(c):
            decomp[c] = [ord(x) for x in d]
    # A representative mark for each combining class that Unicode has; the library's own classes are then found by
    # asking, for each candidate, before which representatives it is moved.
    reps = {}
    for c in ALL:
        k = unicodedata.combining(chr(c))
        known = k == 1 or nfd.normalize_str("a" + chr(c) + chr(0x334)) != "a" + chr(c) + chr(0x334)
        if k and known and c not in decomp and k not in reps:
            reps[k] = c
    order = sorted(reps)
    ccc = {}
    for c in ALL:
        if c in decomp:
            continue
        ch = chr(c)
        # a mark of class k: every rep of a higher class before it is swapped behind it
        hi, lo = chr(reps[240]), chr(reps[1])
        if nfd.normalize_str("a" + hi + ch) == "a" + ch + hi:
            moved = True
        elif nfd.normalize_str("a" + ch + lo) == "a" + lo + ch:
            moved = True
        else:
            moved = False
        if not moved:
            continue
        below = [k for k in order if reps[k] != c and nfd.normalize_str("a" + ch + chr(reps[k])) == "a" + chr(reps[k]) + ch]  # rep < c
        above = [k for k in order if reps[k] != c and nfd.normalize_str("a" + chr(reps[k]) + ch) == "a" + ch + chr(reps[k])]  # rep > c
        same = [k for k in order if k not in below and k not in above]
        assert len(same) == 1, (hex(c), same)
        ccc[c] = same[0]
    comp = []
    for c, d in decomp.items():
        if nfc.normalize_str("".join(map(chr, d))) == chr(c):
            if len(d) == 2:
                comp.append([d[0], d[1], c])
            else:
                head = nfc.normalize_str("".join(map(chr, d[:-1])))
                assert len(head) == 1, hex(c)
                comp.append([ord(head), d[-1], c])
    # Hangul is arithmetic: keep it out of the tables.
    hangul = set(range(0xAC00, 0xAC00 + 11172))
    decomp = {c: d for c, d in decomp.items() if c not in hangul}
    comp = [x for x in comp if x[2] not in hangul]
    classes = {n: members(p) for n, p in CLASSES.items()}
    classes["Word"] = words()
    classes["Digit"] = digits()
    classes["Punct"] = apart(pre_tokenizers.Punctuation())
    json.dump({
        "classes": classes,
        "decomp": [[c] + d for c, d in sorted(decomp.items())],
        "compat": mapping(normalizers.NFKD(), nfd),
        "comp": sorted(comp),
        "ccc": [[k, ranges(sorted(c for c in ccc if ccc[c] == k))] for k in sorted(set(ccc.values()))],
    }, sys.stdout, separators=(",", ":"))


main()
