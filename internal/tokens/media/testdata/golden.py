"""Write images.jsonl.gz and counts.jsonl.gz: what stock vLLM makes of generated images. Run by the Python of vLLM.

images: a header's size as Pillow loads it, whether vLLM converts the image, and vLLM's hash of it.
counts: the number of tokens, or the tokens, that transformers' processors put in an image's place.
"""
import base64
import gzip
import io
import json
import pathlib
import random

import torch
from PIL import Image
from transformers import Mistral3Config, PixtralVisionConfig
from transformers.models.glm46v import image_processing_glm46v as glm
from transformers.models.qwen2_vl import image_processing_qwen2_vl as qwen
from vllm.model_executor.models.mistral3 import Mistral3HFEncoderInfo
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media.image import ImageMediaIO

here = pathlib.Path(__file__).resolve().parent
r = random.Random(16)


def picture(mode, size):
    rgba = Image.new("RGBA", size)
    for _ in range(6):
        color = tuple(r.randrange(256) for _ in range(4))
        box = [r.randrange(size[0]), r.randrange(size[1])]
        rgba.paste(color, (*box, box[0] + r.randrange(1, 40), box[1] + r.randrange(1, 40)))
    return rgba.convert("RGB").convert(mode) if mode not in ("RGBA", "LA", "I;16") else rgba.convert("L").convert("I;16") if mode == "I;16" else rgba.convert(mode)


def encoded(image, form, **options):
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def exif(orientation):
    e = Image.Exif()
    e[0x0112] = orientation
    return e.tobytes()


def images():
    for n in range(260):
        size = (r.randrange(1, 90), r.randrange(1, 90))
        kind = n % 26
        more = [picture("RGB", size) for _ in range(2)]
        yield (lambda: encoded(picture("RGB", size), "PNG"), lambda: encoded(picture("RGBA", size), "PNG"),
               lambda: encoded(picture("L", size), "PNG"), lambda: encoded(picture("P", size), "PNG"),
               lambda: encoded(picture("1", size), "PNG"), lambda: encoded(picture("LA", size), "PNG"),
               lambda: encoded(picture("I;16", size), "PNG"), lambda: encoded(picture("RGB", size), "PNG", transparency=(0, 0, 0)),
               lambda: encoded(more[0], "PNG", save_all=True, append_images=more), lambda: encoded(picture("RGB", size), "PNG", exif=exif(6)),
               lambda: encoded(picture("RGB", size), "JPEG"), lambda: encoded(picture("RGB", size), "JPEG", progressive=True),
               lambda: encoded(picture("L", size), "JPEG"), lambda: encoded(picture("CMYK", size), "JPEG"),
               lambda: encoded(picture("RGB", size), "JPEG", exif=exif(r.randrange(1, 9)), comment=b"c" * 300),
               lambda: encoded(picture("RGB", size), "JPEG", quality=100, subsampling=0, icc_profile=b"\xff\xc0" * 900),
               lambda: encoded(picture("RGB", size), "WEBP"), lambda: encoded(picture("RGB", size), "WEBP", lossless=True),
               lambda: encoded(picture("RGBA", size), "WEBP"), lambda: encoded(picture("RGBA", size), "WEBP", lossless=True),
               lambda: encoded(more[0], "WEBP", save_all=True, append_images=more),
               lambda: encoded(picture("RGB", size), "WEBP", exif=exif(8)), lambda: encoded(picture("RGB", size), "WEBP", lossless=True, exif=exif(3)),
               lambda: encoded(picture("P", size), "GIF"), lambda: encoded(picture("L", size), "GIF", comment=b"c" * 300),
               lambda: encoded(more[0].convert("P"), "GIF", save_all=True, append_images=more, loop=0))[kind]()


