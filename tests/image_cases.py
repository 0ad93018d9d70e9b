"""Processors of vision models made from their classes, and images of all kinds."""

import copy
import io
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import transformers
from PIL import Image, PngImagePlugin
from processor_cases import GEMMA, LLAVA, QWEN_VL, TRANSFORMERS_4, without_torchvision
from transformers import AutoTokenizer, ProcessorMixin

from gpuload.demo_data import demo_files

# Prints a text for each part, and the placeholder of the class for images; contents that are texts as they are.
PARTS = (
    "{%% for message in messages %%}<|im_start|>{{ message['role'] }}\n{%% if message['content'] is string %%}"
    "{{ message['content'] }}{%% else %%}{%% for part in message['content'] %%}{%% if part['type'] == 'image' %%}"
    "%s{%% else %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}{%% endif %%}<|im_end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)


@cache
def base_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo_files()[1])


def tokenizer(**named: str) -> Any:
    """Qwen's tokenizer with further special tokens, which are also its attributes, with their ids."""
    made = copy.deepcopy(base_tokenizer())
    made.add_special_tokens({"additional_special_tokens": sorted(set(named.values()))})
    for name, text in named.items():
        setattr(made, name, text)
        setattr(made, f"{name}_id", made.convert_tokens_to_ids(text))
    return made


def image_processor_named(name: str) -> Any:
    """The class that needs torchvision in runs with `-p on_torchvision`, in others the one that needs only PIL."""
    if "torchvision" not in sys.modules:
        return without_torchvision(name)
    return getattr(transformers, f"{name}Fast" if TRANSFORMERS_4 else name)


def _build(name: str, image_processor: str, tokens: dict[str, str], /, template: str | None = None, **more: Any) -> Any:
    own = tokenizer(**tokens)
    images = image_processor_named(image_processor)(**more.pop("images", {}))
    placeholder = tokens.get("boi_token") if name == "Gemma3Processor" else None
    placeholder = placeholder or tokens.get("image_token", "<image>")
    more["chat_template"] = template or PARTS % placeholder
    given = more.pop("chat_template") if name == "ChameleonProcessor" else None  # which takes none
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
        made = getattr(transformers, name)(image_processor=images, tokenizer=own, **more)
    if given is not None:
        made.chat_template = given
    return made


QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
IMAGE = {"image_token": "<image>", "video_token": "<video>"}
GEMMA3 = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
GLM = {"image_token": "<|image|>", "video_token": "<|video|>"}
AYA = {
    name: name
    for name in ("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE")
}
INTERN = {
    "image_token": "<IMG_CONTEXT>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
IDEFICS = {
    "image_token": "<image>",
    "fake": "<fake_token_around_image>",
    "end": "<end_of_utterance>",
    "g": "<global-img>",
}
IDEFICS |= {f"r{row}c{column}": f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)}
SMOL = {
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
LLAMA4 = {
    name: f"<|{name}|>"
    for name in ("image", "image_start", "image_end", "patch", "tile_x_separator", "tile_y_separator")
}
COHERE = {
    "image_token": "<|IMG_PATCH|>",
    "boi_token": "<|START_OF_IMG|>",
    "eoi_token": "<|END_OF_IMG|>",
    "line_break_token": "<|IMG_LINE_BREAK|>",
}
SMALL = {"images": {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 40}}}

