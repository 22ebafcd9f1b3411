"""Write families.jsonl.gz: tokens of images for the architectures that golden.py has no rows of. Run by the Python of vLLM.

vLLM's registry tells the class of an architecture and its processor; the numbers of tokens are those of transformers' image
processor with the settings of the model hub. What it says for a size is what it does, for each tenth size.
"""
import gzip
import importlib
import json
import pathlib
import random

import numpy
from PIL import Image
from transformers import Glm46VImageProcessor, GotOcr2ImageProcessor, Qwen2VLImageProcessor
from vllm.model_executor.models import registry

here = pathlib.Path(__file__).resolve().parent
r = random.Random(17)


def processor(architecture):
    """The names of vLLM's processor of an architecture, and of what knows its sizes."""
    module, name = registry._MULTIMODAL_MODELS[architecture]
    found = getattr(importlib.import_module("vllm.model_executor.models." + module), name)._processor_factory
    own = next(c for c in found.info.__mro__ if {"get_num_image_tokens", "_get_vision_info"} & vars(c).keys())
    return found.processor.__name__, own.__name__


qwen = Qwen2VLImageProcessor(size={"shortest_edge": 65536, "longest_edge": 16777216}, patch_size=16, temporal_patch_size=2, merge_size=2)
glm = Glm46VImageProcessor(size={"shortest_edge": 12544, "longest_edge": 9633792}, patch_size=14, temporal_patch_size=2, merge_size=2)
got = GotOcr2ImageProcessor(size={"height": 448, "width": 448}, min_patches=1, max_patches=12, crop_to_patches=True)
QWEN, GLM = ("Qwen3VLMultiModalProcessor", "Qwen3VLProcessingInfo"), ("Glm4vMultiModalProcessor", "Glm4vProcessingInfo")
INTERN = ("InternS1MultiModalProcessor", "InternS1ProcessingInfo")
GROUPS = [(qwen, QWEN, ["Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"]),
          (glm, GLM, ["GlmOcrForConditionalGeneration"]),
          (got, INTERN, ["InternS1ForConditionalGeneration", "InternVLForConditionalGeneration"])]


def says(images, w, h):
    try:
        patches = images.get_number_of_image_patches(h, w, {})
    except ValueError:
        return -1
    return 2 + 256 * patches if images is got else patches // images.merge_size**2


def does(images, w, h):
    out = images([Image.new("RGB", (w, h))], return_tensors="np")
    if images is got:
        return 2 + 256 * int(numpy.asarray(out["num_patches"])[0])
    return int(numpy.prod(numpy.asarray(out["image_grid_thw"])[0])) // images.merge_size**2


with gzip.open(here / "families.jsonl.gz", "wt") as out:
    for n in range(1000):
        w, h = ((r.randrange(1, 60), r.randrange(1, 60)) if n < 150 else (round(2 ** r.uniform(0, 13)), round(2 ** r.uniform(0, 13))))
        row = {"width": w, "height": h}
        for images, wanted, architectures in GROUPS:
            count = says(images, w, h)
            if n % 10 == 0 and count > 0 and w * h < 10**6:
                assert does(images, w, h) == count, (wanted, w, h, count, does(images, w, h))
            for architecture in architectures:
                assert n or processor(architecture) == wanted, (architecture, processor(architecture))
                row[architecture] = count
        print(json.dumps(row), file=out)
