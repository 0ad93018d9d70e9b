"""`load` against the baseline, row by row: the shipped data, every real file, and many tokenizers."""

import dataclasses
import inspect
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import user
from oracle import RowWise, assert_same_row, plain
from tiers import SHARED, name_of, shared, shared_files, shared_tokenizers, with_shared

import gpuload
from gpuload.core.errors import DataError
from gpuload.kinds.chats.load import ChatKind
from gpuload.kinds.images.options import NAMES, ImageOptions
from gpuload.kinds.pairs.load import PairKind
from gpuload.kinds.served.options import ServedOptions

PROMPT_KEYS = ("prompt", "messages", "question", "problem")
# A template for tokenizers that have none, so that they can be held to the same contract.
PLAIN_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def prompt_key(file: Path) -> str:
    names = pq.read_schema(file).names
    return next(key for key in PROMPT_KEYS if key in names)


def assert_same(prompts: gpuload.PromptDataset, oracle: RowWise, rows: Any = None) -> None:
    assert len(prompts) == len(oracle)
    for row in range(len(oracle)) if rows is None else rows:
        assert_same_row(prompts[row], oracle[row], prompts.origin(row))


def test_the_signature_of_load_is_that_of_its_options() -> None:
    """`help` shows every option with its type, its default and its meaning."""
    parameters = inspect.signature(gpuload.load).parameters
    both = {field.name: of for of in (gpuload.Options, ImageOptions) for field in dataclasses.fields(of)}
    both["turns"] = ServedOptions
    options = {name: of.__dataclass_fields__[name] for name, of in both.items()}
    assert {*parameters} == {"files", "tokenizer", *options, "verl_keys"}
    for name, field in options.items():
        found, expected = parameters[name], get_type_hints(both[name])[name]
        if name == "cache_dir":  # `Options.parse` makes a str of it
            expected = expected | os.PathLike[str]
        if field.default is dataclasses.MISSING:  # made for each load: {}
            assert (found.default, found.annotation) == (None, expected | None)
        else:
            assert (found.default, found.annotation) == (field.default, expected), name
        assert re.search(rf"^ {{4}}{name}: \w|^ {{4}}{name}: `", str(gpuload.load.__doc__), re.MULTILINE), name


@pytest.mark.parametrize(("load", "kind"), [(gpuload.load_chats, ChatKind), (gpuload.load_pairs, PairKind)])
def test_signatures_of_training_data_have_the_defaults_that_are_used(load: Any, kind: Any) -> None:
    parameters = list(inspect.signature(load).parameters.values())[2:]
    made, options = kind.parse({})
    assert kind.parse({each.name: each.default for each in parameters if each.name not in NAMES}) == (made, options)
    for_images = {each.name: each.default for each in parameters if each.name in NAMES and each.default != ()}
    assert ImageOptions.parse(for_images, ()) == ImageOptions.parse({"image_key": for_images["image_key"]}, ())
    for each in parameters:
        assert f"\n    {each.name}: " in load.__doc__
    with pytest.raises(gpuload.GpuloadError, match="unknown option max_lenght: did you mean max_length"):
        load("nowhere", "nothing", max_lenght=3)


def test_shipped_data_whole(gsm8k: str, qwen: Any) -> None:
    oracle = RowWise([gsm8k], qwen, max_prompt_length=120, return_raw_chat=True)
    prompts = gpuload.load(gsm8k, qwen, max_prompt_length=120, return_raw_chat=True)
    assert 0 < len(oracle) < 8792
    rows = np.random.default_rng(0).choice(len(oracle), 400, replace=False)
    assert_same(prompts, oracle, rows)
    assert prompts.report.overlong == 8792 - len(oracle) == prompts.report.rows_read - prompts.report.rows_kept


@pytest.mark.parametrize("truncation", ["left", "right", "middle"])
def test_truncation_as_verl_cuts(gsm8k: str, qwen: Any, tmp_path: Path, truncation: str) -> None:
    file = str(tmp_path / "some.parquet")
    pq.write_table(pq.read_table(gsm8k).slice(0, 200), file)
    options: dict[str, Any] = {
        "max_prompt_length": 97,  # odd: middle keeps 48 from the start and 49 from the end
        "truncation": truncation,
        "filter_overlong_prompts": False,
    }
    prompts = gpuload.load(file, qwen, **options)
    assert_same(prompts, RowWise([file], qwen, **options))
    assert prompts.report.overlong > 0
    assert int(prompts.tokens.lengths.max()) > 97


def test_truncation_error_names_row_length_and_limit(write: Callable[..., str], qwen: Any) -> None:
    file = write([user("short"), user("long " * 60)])
    prompts = gpuload.load(file, qwen, max_prompt_length=50, filter_overlong_prompts=False)
    assert len(prompts) == 2
    assert prompts[0]["input_ids"].shape == (50,)
    length = len(prompts.tokens[1])
    with pytest.raises(gpuload.GpuloadError, match=rf"row 1 .*data.parquet row 1\) has {length} tokens.*=50"):
        prompts[1]
    with pytest.raises(gpuload.GpuloadError, match="row 1"):
        prompts.batch([0, 1])


