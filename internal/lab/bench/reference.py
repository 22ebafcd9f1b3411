"""Hugging Face's tokenizers, and fastokens and gigatoken where they are installed, on the texts of BenchmarkEncode, in MB per
second of processor time.

Usage: reference.py TEXTS MODEL..., where TEXTS has one file per kind of text with a JSON list of prompts, and each MODEL is a
folder with tokenizer.json.gz. Cold is the first pass with a fresh tokenizer, the better of two; known is the sum over the
prompts of the best of five later passes, like the Go side. Hugging Face's library encodes fewer prompts up to 0.x, which is
slow. TEXTS/MODEL.KIND.ids has the SHA-256 of Kvlane's ids of each prompt; kinds whose ids differ are marked DIFFERS.
"""
import array, gzip, hashlib, importlib.metadata, importlib.util, json, os, sys, tempfile, time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
KINDS = "en code zh json ru ar hi ko th ja emoji b64 minjs logs latex".split()


def hugging_face(path):
    import tokenizers

    tok = tokenizers.Tokenizer.from_file(path)
    return lambda text: tok.encode(text, add_special_tokens=False), lambda e: array.array("I", e.ids).tobytes()


def fastokens(path):
    import fastokens

    tok = fastokens.Tokenizer.from_file(path)
    return lambda text: tok.encode_batch_flat([text]), lambda e: e[0]


def gigatoken(path):
    import gigatoken

    return gigatoken.Tokenizer(path).encode, lambda e: e.astype("<u4").tobytes()


def once(encode, prompts):
    times = []
    for p in prompts:
        start = time.process_time_ns()
        encode(p)
        times.append(time.process_time_ns() - start)
    return times


def rates(load, path, prompts):
    best = lambda passes: sum(len(p.encode()) for p in prompts) * 1e3 / sum(map(min, zip(*passes)))
    colds = []
    for _ in range(2):
        encode, ids = load(path)
        encode("x y z")  # what the library makes on first use
        colds.append(once(encode, prompts))
    sums = [hashlib.sha256(ids(encode(p))).hexdigest() for p in prompts]
    return best(colds), best([once(encode, prompts) for _ in range(5)]), sums


for name, module, load, most in (
    ("Hugging Face tokenizers", "tokenizers", hugging_face, 4),
    ("fastokens", "fastokens", fastokens, None),
    ("gigatoken", "gigatoken", gigatoken, None),
):
    if importlib.util.find_spec(module) is None:
        continue
    version = importlib.metadata.version(module)
    if not version.startswith("0."):
        most = None
    print(f"{name} {version}, MB per CPU-second, cold/known:")
    for model in sys.argv[2:]:
        with gzip.open(os.path.join(model, "tokenizer.json.gz")) as f, tempfile.NamedTemporaryFile(suffix=".json") as plain:
            plain.write(f.read())
            plain.flush()
            cells = []
            for kind in KINDS:
                with open(os.path.join(sys.argv[1], kind + ".json"), encoding="utf-8") as f:
                    cold, known, sums = rates(load, plain.name, json.load(f)[:most])
                with open(os.path.join(sys.argv[1], f"{os.path.basename(model)}.{kind}.ids"), encoding="utf-8") as f:
                    differs = "" if f.read().split()[: len(sums)] == sums else " DIFFERS"
                cells.append(f"{kind} {cold:.3g}/{known:.3g}{differs}")
        print(f"  {os.path.basename(model)}: " + "  ".join(cells), flush=True)
