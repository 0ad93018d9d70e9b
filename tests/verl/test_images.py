"""Prompts with images: gpuload's RLHFDataset keeps the rows that verl's keeps, without decoding images."""

import asyncio
import importlib.util
import logging
import random
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import user
from image_cases import BUILDERS, encoded, encodings, picture
from PIL import Image
from same import VERL, gpuload_dataset, verl_dataset
from sft_cases import LONG, compare, outcome, raising_rows
from tiers import core
from verl.utils.tokenizer import build_multimodal_processor_inputs

from gpuload.integrations.verl import image_lengths

pytestmark = pytest.mark.skipif(VERL < (0, 9, 1), reason="filters in another way")


@pytest.fixture(scope="module", autouse=True)
def images_of_qwen() -> Any:
    """qwen_vl_utils, with which verl opens images, imports torchvision for videos, which may not be installed."""
    stubs = []
    if "qwen_vl_utils" not in sys.modules and importlib.util.find_spec("torchvision") is None:
        for name in ("torchvision", "torchvision.io", "torchvision.transforms"):
            stubs.append(name)
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__spec__ = ModuleSpec(name, None)
        sys.modules["torchvision"].__dict__.update(
            io=sys.modules["torchvision.io"], transforms=sys.modules["torchvision.transforms"], __version__="0.28.0"
        )
        sys.modules["torchvision.transforms"].__dict__.update(InterpolationMode=None)
    try:
        pytest.importorskip("qwen_vl_utils")
    finally:
        for name in stubs:
            del sys.modules[name]
    return None


@cache
def processor_named(name: str) -> Any:
    try:
        return BUILDERS[name]()
    except (AttributeError, ImportError) as error:
        pytest.skip(f"cannot be built here: {error!s:.80}")


def rows_of(seed: int, count: int = 24) -> dict[str, list[Any]]:
    rng, prompts, images = random.Random(seed), [], []
    for _ in range(count):
        pieces = [rng.choice(("What is it?", " caf\u00e9 \n", "\n\n", "a " * rng.randint(1, 60)))]
        files = []
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            pieces.insert(rng.randrange(len(pieces) + 1), "<image>")
            size = rng.randint(20, 500), rng.randint(20, 500)
            files.append({"bytes": encoded(picture(*size), rng.choice(("JPEG", "PNG", "WEBP"))), "path": None})
        prompts.append(user("".join(pieces)))
        images.append(files)
    return {"prompt": prompts, "images": images, "data_source": ["x"] * count}


def decoded_file(rows: dict[str, list[Any]], path: Path) -> Path:
    """A file whose images `datasets` decodes."""
    made = datasets.Dataset.from_dict(rows)
    made.cast_column("images", datasets.List(datasets.Image())).to_parquet(path)
    return path


def plain_file(rows: dict[str, list[Any]], path: Path, kind: Any = None) -> Path:
    kind = kind or pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    columns = {name: pa.array(values, kind if name == "images" else None) for name, values in rows.items()}
    pq.write_table(pa.table(columns), path)
    return path


def assert_same_rows(file: Path, processor: Any, caplog: Any, **data: Any) -> Any:
    """The same rows, in the same order, with the same images and grids."""
    with caplog.at_level("WARNING"):
        found = gpuload_dataset(file, processor.tokenizer, processor, **data)
    expected = verl_dataset(file, processor.tokenizer, processor, **data)
    assert len(found) == len(expected)
    for number in range(len(expected)):
        one, other = found[number], expected[number]
        assert list(one) == list(other)
        texts = [
            [
                {k: v for k, v in part.items() if k == "text"}
                for part in row["raw_prompt"][0]["content"]
                if isinstance(part, dict)
            ]
            or row["raw_prompt"][0]["content"]
            for row in (one, other)
        ]
        assert texts[0] == texts[1]
        made = [inputs(each, row, processor) for each, row in ((found, one), (expected, other))]
        assert made[0].keys() == made[1].keys()
        for name, value in made[0].items():
            assert str(value) == str(made[1][name]), name
    return found


def inputs(dataset: Any, row: Any, processor: Any) -> dict[str, Any]:
    """What the rollout gives the model."""
    given = dataset.process_multi_modal_info(row["raw_prompt"], dataset.image_patch_size, dataset.config)
    images, _, _ = asyncio.run(given)
    if images is None:
        return {}
    text = processor.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, tokenize=False)
    made = dict(build_multimodal_processor_inputs(processor, text=[text], images=images))
    return made | {"sizes": [image.size for image in images], "bytes": [hash(image.tobytes()) for image in images]}


LIMITS = {"qwen2_5_vl": 75, "gemma4": 400}
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "glm46v", "gemma4")


