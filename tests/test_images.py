"""Prompts with images: exactly what the processor makes of decoded images, for many classes of processors."""

import gc
import io
import os
import pickle
import random
import re
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_cases import BUILDERS, PARTS, XMP, encoded, encodings, exif, picture, text_behind
from PIL import Image, ImageFile, ImageOps, PngImagePlugin
from processor_cases import TRANSFORMERS_4
from tiers import core, exhaustive

import gpuload
from gpuload.core import backends
from gpuload.core.errors import DataError, NoRowsError, OptionError, PromptTooLongError
from gpuload.kinds.images import engine
from gpuload.kinds.images.engine import ImageEngine
from gpuload.kinds.images.options import ImageOptions
from gpuload.kinds.images.pixels import _OF_TEXT
from gpuload.kinds.images.reference import ImageReference
from gpuload.media.dry_run import DryRunner, NotUnderstoodError, image_token_of
from gpuload.media.headers import FileBytes, ImageError, decode, read_header, sample_of
from gpuload.media.references import Places, media_of
from gpuload.media.rule import ImageRule, same
from gpuload.sources import batches

# The processors that are exact by a rule; the others are run row by row.
BY_RULE = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "llava_onevision", "idefics3", "gemma3"),
    *("gemma3_pan_and_scan", "gemma4", "gemma3n", "aria", "aya_vision", "ernie4_5_vl", "internvl", "janus", "glm4v"),
    *("glm46v", "video_llama_3", "deepseek_vl", "deepseek_ocr2", "granite_docling", "paddleocr_vl", "exaone4_5"),
)
CORE = ("qwen2_5_vl", "qwen3_vl", "llava_next", "llava_onevision", "gemma3_pan_and_scan", "glm46v")
SIZES = ((56, 84), (90, 61), (33, 240), (250, 40), (120, 120), (1, 20), (17, 17))


@cache
def processor_named(name: str) -> Any:
    try:
        return BUILDERS[name]()
    except (AttributeError, ImportError) as error:  # another version of transformers, or it needs torchvision
        pytest.skip(f"cannot be built here: {error!s:.80}")


def expected_ids(processor: Any, messages: Sequence[Any], images: Sequence[bytes], turns: bool = True) -> list[int]:
    """What the processor makes of messages with decoded images."""
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    opened = [Image.open(io.BytesIO(data)) for data in images]
    opened = [(ImageOps.exif_transpose(each) if turns else each).convert("RGB") for each in opened]
    bos = processor.tokenizer.bos_token
    more: dict[str, Any] = {"add_special_tokens": False} if bos and text.startswith(bos) else {}
    if TRANSFORMERS_4 and opened and "torchvision" in sys.modules:  # LLaVA-NeXT's takes no lists from such
        more["return_tensors"] = "pt"
    more |= {"text": [text], "images": [opened] if opened else None}
    try:
        made = processor(**more)
    except AttributeError:  # Ovis2's asks for tensors, as trainers do
        made = processor(**more, return_tensors="pt")
    return list(map(int, made["input_ids"][0]))


def parts(*contents: str | None) -> list[dict[str, str]]:
    """Parts of a content: texts, and None for an image."""
    return [{"type": "image"} if each is None else {"type": "text", "text": each} for each in contents]


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def rows_of(seed: int) -> list[tuple[str, list[Any], list[bytes]]]:
    """Contents with marks, the same as parts, and images."""
    rng = random.Random(seed)

    def images(count: int) -> list[bytes]:
        sizes = [rng.choice(SIZES[:5]) for _ in range(count)]
        return [encoded(picture(width, height), rng.choice(("JPEG", "PNG"))) for height, width in sizes]

    return [
        ("<image>What is this?", parts(None, "What is this?"), images(1)),
        ("Is it \n\n<image>\n or <image>?", parts("Is it \n\n", None, "\n or ", None, "?"), images(2)),
        ("<image><image> Compare.\n", parts(None, None, " Compare.\n"), images(2)),
        ("caf\u00e9 <image>", parts("caf\u00e9 ", None), images(1)),
        ("Without any. ", [], []),
        ("  <image>  <image>\t<image> 3", parts("  ", None, "  ", None, "\t", None, " 3"), images(3)),
    ]


def table_of(rows: Sequence[tuple[str, Any, Sequence[bytes]]]) -> pa.Table:
    images = [[{"bytes": data, "path": None} for data in files] for _, _, files in rows]
    kind = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    return pa.table({"prompt": [user(text) for text, _, _ in rows], "images": pa.array(images, kind)})


@pytest.fixture
def qwen() -> Any:
    return processor_named("qwen2_5_vl")


def load(table: Any, processor: Any, **options: Any) -> Any:
    return gpuload.load(table, processor, **{"max_prompt_length": 20_000, "progress": False, **options})


# -- every class -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", core(BY_RULE, *CORE))
def test_ids_are_those_of_the_processor(name: str) -> None:
    processor, rows = processor_named(name), rows_of(1)
    prompts = load(table_of(rows), processor, verify="off")
    assert "row by row" not in prompts.report.engine
    assert len(prompts) == len(rows), prompts.report
    for row, (text, content, files) in zip(prompts, rows, strict=True):
        assert row["raw_prompt_ids"] == expected_ids(processor, user(content or text), files), text


@pytest.mark.parametrize("name", core(BY_RULE, "qwen3_vl"))
def test_sizes_that_are_learned_are_those_of_dry_runs(name: str) -> None:
    rng = random.Random(name)
    sizes = [(rng.randint(8, 700), rng.randint(8, 700)) for _ in range(20)]
    rule, other = (ImageRule(processor_named(name), {}) for _ in range(2))
    rule.learn(sizes)
    for size in sizes[:8]:
        try:
            (wanted,) = other.of((size,))
        except ValueError:  # an extreme ratio
            with pytest.raises(ValueError, match="ratio|Error"):
                rule.of((size,))
            continue
        assert same(rule.of((size,))[0], wanted), size


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava", "glm46v"])
def test_these_have_a_closed_form(name: str) -> None:
    rule = ImageRule(processor_named(name), {})
    rule.learn([(40 + k, 300 - k) for k in range(20)])
    assert rule.rung == "closed form"