with gzip.open(here / "images.jsonl.gz", "wt") as out:
    for data in images():
        media = ImageMediaIO().load_bytes(data)
        model = r.choice(["Qwen/Qwen2-VL-2B-Instruct", "/models/ü", "m"])
        print(json.dumps({"data": base64.b64encode(data).decode(), "width": media.media.width, "height": media.media.height, "model": model,
                          "rgb": media.io_config is None, "hash": MultiModalHasher.hash_kwargs("blake3", model_id=model, image=media)}), file=out)

mistral = Mistral3Config(vision_config=PixtralVisionConfig(patch_size=14), spatial_merge_size=2)
SIZES = [(r.randrange(1, 60), r.randrange(1, 60)) for _ in range(300)] + [(round(2 ** r.uniform(0, 13)), round(2 ** r.uniform(0, 13))) for _ in range(1700)]


def tokens(resize, patch, merge):
    try:
        h, w = resize()
    except ValueError:
        return -1
    return (h // patch) * (w // patch) // merge**2


with gzip.open(here / "counts.jsonl.gz", "wt") as out:
    for w, h in SIZES:
        row = {"width": w, "height": h}
        for name, patch, least, most in (("qwen2", 14, 3136, 12845056), ("qwen2_small", 14, 3136, 200704), ("qwen3", 16, 65536, 16777216)):
            row[name] = tokens(lambda: qwen.smart_resize(h, w, patch * 2, least, most), patch, 2)
        for name, least, most in (("glm", 12544, 9633792), ("glm_small", 12544, 501760)):
            row[name] = tokens(lambda: glm.smart_resize(2, h, w, 2, 28, least, most), 14, 2)
        for name, longest in (("mistral3", 1540), ("mistral3_small", 336)):
            columns, rows = Mistral3HFEncoderInfo(mistral, longest).get_patch_grid_size(image_width=w, image_height=h)
            row[name] = [columns, rows]
        print(json.dumps(row), file=out)

# Families that came later, for the sizes above: the rows and columns of tiles, and numbers of tokens.
from transformers.image_utils import SizeDict  # noqa: E402
from transformers.models.llama4 import image_processing_llama4 as llama4  # noqa: E402
from vllm.model_executor.models.gemma3_mm import Gemma3MultiModalProcessor  # noqa: E402
from vllm.model_executor.models.kimi_vl import KimiVLProcessingInfo  # noqa: E402
from vllm.multimodal.processing.processor import PromptReplacement, PromptUpdateDetails  # noqa: E402


class Namespace:
    def __init__(self, **members):
        self.__dict__.update(members)


def kimi(limit):
    info = object.__new__(KimiVLProcessingInfo)
    processor = Namespace(image_processor=Namespace(patch_size=14, merge_kernel_size=[2, 2], in_token_limit=limit))
    info.get_hf_processor = lambda: processor
    return info


with gzip.open(here / "tiles.jsonl.gz", "wt") as out:
    for w, h in SIZES:
        row = {"width": w, "height": h}
        for name, most, largest in (("llama4", 16, False), ("llama4_5", 5, False), ("llama4_largest", 16, True)):
            best = llama4.get_best_fit((h, w), torch.tensor(llama4.find_supported_resolutions(most, SizeDict(height=336, width=336))), largest)
            row[name] = [int(side) // 336 for side in best]
        for name, limit in (("kimi_vl", 4096), ("kimi_vl_small", 256)):
            row[name] = kimi(limit).get_num_image_tokens(image_width=w, image_height=h)
        print(json.dumps(row), file=out)

# Gemma 3's prompts: ids 1 to 4 are that many line feeds, 7 an image's mark, 8 its token, 9 its end, others text.
gemma = object.__new__(Gemma3MultiModalProcessor)
gemma.info = Namespace(get_tokenizer=lambda: Namespace(get_vocab=lambda: {"\n" * n: n for n in range(1, 5)}))
with gzip.open(here / "gemma.jsonl.gz", "wt") as out:
    for _ in range(2000):
        prompt = []
        for _ in range(r.randrange(12)):
            prompt.append(r.choice([5, 6, 7, 7, 1, 2, 3, 4]))
            if prompt[-1] < 5 and len(prompt) > 1 and prompt[-2] < 5:  # a tokenizer joins them
                prompt.pop()
        images = prompt.count(7)
        update = PromptReplacement(modality="image", target=[7], replacement=PromptUpdateDetails.select_token_id([2, 7, 8, 8, 9, 2], 8))
        updates = {"image": [[update.resolve(i)] for i in range(images)]}
        ids, _, placeholders = gemma._apply_token_matches_with_placeholders(prompt, updates)
        found = [p.start_idx for p in placeholders.get("image", [])]
        print(json.dumps({"prompt": prompt, "ids": list(ids), "at": found if len(found) == images else None}), file=out)

# Families that cut images into tiles of the nearest aspect ratio, and DeepSeek's: numbers of tokens, for the sizes above.
from transformers import GotOcr2ImageProcessor  # noqa: E402
from vllm.model_executor.models.deepseek_ocr import DeepseekOCRProcessingInfo  # noqa: E402
from vllm.model_executor.models.deepseek_vl2 import DeepseekVL2ProcessingInfo  # noqa: E402
from vllm.transformers_utils.processors.deepseek_vl2 import DeepseekVLV2Processor  # noqa: E402
from vllm.transformers_utils.processors.internvl import InternVLImageProcessor, InternVLProcessor  # noqa: E402

CANDIDATES = [[384, 384], [384, 768], [768, 384], [384, 1152], [1152, 384], [384, 1536], [1536, 384], [768, 768], [384, 1920], [1920, 384], [384, 2304],
              [2304, 384], [768, 1152], [1152, 768], [384, 2688], [2688, 384], [384, 3072], [3072, 384], [768, 1536], [1536, 768], [384, 3456], [3456, 384],
              [1152, 1152]]
vl2 = object.__new__(DeepseekVL2ProcessingInfo)
candidates = object.__new__(DeepseekVLV2Processor)
candidates.candidate_resolutions, candidates.image_size, candidates.patch_size, candidates.downsample_ratio = CANDIDATES, 384, 14, 2
vl2.get_hf_processor = lambda: candidates
got = GotOcr2ImageProcessor(size={"height": 448, "width": 448}, min_patches=1, max_patches=12)


def chat(least, most, dynamic, thumbnail):
    processor = object.__new__(InternVLProcessor)
    processor.image_processor = InternVLImageProcessor(448, least, most, dynamic, thumbnail)
    processor.image_seq_length = 256
    return processor


CHATS = {"internvl_chat": chat(1, 12, True, True), "internvl_chat_6": chat(2, 6, True, False), "internvl_chat_1": chat(1, 12, False, True)}
with gzip.open(here / "crops.jsonl.gz", "wt") as out:
    for n, (w, h) in enumerate(SIZES):
        row = {"width": w, "height": h}
        row["internvl"] = 2 + 256 * got.get_number_of_image_patches(h, w, {"crop_to_patches": True})
        for name, processor in CHATS.items():
            row[name] = 2 + processor.get_num_image_tokens(image_width=w, image_height=h)
            if n % 40 == 0 and max(w, h) < 3000:  # what it says is what it does
                pixels = processor.image_processor(Image.new("RGB", (w, h)))["image_num_patches"]
                assert row[name] == 2 + 256 * pixels[0], (name, w, h)
        if n % 40 == 0 and max(w, h) < 3000:
            pixels = got([Image.new("RGB", (w, h))], crop_to_patches=True)
            assert row["internvl"] == 2 + 256 * int(pixels["num_patches"][0]), (w, h)
        row["deepseek_ocr"] = DeepseekOCRProcessingInfo.get_num_image_tokens(None, image_width=w, image_height=h)
        row["deepseek_vl2"] = vl2.get_num_image_tokens(image_width=w, image_height=h)
        print(json.dumps(row), file=out)