def test_files_whose_schemas_differ(write: Callable[..., str], qwen: Any) -> None:
    files = [
        write(
            {"prompt": [user("a")], "extra_info": [{"index": 7, "split": "train"}], "answer": ["x"], "score": [1]},
            "a.parquet",
        ),
        write({"prompt": [user("b")], "answer": [["x", "y"]], "score": [1.5]}, "b.parquet"),
        write({"other": [{"deep": [1, {"n": None}["n"]]}], "prompt": [user("c")], "extra_info": [None]}, "c.parquet"),
    ]
    prompts = gpuload.load(files, qwen, max_prompt_length=64)
    assert_same(prompts, RowWise(files, qwen, max_prompt_length=64))
    assert [row["index"] for row in (prompts[0], prompts[1], prompts[2])] == [7, 0, 0]
    assert prompts[0]["extra_info"] == {"index": 7, "split": "train"}  # not widened by the other files' keys
    assert [type(prompts[i]["score"]) for i in range(3)] == [int, float, type(None)]
    batch = prompts.batch([2, 0, 1])
    assert batch["answer"].tolist() == [None, "x", ["x", "y"]]
    with pytest.raises(DataError, match="answer"):
        _ = prompts.columns


def test_columns_as_one_table(gsm8k: str, qwen: Any) -> None:
    prompts = gpuload.load(gsm8k, qwen, max_prompt_length=100)
    table = prompts.columns
    assert table.num_rows == len(prompts)
    assert table.column("extra_info")[5].as_py() == prompts[5]["extra_info"]
    assert "prompt" not in table.column_names


def test_max_samples_before_the_filter(gsm8k: str, qwen: Any) -> None:
    first = gpuload.load(gsm8k, qwen, max_prompt_length=100, max_samples=300)
    oracle = RowWise([gsm8k], qwen, max_prompt_length=100)
    assert first.report.rows_read == 300
    assert len(first) == sum(
        row["extra_info"]["index"] < 300 and row["extra_info"]["split"] == "train" for row in oracle.rows
    )
    assert [first.origin(i)[1] for i in range(len(first))] == sorted(first.origin(i)[1] for i in range(len(first)))


def test_max_samples_shuffled_as_verl_draws(gsm8k: str, qwen: Any, write: Callable[..., str]) -> None:
    files = [gsm8k, write([user(f"number {i}") for i in range(50)])]
    drawn = gpuload.load(files, qwen, max_samples=9000 - 500, shuffle=True, seed=11)
    expected = np.random.default_rng(11).choice(8792 + 50, size=8500, replace=False)
    starts = {files[0]: 0, files[1]: 8792}
    assert [starts[file] + row for file, row in map(drawn.origin, range(len(drawn)))] == expected.tolist()
    some = [0, 4000, 8499]
    everything = gpuload.load(files, qwen)
    for row in some:
        assert drawn[row]["raw_prompt_ids"] == everything[int(expected[row])]["raw_prompt_ids"]
        assert drawn[row]["extra_info"] == everything[int(expected[row])]["extra_info"]
    again = gpuload.load(files, qwen, max_samples=8500, shuffle=True, seed=11)
    assert np.array_equal(again.tokens.values, drawn.tokens.values)


def test_full_prompt_and_raw_chat(gsm8k: str, qwen: Any) -> None:
    prompts = gpuload.load(gsm8k, qwen, max_samples=20, return_full_prompt=True, return_raw_chat=True)
    row = prompts[3]
    assert row["full_prompts"] == qwen.apply_chat_template(
        row["raw_prompt"], tokenize=False, add_generation_prompt=True
    )
    assert qwen(row["full_prompts"], add_special_tokens=False)["input_ids"] == row["raw_prompt_ids"]