@exhaustive
@pytest.mark.parametrize("name", sorted(set(BUILDERS) - set(BY_RULE)))
def test_other_processors_are_run_row_by_row_or_exact(name: str) -> None:
    processor, rows = processor_named(name), rows_of(2)
    try:
        prompts = load(table_of(rows), processor, verify="off")
    except NoRowsError:  # then the processor itself fails, too
        with pytest.raises(Exception):  # noqa: B017, PT011
            expected_ids(processor, user(rows[0][1]), rows[0][2])
        return
    for at, row in enumerate(prompts):
        text, content, files = rows[prompts.origins[at, 1]]
        assert row["raw_prompt_ids"] == expected_ids(processor, user(content or text), files), text


@pytest.mark.parametrize("count", [2, 60], ids=["dry runs", "closed form"])
def test_images_that_no_rule_understands_are_for_the_processor(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of LightOnOCR that are too small for a token."""
    processor, expansions = BUILDERS["qwen2_5_vl"](), ImageRule._expansions

    def of_some(self: Any, made: Any) -> Any:
        if any(text.count(processor.image_token) == 37 for text in made.replacements):
            raise NotUnderstoodError("what stands for an image has no special token")
        return expansions(self, made)

    monkeypatch.setattr(ImageRule, "_expansions", of_some)
    monkeypatch.setattr(engine, "_rules", {})
    images = [encoded(picture(100 + 28 * k, 100), "JPEG") for k in range(count)] + [encoded(picture(1036, 28), "JPEG")]
    table = pa.table({"prompt": ["<image>What is this?"] * len(images), "images": [[each] for each in images]})
    found = load(table, processor)
    assert len(found) == len(images)
    asked = user([{"type": "image"}, {"type": "text", "text": "What is this?"}])
    for row, image in ((0, images[0]), (count, images[-1])):
        assert found[row]["raw_prompt_ids"] == expected_ids(processor, asked, [image])
    assert found.batch([0, count])["image_grid_thw"].shape == (2, 3)


def test_batches_of_a_processor_that_is_run_row_by_row() -> None:
    """They say which tokens stand for images, as the processor does; with its inputs, they have the grids, too."""
    processor = BUILDERS["qwen2_5_vl"]()
    processor.image_processor.do_resize = False  # which only images of some sizes fit
    rows = [("<image> a", None, [encoded(picture(56, 84), "PNG")]), ("b", None, [])]
    for media, more in (("reference", set()), ("inputs", {"image_grid_thw", "pixel_values"})):
        prompts = load(table_of(rows), processor, media=media)
        assert "itself, row by row" in prompts.report.engine
        batch = prompts.batch([0, 1])
        assert {"image_grid_thw", "pixel_values"} & batch.keys() == more
        assert batch["mm_token_type_ids"].equal((batch["input_ids"] == processor.image_token_id).long())
        assert batch["mm_token_type_ids"].sum() == 6


# -- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transpose", [True, False])
def test_sizes_of_headers_are_those_of_decoded_images(transpose: bool) -> None:
    found = dict(encodings())
    assert len(found) > 25
    for name, data in found.items():
        image = Image.open(io.BytesIO(data))
        image = ImageOps.exif_transpose(image) if transpose else image
        image.load()
        header = read_header(data, transpose)
        assert (header.height, header.width) == (image.height, image.width), name


@pytest.mark.parametrize("transpose", [True, False])
def test_images_are_decoded_as_pillow_does(transpose: bool) -> None:
    turned = {f"turned {number}": encoded(picture(90, 61), "JPEG", exif=exif(number)) for number in range(1, 9)}
    for name, data in {**dict(encodings()), **turned}.items():
        image = Image.open(io.BytesIO(data))
        wanted = (ImageOps.exif_transpose(image) if transpose else image).convert("RGB")
        found = decode(data, transpose)
        assert (type(found), found.mode, found.size) == (Image.Image, "RGB", wanted.size), name
        assert found.tobytes() == wanted.tobytes(), name
        assert found.getexif() == wanted.getexif(), name


def test_images_are_not_copied_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    copy = Image.Image.copy
    monkeypatch.setattr(Image.Image, "copy", lambda self: copies.append(self) or copy(self))
    decode(encoded(picture(90, 61), "JPEG"))
    assert len(copies) == 1


def test_a_png_that_pillow_cannot_turn() -> None:
    about = PngImagePlugin.PngInfo()
    about.add_text("xmp", XMP.decode())
    png = encoded(picture(90, 61), "PNG", pnginfo=about)
    with pytest.raises(TypeError):
        ImageOps.exif_transpose(Image.open(io.BytesIO(png)))
    for data in (png, text_behind(png)):
        with pytest.raises(ImageError, match="its orientation cannot be read"):
            read_header(data)
        assert read_header(data, transpose=False) == (61, 90, "PNG")


@pytest.mark.parametrize("loader", ["transpose", "pil"])
def test_ids_of_all_encodings(qwen: Any, loader: str) -> None:
    rows = [("<image>?", parts(None, "?"), [data]) for _, data in encodings(90, 190)]
    prompts = load(table_of(rows), qwen, image_loader=loader, verify="off")
    assert len(prompts) == len(rows)
    wanted = [expected_ids(qwen, user(content), files, loader == "transpose") for _, content, files in rows]
    assert [row["raw_prompt_ids"] for row in prompts] == wanted
    grids = prompts.batch(range(len(rows)))["image_grid_thw"].unique(dim=0)
    assert len(grids) == 2  # Pillow itself turns a TIFF


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 199), (5, 999), (3000, 16), (1, 3), (3, 1), (2, 2)])
def test_extreme_sizes(qwen: Any, height: int, width: int) -> None:
    data = encoded(picture(width, height), "PNG")
    table = table_of([("<image>", [], [data])])
    try:
        wanted = expected_ids(qwen, user(parts(None)), [data])
    except ValueError as error:
        assert TRANSFORMERS_4  # which takes a height of 1 for one channel
        assert height == 1
        with pytest.raises(NoRowsError, match=re.escape(str(error))):
            load(table, qwen, verify="off")
        return
    prompts = load(table, qwen, verify="off")
    assert prompts[0]["raw_prompt_ids"] == wanted


@pytest.mark.parametrize("size", [(3, 150), (150, 3), (1, 150), (150, 1), (2, 150)])
def test_grids_of_images_with_few_rows_of_pixels(qwen: Any, size: tuple[int, int]) -> None:
    """Also where there is a closed form: transformers 4 takes a height of 3 for the channels."""
    rule, runs = ImageRule(qwen, {}), DryRunner(qwen, {}, on_meta=False)
    rule.learn([*((40 + k, 300 - k) for k in range(20)), (9, 1600), size])  # the most extreme is looked at
    assert rule.rung == "closed form"
    try:
        wanted = runs([size]).extras["image_grid_thw"][0].tolist()
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            rule.of((size,))
        return
    assert rule.of((size,))[0].extras["image_grid_thw"].tolist() == wanted


def test_ratios_that_the_processor_rejects_are_rejected(qwen: Any) -> None:
    good, wide = encoded(picture(20, 20), "PNG"), encoded(picture(402, 2), "PNG")
    prompts = load(table_of([("<image>", [], [good]), ("<image>", [], [wide])]), qwen)
    assert len(prompts) == 1
    assert "absolute aspect ratio must be smaller than 200" in str(prompts.report)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF"])
def test_truncated_files_are_found(format: str) -> None:
    data = encoded(picture(300, 200, "P" if format == "GIF" else "RGB"), format)
    assert read_header(data)[:2] == (200, 300)
    with pytest.raises(ImageError):
        read_header(data[: len(data) // 2])


def test_files_with_something_behind_their_end_are_decoded_and_kept() -> None:
    for format in ("JPEG", "PNG"):
        assert read_header(encoded(picture(30, 20), format) + b"\0\0\0")[:2] == (20, 30)


@pytest.mark.parametrize("load_truncated", [False, True])
def test_sizes_of_damaged_files_are_those_of_decoded_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_truncated: bool
) -> None:
    """Whatever is in a file: if it can be decoded, the header has its size, or it is refused."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", load_truncated)
    rng, files, compared = random.Random(load_truncated), [data for _, data in encodings(40, 31)], 0
    for _ in range(800):
        data = bytearray(rng.choice(files))
        at = rng.randrange(min(len(data), 400))
        if kind := rng.randrange(4):
            data[at : at + rng.randrange(3)] = rng.randbytes(kind)
        else:
            del data[rng.randrange(len(data)) :]
        (tmp_path / "file").write_bytes(data)
        try:
            found = [read_header(each, most_pixels=10**6) for each in (data, FileBytes(str(tmp_path / "file")))]
            image = decode(data)
        except ImageError:
            continue
        assert found[0] == found[1]
        assert (image.height, image.width) == found[0][:2], data.hex()
        compared += 1
    assert compared > 200


