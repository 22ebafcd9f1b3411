#!/usr/bin/env python3
"""Writes ../classes.txt: which tokenizer class transformers takes for which model type (pip install transformers==5.19.0).

A line "type CLASS model_type ..." for each class of the mapping, "forced model_type ..." for those whose tokenizer_class is
not believed, "builds CLASS ..." for the classes that build a tokenizer of their own from the vocabulary of tokenizer.json.
"""
import collections
import glob
import importlib
import inspect
import os
import sys

import transformers
from transformers.models.auto import tokenization_auto as auto
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend

types = collections.defaultdict(list)
for model, name in auto.TOKENIZER_MAPPING_NAMES.items():
    if name:
        types[name.removesuffix("Fast") if name != "PreTrainedTokenizerFast" else name].append(model)
builds = set()
for path in glob.glob(os.path.join(os.path.dirname(transformers.__file__), "models", "*", "tokenization_*.py")):
    name = "transformers.models.%s.%s" % (os.path.basename(os.path.dirname(path)), os.path.basename(path)[:-3])
    try:
        module = importlib.import_module(name)
    except Exception as e:
        print("not loaded:", name, type(e).__name__, file=sys.stderr)
        continue
    for name, cls in vars(module).items():
        if inspect.isclass(cls) and issubclass(cls, PreTrainedTokenizerBase) and cls.__module__ == module.__name__:
            if not issubclass(cls, TokenizersBackend) or "__init__" in cls.__dict__:
                builds.add(name.removesuffix("Fast"))
lines = ["type %s %s" % (name, " ".join(sorted(models))) for name, models in sorted(types.items())]
lines.append("forced " + " ".join(sorted(auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS)))
lines.append("builds " + " ".join(sorted(builds)))
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "classes.txt"), "w", encoding="utf-8") as f:
    f.write("\n".join(lines) + "\n")