BUILDERS: dict[str, Callable[[], Any]] = {
    "qwen2_vl": lambda: _build("Qwen2VLProcessor", "Qwen2VLImageProcessor", QWEN, QWEN_VL),
    "qwen2_5_vl": lambda: _build("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", QWEN, QWEN_VL, **SMALL),
    "qwen3_vl": lambda: _build("Qwen3VLProcessor", "Qwen2VLImageProcessor", QWEN, QWEN_VL, images={"patch_size": 16}),
    "llava": lambda: _build(
        "LlavaProcessor", "CLIPImageProcessor", IMAGE, LLAVA, patch_size=14, vision_feature_select_strategy="default"
    ),
    "llava_next": lambda: _build(
        "LlavaNextProcessor", "LlavaNextImageProcessor", IMAGE, patch_size=14, vision_feature_select_strategy="default"
    ),
    "llava_onevision": lambda: _build(
        "LlavaOnevisionProcessor",
        "LlavaOnevisionImageProcessor",
        IMAGE,
        num_image_tokens=729,
        vision_feature_select_strategy="full",
    ),
    "pixtral": lambda: _build(
        "PixtralProcessor",
        "PixtralImageProcessor",
        {"image_token": "[IMG]", "b": "[IMG_BREAK]", "e": "[IMG_END]"},
        patch_size=16,
    ),
    "idefics2": lambda: _build(
        "Idefics2Processor", "Idefics2ImageProcessor", IDEFICS | {"image_boundary_token": "<fake_token_around_image>"}
    ),
    "idefics3": lambda: _build("Idefics3Processor", "Idefics3ImageProcessor", IDEFICS),
    "smolvlm": lambda: _build("SmolVLMProcessor", "SmolVLMImageProcessor", IDEFICS | SMOL, video_processor=None),
    "gemma3": lambda: _build("Gemma3Processor", "Gemma3ImageProcessor", GEMMA3, GEMMA),
    "gemma3_pan_and_scan": lambda: _build(
        "Gemma3Processor", "Gemma3ImageProcessor", GEMMA3, GEMMA, images={"do_pan_and_scan": True}
    ),
    "gemma4": lambda: _build(
        "Gemma4Processor",
        "Gemma4ImageProcessor",
        GEMMA3
        | {
            "image_token": "<|image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "video_token": "<|video|>",
        },
        feature_extractor=None,
        video_processor=None,
    ),
    "gemma3n": lambda: _build(
        "Gemma3nProcessor",
        "SiglipImageProcessor",
        GEMMA3 | {"audio_token": "<audio_soft_token>", "boa_token": "<boa>", "eoa_token": "<eoa>"},
        feature_extractor=None,
    ),
    "paligemma": lambda: _build("PaliGemmaProcessor", "SiglipImageProcessor", IMAGE, images={"image_seq_length": 16}),
    "aria": lambda: _build("AriaProcessor", "AriaImageProcessor", {"image_token": "<|img|>"}),
    "aya_vision": lambda: _build("AyaVisionProcessor", "GotOcr2ImageProcessor", AYA),
    "cohere2_vision": lambda: _build("Cohere2VisionProcessor", "Cohere2VisionImageProcessor", COHERE),
    "chameleon": lambda: _build("ChameleonProcessor", "ChameleonImageProcessor", IMAGE),
    "ernie4_5_vl": lambda: _build(
        "Ernie4_5_VLMoeProcessor",
        "Ernie4_5_VLMoeImageProcessor",
        {
            "image_token": "<|IMAGE_PLACEHOLDER|>",
            "image_start_token": "<|IMAGE_START|>",
            "image_end_token": "<|IMAGE_END|>",
            "video_token": "<|VIDEO_PLACEHOLDER|>",
            "video_start_token": "<|VIDEO_START|>",
            "video_end_token": "<|VIDEO_END|>",
        },
    ),
    "got_ocr2": lambda: _build(
        "GotOcr2Processor", "GotOcr2ImageProcessor", {"image_token": "<imgpad>", "s": "<img>", "e": "</img>"}
    ),
    "internvl": lambda: _build("InternVLProcessor", "GotOcr2ImageProcessor", INTERN, images={"crop_to_patches": True}),
    "janus": lambda: _build(
        "JanusProcessor",
        "JanusImageProcessor",
        {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "mllama": lambda: _build("MllamaProcessor", "MllamaImageProcessor", {"image_token": "<|image|>"}),
    "ovis2": lambda: _build(
        "Ovis2Processor", "Ovis2ImageProcessor", {"image_token": "<image>", "atom": "<image_atom>"}
    ),
    "glm4v": lambda: _build("Glm4vProcessor", "Glm4vImageProcessor", GLM),
    "glm46v": lambda: _build("Glm46VProcessor", "Glm46VImageProcessor", GLM),
    "video_llama_3": lambda: _build("VideoLlama3Processor", "VideoLlama3ImageProcessor", IMAGE),
    "deepseek_vl": lambda: _build(
        "DeepseekVLProcessor", "DeepseekVLImageProcessor", {"image_token": "<image_placeholder>"}
    ),
    "deepseek_ocr2": lambda: _build("DeepseekOcr2Processor", "DeepseekOcr2ImageProcessor", IMAGE),
    "granite_docling": lambda: _build("GraniteDoclingProcessor", "GraniteDoclingImageProcessor", IDEFICS),
    "paddleocr_vl": lambda: _build(
        "PaddleOCRVLProcessor", "PaddleOCRVLImageProcessor", {"image_token": "<|IMAGE_PLACEHOLDER|>"}
    ),
    "exaone4_5": lambda: _build("Exaone4_5_Processor", "Qwen2VLImageProcessor", QWEN),
    "lightonocr": lambda: _build(
        "LightOnOcrProcessor",
        "PixtralImageProcessor",
        {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"},
    ),
    "minicpmv4_6": lambda: _build("MiniCPMV4_6Processor", "MiniCPMV4_6ImageProcessor", QWEN, video_processor=None),
    "llama4": lambda: _build("Llama4Processor", "Llama4ImageProcessor", LLAMA4),
    "lfm2_vl": lambda: _build(
        "Lfm2VlProcessor",
        "Lfm2VlImageProcessor",
        {
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail": "<|img_thumbnail|>",
        },
    ),
    "perception_lm": lambda: _build(
        "PerceptionLMProcessor",
        "PerceptionLMImageProcessor",
        {"image_token": "<|image|>", "video_token": "<|video|>"},
        patch_size=14,
        video_processor=None,
    ),
}


def encoded(image: Any, format: str, **settings: Any) -> bytes:
    """The file of an image."""
    file = io.BytesIO()
    image.save(file, format, **settings)
    return file.getvalue()


def picture(width: int, height: int, mode: str = "RGB") -> Any:
    """An image with a gradient, of any mode."""
    made = Image.linear_gradient("L").resize((width, height))
    return made.convert(mode)


def exif(orientation: int) -> Any:
    """Metadata with an orientation."""
    made = Image.Exif()
    made[0x0112] = orientation
    return made


XMP = (
    b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
)


def text_behind(png: bytes) -> bytes:
    """A PNG with its texts and EXIF behind its pixels."""
    chunks, moved, at = [png[:8]], [], 8
    while at < len(png):
        end = at + 12 + int.from_bytes(png[at : at + 4])
        (moved if png[at + 4 : at + 8] in (b"tEXt", b"zTXt", b"iTXt", b"eXIf") else chunks).append(png[at:end])
        at = end
    return b"".join([*chunks[:-1], *moved, chunks[-1]])


def png_texts(width: int, height: int) -> Iterator[tuple[str, bytes]]:
    """A PNG with texts, some of which turn it."""
    profile = exif(8).tobytes()
    profile = f"\nexif\n{len(profile)}\n{profile.hex()}"
    for kind, name, value in (
        ("text", "Software", "a camera"),
        ("text", "Raw profile type exif", profile),
        ("zipped text", "Raw profile type exif", profile),
        ("itxt", "XML:com.adobe.xmp", XMP.decode()),
        ("text", "exif", exif(6).tobytes().decode("latin1")),
        ("text", "ex", "if"),
    ):
        about = PngImagePlugin.PngInfo()
        (about.add_itxt if kind == "itxt" else about.add_text)(name, value, zip="zipped" in kind)
        made = encoded(picture(width, height), "PNG", pnginfo=about)
        yield f"png {kind} {name}", made
        yield f"png {kind} {name} behind", text_behind(made)
    yield "png turned behind", text_behind(encoded(picture(width, height), "PNG", exif=exif(6)))


def encodings(width: int = 90, height: int = 61) -> Iterator[tuple[str, bytes]]:
    """The files of an image in many encodings, by their names."""
    for mode in ("RGB", "L", "CMYK"):
        yield f"jpeg {mode}", encoded(picture(width, height, mode), "JPEG")
    yield "jpeg progressive", encoded(picture(width, height), "JPEG", progressive=True)
    for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"):
        made = picture(width, height, "L").convert("I;16") if mode == "I;16" else picture(width, height, mode)
        yield f"png {mode}", encoded(made, "PNG")
    yield "png turned", encoded(picture(width, height), "PNG", exif=exif(6))
    yield from png_texts(width, height)
    for orientation in range(1, 9):
        yield f"jpeg orientation {orientation}", encoded(picture(width, height), "JPEG", exif=exif(orientation))
    yield "webp", encoded(picture(width, height), "WEBP")
    yield "webp lossless turned", encoded(picture(width, height, "RGBA"), "WEBP", lossless=True, exif=exif(8))
    yield "gif", encoded(picture(width, height, "P"), "GIF")
    frames = [picture(width, height, "P"), picture(width, height, "P").rotate(90)]
    yield "gif animated", encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    yield (
        "webp animated",
        encoded(picture(width, height), "WEBP", save_all=True, append_images=[picture(width, height)]),
    )
    yield "png animated", encoded(picture(width, height), "PNG", save_all=True, append_images=[picture(width, height)])
    yield "bmp", encoded(picture(width, height), "BMP")
    yield "tiff", encoded(picture(width, height), "TIFF")
    yield "tiff turned", encoded(picture(width, height), "TIFF", exif=exif(6))
    yield "ppm", encoded(picture(width, height), "PPM")
    for format in ("JPEG", "WEBP"):
        yield f"{format.lower()} turned by XMP", encoded(picture(width, height), format, xmp=XMP)
    yield "mpo", encoded(picture(width, height), "MPO", save_all=True, append_images=[picture(width, height)])
    yield "gif long comment", encoded(picture(width, height, "P"), "GIF", comment=b"x" * 30000)
    yield "jpeg large metadata", encoded(picture(width, height), "JPEG", exif=exif(6), comment=b"x" * 65000)