def test_flipped_bits_are_found_by_decoding() -> None:
    data = bytearray(encoded(picture(64, 64), "PNG"))
    data[data.index(b"IDAT") + 6] ^= 0xFF
    assert read_header(data)[:2] == (64, 64)
    with pytest.raises(ImageError):
        read_header(data, check="decode")


def test_decompression_bombs_are_refused() -> None:
    data = bytearray(encoded(picture(9, 9), "PNG"))
    data[16:24] = struct.pack(">II", 20_000, 20_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    with pytest.raises(ImageError, match="Pillow refuses it"):
        read_header(data)
    with pytest.raises(ImageError, match="max_image_pixels=1,000"):
        read_header(encoded(picture(40, 40), "PNG"), most_pixels=1000)


def test_programs_are_no_images() -> None:
    for data in (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"<svg xmlns=''/>", b"", b"\xff\xd8\xff"):
        with pytest.raises(ImageError):
            read_header(data)


# -- references ------------------------------------------------------------------------------------------------------


def test_paths_are_read_below_the_directory_of_the_data_only(tmp_path: Path, qwen: Any) -> None:
    inside, outside = tmp_path / "data", tmp_path / "other"
    for folder in (inside, outside):
        folder.mkdir()
        picture(50, 70).save(folder / "a.png")
    (inside / "link.png").symlink_to(outside / "a.png")
    paths = [["a.png"], [str(inside / "a.png")], ["../other/a.png"], [str(outside / "a.png")], ["link.png"], ["b.png"]]
    pq.write_table(pa.table({"prompt": ["<image>"] * 6, "images": paths}), inside / "rows.parquet")
    prompts = load(str(inside / "rows.parquet"), qwen)
    assert prompts.origins[:, 1].tolist() == [0, 1]
    assert prompts[0]["images"] == [{"height": 70, "width": 50, "format": "PNG", "path": str(inside / "a.png")}]
    assert "media_roots" in str(prompts.report)
    assert "no such file" in str(prompts.report)
    allowed = load(str(inside / "rows.parquet"), qwen, media_roots=[outside])
    assert allowed.origins[:, 1].tolist() == [0, 1, 2, 3, 4]


def test_errors_name_file_row_image_and_path(tmp_path: Path, qwen: Any) -> None:
    picture(50, 70).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    pq.write_table(pa.table({"prompt": ["<image><image>"], "images": [["a.png", "b.png"]]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet row 0: image 1 \('/.*b\.png'\): PNG of 70 x 50 pixels: "):
        load(str(tmp_path / "x.parquet"), qwen, strict=True)


def test_urls_are_not_opened(tmp_path: Path, qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import json
    import socket

    def refuse(*given: Any, **more: Any) -> Any:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    urls = ["http://169.254.169.254/a.png", "https://example.org/a.png", "ftp://example.org/a.png", "s3://b/a.png"]
    rows = [{"prompt": user([{"type": "image_url", "image_url": {"url": url}}])} for url in urls]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": user("a")}]))
    prompts = load(str(tmp_path / "x.jsonl"), qwen)
    assert prompts.origins[:, 1].tolist() == [4]
    assert str(prompts.report).count("URLs of images are not fetched, download them before") == len(urls)


def test_values_that_are_no_references(tmp_path: Path) -> None:
    nested: Any = "a.png"
    for _ in range(20_000):
        nested = {"image": nested}
    values = [
        *(
            "a\0b",
            "http://[x",
            "file://[x/a.png",
            "file:///etc/passwd",
            "/etc/passwd",
            "~",
            ".",
            "",
            "x" * 5000,
            nested,
        ),
        *({"bytes": "text"}, {"bytes": [1, 2]}, {"bytes": 7}, {"image": ["a.png"]}, [], 1.5, "data:", "data:,x", b""),
        *("data:image/png;base64,***", {"base64": 7}, {"path": None, "url": "//host/share/a.png"}, "/proc/self/mem"),
    ]
    for value in values:
        with pytest.raises(ImageError):
            read_header(media_of(value, Places(str(tmp_path))).open())


def test_of_files_only_the_beginning_and_the_end_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture(3000, 2000).effect_spread(20).save(tmp_path / "a.jpg", quality=95)
    read, right = [], os.pread

    def counted(*given: Any) -> bytes:
        read.append(right(*given))
        return read[-1]

    monkeypatch.setattr(os, "pread", counted)
    found = media_of("a.jpg", Places(str(tmp_path))).open()
    assert read_header(found)[:2] == (2000, 3000)
    assert sum(map(len, read)) < 10_000 < len(found)
    sample_of(found)
    assert sum(map(len, read)) < 25_000


def test_files_that_are_too_large_for_an_image_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "a.png", "wb") as file:
        file.truncate(1 << 34)  # without blocks on the disk
    monkeypatch.setattr(os, "pread", None)
    with pytest.raises(ImageError, match="it has 17,179,869,184 bytes, more than an image of max_image_pixels="):
        read_header(media_of("a.png", Places(str(tmp_path))).open())


def test_forms_of_references(tmp_path: Path) -> None:
    import base64

    data = encoded(picture(9, 8), "PNG")
    (tmp_path / "a b.png").write_bytes(data)
    text, places = base64.b64encode(data).decode(), Places(str(tmp_path))
    url = f"data:image/png;base64,{text}"
    given = [
        *(data, bytearray(data), {"bytes": data}, {"bytes": data, "path": "elsewhere"}, {"image": "a b.png"}, url),
        *({"bytes": None, "path": "a b.png"}, f"file://{tmp_path}/a%20b.png", {"image_url": {"url": url}}),
        *({"base64": text}, {"type": "image", "url": "a b.png"}),
    ]
    for value in given:
        assert bytes(media_of(value, places).read()) == data
    for wrong in (None, {}, {"bytes": None, "path": None}, 7, "http://x/a.png", "https://x/a.png", "data:image/png,x"):
        with pytest.raises(ImageError):
            media_of(wrong, places)


def test_urls_are_decoded_once_and_name_no_host(tmp_path: Path) -> None:
    for name in ("a b.png", "a%20b.png"):
        (tmp_path / name).write_text(name)
        url = (tmp_path / name).as_uri()
        for each in (url, url.replace("file://", "file://localhost"), url.replace("file://", "file:")):
            assert bytes(media_of(each, Places(str(tmp_path))).read()) == name.encode()
    for given in ("file://a.png", f"file://elsewhere{tmp_path}/a%20b.png"):
        with pytest.raises(ImageError, match=f"'{re.escape(given[:70])}.* names the host '(a.png|elsewhere)'"):
            media_of(given, Places(str(tmp_path)))


def test_base64_of_urls_may_have_lines() -> None:
    import base64

    data = encoded(picture(90, 80), "PNG")
    for kind in ("base64", "Base64", "BASE64"):
        url = f"data:image/png;{kind},{base64.encodebytes(data).decode()}"
        assert "\n" in url.strip()
        assert bytes(media_of(url, Places()).read()) == data
    with pytest.raises(ImageError, match="the base64 of its data: URL is wrong"):
        media_of("data:image/png;base64,YQ=*=", Places())


def test_images_in_parts_of_messages(tmp_path: Path, qwen: Any) -> None:
    picture(60, 90).save(tmp_path / "a.png")
    picture(90, 200).save(tmp_path / "b.png")
    first = [{"type": "image", "image": "a.png", "text": None}, {"type": "text", "text": "Which?", "image": None}]
    second = [{"type": "text", "text": "Or", "image": None}, {"type": "image", "image": None, "text": None}]
    table = pa.table({"prompt": [user(first), user([*first, *second])], "images": [None, ["b.png"]]})
    pq.write_table(table, tmp_path / "rows.parquet")
    prompts = load(str(tmp_path / "rows.parquet"), qwen)
    a, b = ((tmp_path / name).read_bytes() for name in ("a.png", "b.png"))
    assert prompts[0]["raw_prompt_ids"] == expected_ids(qwen, user(parts(None, "Which?")), [a])
    assert prompts[1]["raw_prompt_ids"] == expected_ids(qwen, user(parts(None, "Which?", "Or", None)), [a, b])


def test_json_lines_with_image_urls(tmp_path: Path, qwen: Any) -> None:
    import base64
    import json

    data = encoded(picture(30, 90), "JPEG")
    url = f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Read it."}]
    lines = [{"prompt": user(content)}, {"prompt": user("No image.")}, {"prompt": "A text."}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = load(str(tmp_path / "rows.jsonl"), qwen)
    wanted = [(user(parts(None, "Read it.")), [data]), (user("No image."), []), (user("A text."), [])]
    assert [row["raw_prompt_ids"] for row in prompts] == [expected_ids(qwen, *each) for each in wanted]


def test_one_image_per_row(qwen: Any) -> None:
    data = encoded(picture(30, 90), "JPEG")
    table = pa.table({"prompt": ["<image>a", "b"], "image": pa.array([{"bytes": data}, None])})
    prompts = load(table, qwen, image_key="image")
    assert [len(row["image"]) for row in prompts] == [1, 0]


# -- rows ------------------------------------------------------------------------------------------------------------


def test_rows_with_wrong_numbers_of_images_are_rejected(qwen: Any) -> None:
    data = encoded(picture(30, 90), "JPEG")
    rows = [("<image>", [], [data]), ("<image>", [], []), ("none", [], [data]), ("<image><image>", [], [data])]
    prompts = load(table_of(rows), qwen)
    assert prompts.origins[:, 1].tolist() == [0]
    assert "1 image in its column" in str(prompts.report)
    with pytest.raises(DataError, match=r"row 2: the row has 1 image in its column, but its messages have 0 places"):
        load(table_of(rows[:1] * 2 + rows[2:]), qwen, strict=True)


def test_errors_name_the_image(qwen: Any) -> None:
    data = encoded(picture(300, 90), "JPEG")
    with pytest.raises(DataError, match="row 0: image 1: JPEG of 90 x 300 pixels: it cannot be decoded"):
        load(table_of([("<image><image>", [], [data, data[:-40]])]), qwen, strict=True)
    with pytest.raises(NoRowsError, match="image 0: it is no image of a known format, JPEG, PNG, "):
        load(table_of([("<image>", [], [b"GIF is not this"])]), qwen)


def test_the_error_for_a_long_row_does_not_advise_truncation(qwen: Any) -> None:
    data = encoded(picture(300, 90), "JPEG")
    prompts = load(table_of([("<image>", [], [data])]), qwen, max_prompt_length=9, filter_overlong_prompts=False)
    with pytest.raises(PromptTooLongError, match="raise max_prompt_length, or set filter_overlong_prompts=True"):
        prompts.batch([0])


def assert_as_processor(rows: list[Any], processor: Any) -> None:
    """Rows (text, parts, images) have the processor's ids, and those that it rejects are dropped."""
    prompts = load(table_of(rows), processor, verify="off")
    kept = prompts.origins[:, 1].tolist()
    for at, (text, content, files) in enumerate(rows):
        try:
            wanted = expected_ids(processor, user(content or text), files)
        except Exception:  # releases of transformers differ in what
            assert at not in kept
        else:
            assert prompts[kept.index(at)]["raw_prompt_ids"] == wanted, text


@pytest.mark.parametrize("text", ["a <|image_pad|> b", "<|image_pad|>"])
def test_literal_tokens_of_images_are_as_for_the_processor(qwen: Any, text: str) -> None:
    data = encoded(picture(30, 90), "JPEG")
    rows = [(f"<image>{text}", parts(None, text), [data]), (text, [], []), ("fine", [], [])]
    assert_as_processor(rows, qwen)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma4", "internvl"])
def test_literal_tokens_of_other_media_are_as_for_the_processor(name: str) -> None:
    processor, data = processor_named(name), encoded(picture(30, 90), "JPEG")
    tokens = {getattr(processor, kind, None) for kind in ("video_token", "audio_token")} - {None}
    assert tokens
    texts = [f"a {token} b" for token in sorted(tokens)]
    rows = [*((f"<image>{text}", parts(None, text), [data]) for text in texts), *((text, [], []) for text in texts)]
    assert_as_processor([*rows, ("fine", [], [])], processor)


def test_literal_tokens_that_images_begin_with() -> None:
    processor = processor_named("gemma3")
    data = encoded(picture(30, 90), "JPEG")
    texts = ("<end_of_image> <image>", "<image><image_soft_token>", "<image>\n\n", "\n\n<image>\n", "<end_of_image>")
    rows = [*((text, parts(*_split(text)), [data]) for text in texts[:-1]), (texts[-1], [], [])]
    assert_as_processor(rows, processor)


def _split(text: str) -> list[str | None]:
    return [None if each == "<image>" else each for each in re.split("(<image>)", text) if each]


def test_the_filter_counts_tokens_of_images(qwen: Any) -> None:
    rows = rows_of(3)
    lengths = [len(expected_ids(qwen, user(content or text), files)) for text, content, files in rows]
    limit = sorted(lengths)[3]
    prompts = load(table_of(rows), qwen, max_prompt_length=limit)
    assert prompts.origins[:, 1].tolist() == [at for at, length in enumerate(lengths) if length <= limit]
    assert prompts.report.overlong == sum(length > limit for length in lengths)


def test_batches_have_what_the_processor_returns(qwen: Any) -> None:
    rows = rows_of(4)
    prompts = load(table_of(rows), qwen)
    batch = prompts.batch(range(len(rows)), padding="longest")
    grids, types = [], []
    for text, content, files in rows:
        rendered = qwen.apply_chat_template(user(content or text), add_generation_prompt=True, tokenize=False)
        opened = [Image.open(io.BytesIO(data)).convert("RGB") for data in files]
        made = qwen(text=[rendered], images=opened or None)
        grids += [list(map(int, grid)) for grid in made.get("image_grid_thw", [])]
        types.append(made["mm_token_type_ids"][0] if "mm_token_type_ids" in made else None)
    assert batch["image_grid_thw"].tolist() == grids
    assert batch["image_grid_thw"].dtype == batch["input_ids"].dtype
    mask = batch["attention_mask"].bool()
    if TRANSFORMERS_4:  # whose processors return none unless asked for them
        assert "mm_token_type_ids" not in batch
        assert not any(types)
    else:
        assert [row[kept].tolist() for row, kept in zip(batch["mm_token_type_ids"], mask, strict=True)] == types
    assert [row["image_grid_thw"].shape for row in prompts] == [(len(files), 3) for _, _, files in rows]
    (loaded,) = prompts.loader(len(rows), padding="longest")
    assert loaded["image_grid_thw"].tolist() == grids


def test_columns_have_references_and_no_bytes(qwen: Any) -> None:
    prompts = load(table_of(rows_of(5)), qwen)
    assert prompts.columns.nbytes < 2000
    assert {key for row in prompts for each in row["images"] for key in each} == {"height", "width", "format", "path"}


def test_verification_uses_decoded_images(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(6)
    prompts = load(table_of(rows), qwen, verify="full")
    assert prompts.report.check.rows == len(rows)
    assert not prompts.report.check.mismatches

    def wrong(self: Any, sizes: Any) -> Any:
        return [each._replace(core=np.append(each.core, each.core[-1])) for each in right(self, sizes)]

    right = ImageRule.of
    monkeypatch.setattr(ImageEngine, "rule", property(_trusting))
    monkeypatch.setattr(ImageRule, "of", wrong)
    with pytest.warns(UserWarning, match="the fast path differs from the tokenizer"):
        again = load(table_of(rows), qwen, verify="full")
    assert [row["raw_prompt_ids"] for row in again] == [row["raw_prompt_ids"] for row in prompts]


def _trusting(given: Any) -> Any:
    """A rule that no gate has seen."""
    if not given._exact_only and given._rule is None:
        given._rule = ImageRule(given._reference.processor, {})
    return given._rule


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_an_image_that_cannot_be_decoded_is_no_difference(qwen: Any, verify: str) -> None:
    """Its ids follow from its header. Whether its row is kept depends on `check_media`, not on the sample."""
    data = bytearray(encoded(picture(60, 60).effect_spread(20), "PNG"))
    at = data.index(b"IDAT") + 40
    data[at : at + 30] = bytes(30)
    table = table_of([("<image> a", None, [encoded(picture(90, 61), "PNG")]), ("<image> b", None, [bytes(data)])])
    prompts = load(table, qwen, verify=verify, strict=True)
    assert (len(prompts), prompts.report.check.rows) == (2, 1)
    assert "1 row could not be compared, such as Table row 1: image 0: it cannot be decoded" in str(prompts.report)
    assert len(load(table, qwen, verify="off")) == 2
    assert len(load(table, qwen, verify=verify, check_media="decode")) == 1


def test_a_rule_that_differs_is_not_used(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ImageRule.of
    monkeypatch.setattr(
        ImageRule,
        "of",
        lambda self, sizes: [e._replace(core=np.append(e.core, e.core[-1])) for e in right(self, sizes)],
    )
    monkeypatch.setattr(engine, "_rules", {})
    assert ImageEngine(ImageReference(qwen, ImageOptions())).rule is None


def test_a_rule_is_found_once_for_a_processor_that_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    processor, found, right = BUILDERS["qwen2_5_vl"](), [], ImageEngine._find_rule
    monkeypatch.setattr(ImageEngine, "_find_rule", lambda self: (found.append(self), right(self))[1])
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: setattr(processor.image_processor, "size", {"shortest_edge": 3136, "longest_edge": 40_000}),
        lambda: processor.tokenizer.add_tokens(["<|new|>"]),
        lambda: setattr(processor.tokenizer.backend_tokenizer, "normalizer", None),
        lambda: setattr(processor, "image_token", "<|vision_pad|>"),
    ]
    for number, change in enumerate(changes):
        change()
        for _ in range(2):
            assert ImageEngine(ImageReference(processor, ImageOptions())).rule is not None or number == 4
            assert len(found) == number + 1


def test_arguments_of_the_processor(qwen: Any) -> None:
    kwargs = {"size": {"shortest_edge": 28 * 28 * 100, "longest_edge": 28 * 28 * 120}}
    rows = [(text, content, files) for text, content, files in rows_of(7) if files]
    prompts = load(table_of(rows), qwen, mm_processor_kwargs=kwargs, verify="off")
    for row, (_, content, files) in zip(prompts, rows, strict=True):
        text = qwen.apply_chat_template(user(content), add_generation_prompt=True, tokenize=False)
        made = qwen(text=[text], images=[Image.open(io.BytesIO(data)).convert("RGB") for data in files], **kwargs)
        assert row["raw_prompt_ids"] == list(made["input_ids"][0])


def test_processors_that_take_no_lists_of_pixels_are_asked_for_tensors(
    qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LLaVA-NeXT's in transformers 4 with torchvision, which fails otherwise."""
    rows, kind = rows_of(13), type(qwen)
    wanted, right = [expected_ids(qwen, user(content or text), files) for text, content, files in rows], kind.__call__

    def called(self: Any, images: Any = None, text: Any = None, **kwargs: Any) -> Any:
        if images is not None and kwargs.get("return_tensors") != "pt":
            raise AttributeError("'list' object has no attribute 'shape'")
        return right(self, images=images, text=text, **kwargs)

    monkeypatch.setattr(kind, "__call__", called)
    assert [row["raw_prompt_ids"] for row in load(table_of(rows), qwen, verify="full")] == wanted


# -- pixels ----------------------------------------------------------------------------------------------------------


def made_of(processor: Any, rows: Sequence[Any]) -> Any:
    """What the processor makes of the images of a batch."""
    opened = [[Image.open(io.BytesIO(data)).convert("RGB") for data in files] for _, _, files in rows if files]
    text = [image_token_of(processor) * len(images) for images in opened]
    return processor(text=text, images=opened, return_tensors="pt", padding=True)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava_next"])
def test_inputs_of_batches_are_those_of_the_processor(name: str) -> None:
    processor, rows = processor_named(name), rows_of(9)
    prompts = load(table_of(rows), processor, media="inputs")
    batch, wanted = prompts.batch(range(len(rows))), made_of(processor, rows)
    assert batch["pixel_values"].equal(wanted["pixel_values"])
    batches = list(prompts.loader(2))
    assert len(batches) == 3
    for number, each in enumerate(batches):
        assert each["pixel_values"].equal(made_of(processor, rows[2 * number : 2 * number + 2])["pixel_values"])
        assert each["input_ids"].equal(batch["input_ids"][2 * number : 2 * number + 2])
    assert prompts[1]["multi_modal_inputs"]["pixel_values"].equal(made_of(processor, rows[1:2])["pixel_values"])
    assert prompts[4]["multi_modal_inputs"] == {}


@pytest.mark.parametrize("name", core(BY_RULE, *CORE))
def test_inputs_are_those_of_each_processor(name: str) -> None:
    processor, rows = processor_named(name), [row for row in rows_of(12) if row[2]][:3]
    prompts = load(table_of(rows), processor, media="inputs")
    batch, wanted = prompts.batch(range(3)), made_of(processor, rows)
    of_images = {each for each in wanted if not each.endswith(_OF_TEXT)}
    assert of_images
    for each in of_images:
        assert batch[each].equal(wanted[each])
    # Whatever else there is of tokens is of those of the batch.
    assert all(batch[each].shape == batch["input_ids"].shape for each in batch if each.endswith(_OF_TEXT))


@pytest.mark.parametrize("without", ["the same", "other pixels", "an error"])
def test_processors_are_given_text_where_that_changes_pixels(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processor, rows, texts = BUILDERS["qwen2_5_vl"](), rows_of(9), list[Any]()
    wanted, kind = made_of(processor, rows), type(processor)
    right = kind.__call__

    def called(self: Any, images: Any = None, text: Any = None, **kwargs: Any) -> Any:
        texts.append(text)
        if text is None and without == "an error":
            raise TypeError("text is None")
        made = right(self, images=images, text=text, **kwargs)
        if text is None and without == "other pixels":
            made["pixel_values"] = made["pixel_values"] + 1
        return made

    monkeypatch.setattr(kind, "__call__", called)
    prompts = load(table_of(rows), processor, media="inputs")
    tried = len(texts)
    for number in (1, 2):  # what was found out once is not tried again
        assert prompts.batch(range(len(rows)))["pixel_values"].equal(wanted["pixel_values"])
        assert len(texts) == tried + number
    assert (texts[-1] is None) == (without == "the same" and not TRANSFORMERS_4)  # which takes no images without text


def test_decoded_images_in_rows(qwen: Any, tmp_path: Path) -> None:
    rows = rows_of(10)
    pq.write_table(table_of(rows), tmp_path / "rows.parquet")
    prompts = load(str(tmp_path / "rows.parquet"), qwen, media="pil", cache_dir=str(tmp_path / "cache"))
    again = pickle.loads(pickle.dumps(prompts))
    for row, other, (_, _, files) in zip(prompts, again, rows, strict=True):
        wanted = [Image.open(io.BytesIO(data)).convert("RGB").tobytes() for data in files]
        assert [each.tobytes() for each in row["images"]] == [each.tobytes() for each in other["images"]] == wanted
    assert [each.size for each in prompts.images(1)] == [each.size for each in prompts[1]["images"]]
    assert list((tmp_path / "cache" / "media").iterdir())
    del prompts, row
    gc.collect()
    assert [path.suffix for path in (tmp_path / "cache" / "media").iterdir()] == [".images"]  # for the next load


def test_images_that_have_changed_are_errors(qwen: Any, tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        picture(50, 70).save(tmp_path / name)
    pq.write_table(
        pa.table({"prompt": ["<image>"] * 3, "images": [["a.png"], ["b.png"], ["c.png"]]}), tmp_path / "x.parquet"
    )
    prompts = load(str(tmp_path / "x.parquet"), qwen, media="inputs")
    picture(50, 70).transpose(Image.Transpose.ROTATE_180).save(tmp_path / "a.png")
    (tmp_path / "b.png").unlink()
    with pytest.raises(DataError, match=r"x.parquet row 0: image 0 \('/.*/a.png'\) has changed since the load"):
        prompts.batch([0])
    with pytest.raises(DataError, match=r"x.parquet row 1: image 0 \('/.*/b.png'\) cannot be read any more"):
        prompts.batch([1])
    with pytest.raises(DataError, match="Load again"):
        next(iter(prompts.loader(3)))
    assert "pixel_values" in prompts.batch([2])
    (tmp_path / "b.png").symlink_to("c.png")
    with pytest.raises(DataError, match="cannot be read any more"):
        prompts.batch([1])


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_huge_images_are_not_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in a sample would take seconds and gigabytes."""
    about = PngImagePlugin.PngInfo()
    about.add_text("Software", "a camera")
    huge = encoded(Image.new("L", (9_000, 4_000)), "PNG", pnginfo=about)
    rows = [[encoded(picture(60 + 5 * k, 90), "PNG")] for k in range(30)]
    rows[7] = [huge]
    table = pa.table({"prompt": ["<image>?"] * 30, "images": rows})
    processor, loads = BUILDERS[name](), []
    wanted = load(table, processor, verify="full").tokens.to_lists()
    right = ImageFile.ImageFile.load

    def small(self: Any) -> Any:
        loads.append(self.size)
        assert max(self.size) < 1_000
        return right(self)

    monkeypatch.setattr(ImageFile.ImageFile, "load", small)
    found = load(table, processor)
    assert found.tokens.to_lists() == wanted
    assert found.report.check.rows > 3
    assert not found.report.check.mismatches
    assert loads
    monkeypatch.setattr(ImageFile.ImageFile, "load", right)
    alone = load(pa.table({"prompt": ["<image>?"], "images": [[huge]]}), processor)
    assert alone.report.check.rows == 1


def test_no_images_are_kept_by_default(qwen: Any) -> None:
    with pytest.raises(OptionError, match="load with media='pil'"):
        load(table_of(rows_of(11)), qwen).images(0)


def test_options(qwen: Any) -> None:
    table = table_of(rows_of(8))
    for option in ({"device": "cuda"}, {"truncation": "left"}):
        with pytest.raises(OptionError, match="is not supported for data with images"):
            load(table, qwen, **option)
    for option in ({"image_loader": "x"}, {"check_media": "x"}, {"max_image_pixels": 0}, {"media_roots": 3}):
        with pytest.raises(OptionError):
            load(table, qwen, **option)
    with pytest.raises(OptionError, match="pass a processor"):
        load(table, qwen.tokenizer, media_roots=[])
    with pytest.raises(OptionError, match="unknown option image_keys: did you mean image_key"):
        load(table, qwen, image_keys="images")
    with pytest.raises(DataError, match="no column 'imagess' with images: did you mean images"):
        load(table, qwen, image_key="imagess")
    assert len(load(table, qwen, video_key="videos")) == table.num_rows  # of verl's configuration
    with pytest.raises(OptionError, match="image_key"):
        load(table, qwen, image_key="prompt")
    with pytest.raises(OptionError, match=r"mm_processor_kwargs.return_tensors is set by gpuload: remove it"):
        load(table, qwen, mm_processor_kwargs={"return_tensors": "pt"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sanitize_control_tokens": True}, "sanitize_control_tokens is not supported"),
        ({"processor_kwargs": {"max_pixels": 7840}}, r"pass its values as mm_processor_kwargs=\{...\} instead"),
        (
            {"max_pixels": 7840},
            r"max_pixels is for the images: pass mm_processor_kwargs=\{'max_pixels': 7840\} instead",
        ),
    ],
)
def test_arguments_of_the_template_that_transformers_uses_for_images(qwen: Any, given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load(table_of(rows_of(8)), qwen, apply_chat_template_kwargs=given)
    prompts = load(table_of(rows_of(8)), qwen, apply_chat_template_kwargs={"add_vision_id": True})
    assert len(prompts) == len(rows_of(8))  # of the template only


def test_images_that_are_left_out_are_named(qwen: Any) -> None:
    table = table_of(rows_of(8))
    with pytest.warns(UserWarning, match="the images of column 'images' are in no prompt: pass a processor") as warned:
        load(table, qwen.tokenizer, chat_template=PARTS % "<image>", image_key="images")
    assert [one.filename for one in warned if "in no prompt" in str(one.message)] == [__file__]


def test_images_that_datasets_would_convert(qwen: Any) -> None:
    data = [encoded(picture(60, 60), "PNG")]
    rows = datasets.Dataset.from_dict({"prompt": [user("<image> a")], "images": [data]})
    for mode in ("RGB", "L"):
        table = rows.cast_column("images", datasets.List(datasets.Image(mode=mode)))
        if mode == "RGB":
            assert len(load(table, qwen)) == 1
            continue
        with pytest.raises(DataError, match=r"column 'images' has datasets.Image\(mode='L'\)"):
            load(table, qwen)


def test_references_in_messages_are_short_and_have_no_secrets(tmp_path: Path) -> None:
    for value, reason in (
        ("iVBORw0KGgo" * 9000, "is too long for a path: write base64 as"),
        ({"bytes": "iVBORw0KGgo"}, "its bytes are a text: write base64 as"),
        ("https://user:secret@host/x.png?sig=abc", "URLs of images are not fetched"),
    ):
        with pytest.raises(ImageError, match=reason) as caught:
            media_of(value, Places(str(tmp_path)))
        assert len(str(caught.value)) < 250
        assert not {"secret", "abc"} & {*re.findall(r"\w+", str(caught.value))}


def test_decoded_images_are_rgb() -> None:
    for name, data in encodings():
        assert decode(data).mode == "RGB", name


@pytest.mark.parametrize("name", ["gemma4", "aya_vision", "qwen2_5_vl"])
def test_the_tokenizer_does_not_pad_while_rows_are_encoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call of the processor sets in it counts on all threads: rows are compared while others are encoded."""
    processor, encode, seen = processor_named(name), backends._encode_fast, []

    def watched(backend: Any, texts: Any) -> Any:
        seen.append(backend.padding)
        made = encode(backend, texts)
        seen.append(backend.padding)
        return made

    monkeypatch.setattr(backends, "_encode_fast", watched)
    monkeypatch.setattr(batches, "BATCH_ROWS", 16)
    monkeypatch.setattr(engine, "_rules", {})
    rows, before = [row for row in rows_of(3) if row[2]] * 10, processor.tokenizer.backend_tokenizer.padding
    for _ in range(2):
        prompts = load(table_of(rows), processor, verify="full", media="inputs")
        assert not prompts.report.check.mismatches
        next(iter(prompts.loader(2)))
    assert seen
    assert set(map(str, seen)) == {"None"}
    assert processor.tokenizer.backend_tokenizer.padding == before