def test_template_constants(gsm8k: str, qwen: Any) -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
    prompts = gpuload.load(gsm8k, qwen, max_samples=5, apply_chat_template_kwargs={"tools": [tool]})
    plain_prompts = gpuload.load(gsm8k, qwen, max_samples=5)
    for row in range(5):
        raw = gpuload.load(gsm8k, qwen, max_samples=5, return_raw_chat=True)[row]["raw_prompt"]
        expected = qwen.apply_chat_template(raw, tools=[tool], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        assert prompts[row]["raw_prompt_ids"] == expected != plain_prompts[row]["raw_prompt_ids"]


def test_a_trainers_data_section_as_it_is(gsm8k: str, qwen: Any) -> None:
    section = {
        "tokenizer": None,
        "train_files": gsm8k,
        "prompt_key": "prompt",
        "max_prompt_length": 200,
        "max_response_length": 512,
        "train_batch_size": 1024,
        "return_raw_chat": True,
        "filter_overlong_prompts": True,
        "filter_overlong_prompts_workers": 4,
        "truncation": "error",
        "shuffle": True,
        "seed": None,
        "image_key": "images",
        "custom_cls": {"path": None, "name": None},
        "apply_chat_template_kwargs": {},
    }
    assert len(gpuload.load(section["train_files"], qwen, **section)) == 8776


# -- real data, where the folder exists ------------------------------------------------------------------------------


@pytest.mark.parametrize("file", with_shared(lambda: shared_files("*.parquet")), ids=name_of)
def test_shared_data(file: Path, qwen: Any) -> None:
    """Every row's tokens, and a spread of whole rows."""
    prompts = gpuload.load(str(file), qwen, max_prompt_length=700, return_raw_chat=True)
    table = pq.read_table(file)
    expected = expected_ids(qwen, table.column("prompt").to_pylist())
    kept = [row for row, ids in enumerate(expected) if len(ids) <= 700]
    assert [prompts.origin(i)[1] for i in range(len(prompts))] == kept
    assert prompts.tokens.to_lists() == [expected[row] for row in kept]
    oracle = RowWise([str(file)], qwen, max_prompt_length=700, filter_overlong_prompts=False, return_raw_chat=True)
    for i in np.random.default_rng(0).choice(len(kept), min(100, len(kept)), replace=False):
        assert_same_row(prompts[i], oracle[kept[i]], prompts.origin(i))


def expected_ids(tokenizer: Any, prompts: list[Any]) -> list[list[int]]:
    texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("file", with_shared(lambda: shared_files("wild/*.parquet")), ids=name_of)
def test_wild_files(file: Path, qwen: Any) -> None:
    """As people published them: loaded identically, whatever the columns are, or rejected by both."""
    key = prompt_key(file)
    if key != "prompt":
        with pytest.raises(KeyError, match="prompt"):
            RowWise([str(file)], qwen)
        with pytest.raises(DataError, match="no column 'prompt'"):
            gpuload.load(str(file), qwen)
    options: dict[str, Any] = {"prompt_key": key, "max_prompt_length": 300, "return_raw_chat": True}
    prompts = gpuload.load(str(file), qwen, **options)
    oracle = RowWise([str(file)], qwen, filter_overlong_prompts=False, **options)
    kept = [prompts.origin(i)[1] for i in range(len(prompts))]
    spread = np.random.default_rng(0).choice(len(oracle), min(300, len(oracle)), replace=False)
    for row in spread:
        ids = oracle.ids(oracle.rows[row][key])
        assert (row in set(kept)) == (len(ids) <= 300)
    for i in np.random.default_rng(1).choice(len(kept), min(100, len(kept)), replace=False):
        assert_same_row(prompts[i], oracle[kept[i]], prompts.origin(i))


@shared
def test_all_wild_files_of_a_kind_together(qwen: Any) -> None:
    files = [str(file) for file in shared_files("wild/*.parquet") if prompt_key(file) == "prompt"][::3]
    assert files
    prompts = gpuload.load(files, qwen, max_prompt_length=600)
    alone = [gpuload.load(file, qwen, max_prompt_length=600) for file in files]
    assert len(prompts) == sum(map(len, alone))
    joined = np.concatenate([one.tokens.values for one in alone])
    assert np.array_equal(prompts.tokens.values, joined)
    last = prompts[-1]
    for key, value in alone[-1][-1].items():
        assert torch.equal(last[key], value) if isinstance(value, torch.Tensor) else plain(last[key]) == plain(value)


@pytest.mark.parametrize("name", with_shared(shared_tokenizers))
def test_tokenizers(name: str, gsm8k: str) -> None:
    """Many tokenizers over many scripts: every key of a spread of rows, and no silent fall-back to another way."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    template = {} if tokenizer.chat_template else {"chat_template": PLAIN_TEMPLATE}
    for file in ["xquad_12lang", "bfcl_tools", "mgsm_tata", "code_prompts"]:
        path = str(SHARED / "datasets" / f"{file}.parquet")
        options: dict[str, Any] = {"max_samples": 400, "shuffle": True, "seed": 5, "filter_overlong_prompts": False}
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
            tokenizer.pad_token_id = 0
        prompts = gpuload.load(path, tokenizer, truncation="left", max_prompt_length=500, **options, **template)
        assert not prompts.report.check.mismatches
        oracle = RowWise(
            [path], tokenizer, max_prompt_length=500, filter_overlong_prompts=False, truncation="left", **template
        )
        for i in range(0, len(prompts), 4):
            assert_same_row(prompts[i], oracle[prompts.origin(i)[1]], (name, prompts.origin(i)))
    if name not in ("bert-base-uncased", "t5-small", "smollm"):
        assert re.search("by gigatoken|each different word once", prompts.report.engine)


def test_json_equals_parquet(gsm8k: str, qwen: Any, tmp_path: Path) -> None:
    rows = pq.read_table(gsm8k).slice(0, 300).to_pylist()
    lines, array = tmp_path / "rows.jsonl", tmp_path / "rows.json"
    lines.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    array.write_text(json.dumps(rows, indent=1))
    parquet = gpuload.load(gsm8k, qwen, max_samples=300, return_raw_chat=True)
    for file in (lines, array):
        prompts = gpuload.load(file, qwen, return_raw_chat=True)
        assert len(prompts) == 300
        for i in range(0, 300, 7):
            assert_same_row(prompts[i], parquet[i], (file, i))