@pytest.mark.parametrize("decoded", [True, False])
@pytest.mark.parametrize("name", core(FAMILIES, "qwen2_5_vl", "qwen3_vl"))
def test_the_same_rows(name: str, decoded: bool, tmp_path: Path, caplog: Any, capsys: Any) -> None:
    processor, rows = processor_named(name), rows_of(len(name))
    file = (decoded_file if decoded else plain_file)(rows, tmp_path / "rows.parquet")
    found = assert_same_rows(file, processor, caplog, max_prompt_length=LIMITS.get(name, 150))
    assert 5 < len(found) < 24
    assert "runs the processor for every prompt" not in caplog.text
    assert "prompts have at most" in capsys.readouterr().out


def test_no_image_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    file = decoded_file(rows_of(3), tmp_path / "rows.parquet")
    monkeypatch.setattr(image_lengths._Lengths, "difference", lambda *_: None)
    processor = processor_named("qwen2_5_vl")
    gpuload_dataset(file, processor.tokenizer, processor, max_prompt_length=80)  # the rule of the processor is known

    def refuse(*_: Any) -> Any:
        raise AssertionError("decoded")

    monkeypatch.setattr(Image.Image, "load", refuse)
    assert len(gpuload_dataset(file, processor.tokenizer, processor, max_prompt_length=90)) > 5
    assert "by verl's own filter" not in capsys.readouterr().out


def test_sizes_and_limits_of_rows(tmp_path: Path, caplog: Any) -> None:
    """Keys of images that verl's function for images reads."""
    picture(300, 200).save(tmp_path / "a.png")
    path = str(tmp_path / "a.png")
    images = [
        {"image": path, "max_pixels": 28 * 28 * 9, "min_pixels": None},
        {"image": path, "max_pixels": None, "min_pixels": 28 * 28 * 200},
        {"image": f"file://{path}", "max_pixels": None, "min_pixels": None},
        {"image": str(tmp_path / "none.png"), "max_pixels": None, "min_pixels": None},
    ]
    rows = {"prompt": [user("<image>?")] * 4, "images": [[each] for each in images], "data_source": ["x"] * 4}
    kind = pa.list_(pa.struct({"image": pa.string(), "max_pixels": pa.int64(), "min_pixels": pa.int64()}))
    file = plain_file(rows, tmp_path / "rows.parquet", kind)
    for limit in (40, 120, 400):
        assert_same_rows(file, processor_named("qwen2_5_vl"), caplog, max_prompt_length=limit)
    resized = pa.list_(pa.struct({"image": pa.string(), "resized_height": pa.int64(), "resized_width": pa.int64()}))
    rows["images"] = [[{"image": path, "resized_height": 30 * k, "resized_width": 100}] for k in range(1, 5)]
    file = plain_file(rows, tmp_path / "resized.parquet", resized)
    assert_same_rows(file, processor_named("qwen3_vl"), caplog, max_prompt_length=45)
    paths = {"prompt": rows["prompt"], "images": [[path]] * 4, "data_source": ["x"] * 4}
    assert_same_rows(
        plain_file(paths, tmp_path / "p.parquet", pa.list_(pa.string())), processor_named("qwen2_vl"), caplog
    )


@pytest.mark.parametrize("decoded", [True, False])
def test_rows_that_verl_drops_or_keeps(decoded: bool, tmp_path: Path, caplog: Any, capsys: Any) -> None:
    """Wrong numbers of images, damaged files, other contents, extreme sizes: verl's filter decides about them."""
    good = encoded(picture(60, 90), "PNG")
    cases: list[tuple[Any, list[Any]]] = [
        (user("<image>"), [good]),
        (user("<image>"), []),
        (user("no"), [good]),
        (user("<image><image>"), [good]),
        (user("<image>"), [encoded(picture(402, 2), "PNG")]),
        (user("a <|image_pad|> b"), []),
        (user("<image> <|image_pad|>"), [good]),
        ([*user("<image>"), {"role": "assistant", "content": "yes"}, *user("<image>?")], [good, good]),
        ([{"role": "system", "content": ""}, *user("<image>")], [good]),
        (user("<video>"), []),
    ]
    cases += [] if decoded else [(user("<image>"), [good[:60]]), (user("<image>"), [b"none"])]
    rows = {
        "prompt": [prompt for prompt, _ in cases],
        "images": [[{"bytes": data, "path": None} for data in images] for _, images in cases],
        "data_source": ["x"] * len(cases),
    }
    file = (decoded_file if decoded else plain_file)(rows, tmp_path / "rows.parquet")
    assert_same_rows(file, processor_named("qwen2_5_vl"), caplog, max_prompt_length=200)
    assert "rows by verl's own filter" in capsys.readouterr().out


@pytest.mark.parametrize("decoded", [True, False])
def test_encodings(decoded: bool, tmp_path: Path, caplog: Any) -> None:
    """Also with orientations, which `datasets` applies and verl itself does not."""
    files = [data for _, data in encodings(90, 190)]
    rows = {
        "prompt": [user(f"<image>{'a ' * (k % 7)}") for k in range(len(files))],
        "images": [[{"bytes": data, "path": None}] for data in files],
        "data_source": ["x"] * len(files),
    }
    file = (decoded_file if decoded else plain_file)(rows, tmp_path / "rows.parquet")
    processor = processor_named("qwen2_vl")
    found = gpuload_dataset(file, processor.tokenizer, processor, max_prompt_length=100)
    assert "runs the processor for every prompt" not in caplog.text
    assert len(found) == len(files)
    lengths = image_lengths._Lengths(found, found.dataframe, [14, 16])
    for patch, made in zip((14, 16), np.concatenate(list(lengths.of_rows()), axis=1).tolist(), strict=True):
        assert made == [lengths._by_verl(row, patch) for row in found.dataframe]


def test_a_rule_that_differs_from_verl_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    file = plain_file(rows_of(5), tmp_path / "rows.parquet")
    right = image_lengths._Lengths._size
    monkeypatch.setattr(
        image_lengths._Lengths, "_size", lambda self, image: [(h + 28, 28) for h, _ in right(self, image)]
    )
    assert_same_rows(file, processor_named("qwen2_5_vl"), caplog, max_prompt_length=120)
    assert "runs the processor for every prompt" in caplog.text
    assert "by verl" in caplog.text


def test_arguments_of_template_and_processor(tmp_path: Path, caplog: Any) -> None:
    file = plain_file(rows_of(6), tmp_path / "rows.parquet")
    template = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text if p.type == 'text' else '<|image_pad|>' * n }}"
    )
    data = {"chat_template": template + "{% endfor %}{% endfor %}", "n": 1}
    assert_same_rows(file, processor_named("qwen2_5_vl"), caplog, max_prompt_length=80, apply_chat_template_kwargs=data)
    assert_same_rows(file, processor_named("qwen2_5_vl"), caplog, max_prompt_length=80, image_patch_size=20)
    kwargs = {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 12}}
    assert_same_rows(file, processor_named("qwen2_5_vl"), caplog, max_prompt_length=60, mm_processor_kwargs=kwargs)


def test_rows_that_are_too_long_in_the_rollout(tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's configuration has patches of 14 for the filter, and the rollout takes the processor's 16."""
    headers, right = [], image_lengths.read_header
    monkeypatch.setattr(image_lengths, "read_header", lambda *given: (headers.append(1), right(*given))[1])
    file, processor = plain_file(rows_of(21, 40), tmp_path / "rows.parquet"), processor_named("qwen3_vl")

    def length(dataset: Any, row: Any, patch: int = 16) -> int:
        images, _, _ = asyncio.run(dataset.process_multi_modal_info(row["raw_prompt"], patch, dataset.config))
        text = processor.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, tokenize=False)
        return len(build_multimodal_processor_inputs(processor, text=[text], images=images)["input_ids"][0])

    every = gpuload_dataset(file, processor.tokenizer, processor, max_prompt_length=10_000, image_patch_size=14)
    both = [(length(every, row, 14), length(every, row)) for row in every]
    limit = max(both, key=lambda pair: pair[1] - pair[0])[0]
    found = assert_same_rows(file, processor, caplog, max_prompt_length=limit, image_patch_size=14)
    longer = sum(length(found, row) > limit for row in found)
    assert longer > 0
    told = f"{longer} of {len(found)} prompts have at most {limit} tokens for verl's filter, and more in the rollout"
    assert told in caplog.text
    assert 0 < len(headers) <= 2 * sum(len(row or []) for row in rows_of(21, 40)["images"])  # of two datasets
    caplog.clear()
    for patch in (16, None):
        found = assert_same_rows(file, processor, caplog, max_prompt_length=limit, image_patch_size=patch)
        assert all(length(found, row) <= limit for row in found)
        assert "in the rollout" not in caplog.text


def test_conversations_for_sft_fall_back_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, pixels and positions are those of verl's class."""
    processor = processor_named("qwen2_vl")
    monkeypatch.setattr(processor.tokenizer, "chat_template", processor.chat_template)  # as of a checkpoint
    rows = [
        [{"role": "user", "content": f"<image>What is {number}?"}, {"role": "assistant", "content": "A square."}]
        for number in range(3)
    ]
    pictures = [[{"bytes": encoded(picture(56 + 28 * number, 90), "PNG"), "path": None}] for number in range(3)]
    file = str(tmp_path / "seen.parquet")
    pq.write_table(pa.table({"messages": rows, "images": pictures}), file)
    with caplog.at_level(logging.WARNING, logger="gpuload"):
        dataset = compare(file, processor.tokenizer, LONG, processor=processor)
    assert dataset.report is None
    assert not raising_rows(dataset), outcome(dataset, 0)
    assert set(dataset[0]["multi_modal_inputs"]) >= {"pixel_values", "image_grid_thw"}
    (line,) = [each.getMessage() for each in caplog.records if each.name.startswith("gpuload")]
    assert line.startswith("gpuload: falls back to verl's own dataset class, which tokenizes at each access: ")
    assert line.endswith("seen.parquet has a column 'images', and only conversations of text are made by columns")
