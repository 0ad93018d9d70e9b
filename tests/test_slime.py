"""The integration inside slime: its own classes, compared with slime's. Only ray is replaced, which needs no GPU here.

`make trainers-test` runs this with a checkout of slime in SLIME_REPO.
"""

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jinja2.exceptions import UndefinedError
from slime_cases import arguments, rows, write
from tiers import SHARED, shared

REPOSITORY = os.environ.get("SLIME_REPO", "")
if not REPOSITORY:
    pytest.skip("needs a checkout of slime: SLIME_REPO=<folder> make trainers-test", allow_module_level=True)
sys.path.insert(0, REPOSITORY)
sys.modules.setdefault("ray", ModuleType("ray"))

from slime.rollout.data_source import RolloutDataSourceWithBuffer  # noqa: E402

from gpuload.cache.token_store import DiskTokens  # noqa: E402
from gpuload.integrations.slime import DataSource  # noqa: E402

FALLBACK = "gpuload: falls back to slime's own dataset: "


def check_same(args: Any, epochs: int = 2) -> DataSource:
    """Compares groups of samples, checkpoints and the state of `random` with slime's, over several epochs."""
    random.seed(1)
    theirs = RolloutDataSourceWithBuffer(args)
    after = random.getstate()
    random.seed(1)
    ours = DataSource(args)
    assert random.getstate() == after
    assert len(ours) == len(theirs)
    assert type(ours.dataset).__name__ == "SampleDataset"
    size = max(1, len(theirs) * 2 // 5)
    for _ in range(epochs * 5 // 2):
        before = random.getstate()
        expected, after = theirs.get_samples(size), random.getstate()
        random.setstate(before)
        found = ours.get_samples(size)
        assert random.getstate() == after
        for group in found:
            for sample in group:
                if isinstance(sample.prompt, str):
                    assert sample.tokens == tokens_of(args, sample.prompt)
                sample.tokens = []
        assert repr(found) == repr(expected)
    state = ("sample_offset", "epoch_id", "sample_group_index", "sample_index", "metadata")
    assert [getattr(ours, name) for name in state] == [getattr(theirs, name) for name in state]
    return ours


def tokens_of(args: Any, text: str) -> list[int]:
    from slime.utils.processing_utils import load_tokenizer

    if args.hf_checkpoint not in TOKENIZERS:
        TOKENIZERS[args.hf_checkpoint] = load_tokenizer(args.hf_checkpoint)
    return list(TOKENIZERS[args.hf_checkpoint].encode(text, add_special_tokens=False))


TOKENIZERS: dict[str, Any] = {}


@pytest.fixture(params=["parquet", "jsonl"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., str]:
    return lambda given: write(tmp_path / f"rows.{request.param}", given)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("limit", [None, 120])
def test_messages(file: Callable[..., str], qwen_folder: str, shuffle: bool, limit: int | None) -> None:
    check_same(
        arguments(
            file(rows()), qwen_folder, label_key="label", rollout_max_prompt_len=limit, rollout_shuffle=shuffle
        )
    )  # fmt: skip


@pytest.mark.parametrize("limit", [None, 120])
def test_a_store_on_disk(file: Callable[..., str], qwen_folder: str, limit: int | None) -> None:
    args = arguments(file(rows()), qwen_folder, label_key="label", rollout_max_prompt_len=limit, rollout_shuffle=True)
    args.gpuload = {"store": "disk"}
    assert isinstance(check_same(args).dataset._columns.tokens, DiskTokens)


def test_the_limit_is_inclusive(file: Callable[..., str], qwen_folder: str) -> None:
    path = file(rows())
    lengths = sorted(len(sample.tokens) for sample in DataSource(arguments(path, qwen_folder)).dataset.samples)
    ours = check_same(arguments(path, qwen_folder, rollout_max_prompt_len=lengths[20]))
    assert len(ours) == sum(length <= lengths[20] for length in lengths)


@pytest.mark.parametrize("apply_chat_template", [False, True])
def test_texts(file: Callable[..., str], qwen_folder: str, apply_chat_template: bool) -> None:
    given = [{**row, "prompt": row["prompt"][-1]["content"]} for row in rows()]
    check_same(
        arguments(file(given), qwen_folder, apply_chat_template=apply_chat_template, rollout_max_prompt_len=60)
    )  # fmt: skip


@pytest.mark.parametrize("limit", [None, 5])
def test_messages_without_a_template(file: Callable[..., str], qwen_folder: str, limit: int | None) -> None:
    args = arguments(file(rows()), qwen_folder, apply_chat_template=False, rollout_max_prompt_len=limit)
    assert len(check_same(args)) == 40


@pytest.mark.parametrize("part", ["[3:17]", "[:5]", "[30:]", "[-7:]", "[:-30]", "[-9:-2]", "[5:500]", "[:]"])
def test_slices_of_a_path(file: Callable[..., str], qwen_folder: str, part: str) -> None:
    check_same(arguments(f"{file(rows())}@{part}", qwen_folder, rollout_max_prompt_len=200), epochs=1)


TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("apply_chat_template", [False, True])
def test_tools(file: Callable[..., str], qwen_folder: str, as_text: bool, apply_chat_template: bool) -> None:
    given = [{**row, "tools": json.dumps(TOOLS) if as_text else TOOLS} for row in rows()]
    given[3]["metadata"] = None
    check_same(arguments(file(given), qwen_folder, tool_key="tools", apply_chat_template=apply_chat_template))


def test_template_arguments(file: Callable[..., str], qwen_folder: str) -> None:
    kwargs = {"enable_thinking": False, "add_generation_prompt_": 1}
    check_same(arguments(file(rows()), qwen_folder, apply_chat_template_kwargs=kwargs))


def test_values_that_arrow_would_change(tmp_path: Path, qwen_folder: str) -> None:
    given = rows()
    values = [1, 1.5, "x", None, {"b": 1, "a": float("nan")}, [], {"a": None}, "2024-01-01", 2**70, "\ud800"]
    for number, row in enumerate(given):
        row["metadata"] = {"value": values[number % 10]} if number % 4 else {}
        row["label"] = [str(number), number][number % 2]
        if number % 5 == 0:
            row["prompt"][-1]["name"] = "me"
        if number % 7 == 0:
            del row["metadata"]
    args = arguments(write(tmp_path / "a.jsonl", given), qwen_folder, label_key="label")
    check_same(args)
    check_same(arguments(**vars(args) | {"apply_chat_template": False}))


def test_tool_calls_in_prompts(file: Callable[..., str], qwen_folder: str) -> None:
    given = rows()
    for row in given[::4]:
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
        row["prompt"] += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "tool", "content": "3"},
        ]
    check_same(arguments(file(given), qwen_folder))


def processed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the model a processor, as models with vision have."""
    processor = SimpleNamespace(image_processor=SimpleNamespace())
    for module in ("slime.rollout.data_source", "slime.utils.processing_utils"):
        monkeypatch.setattr(sys.modules[module], "load_processor", lambda name, trust_remote_code: processor)


def test_texts_for_a_model_with_a_processor(
    file: Callable[..., str], qwen_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    processed(monkeypatch)
    ours = check_same(arguments(file(rows()), qwen_folder))
    assert ours.dataset.samples[0].multimodal_inputs == {"images": None, "videos": None}


def test_checkpoints(file: Callable[..., str], qwen_folder: str, tmp_path: Path) -> None:
    args = arguments(
        file(rows()), qwen_folder, rollout_shuffle=True, save=str(tmp_path), load=str(tmp_path), label_key="label"
    )
    ours, theirs = DataSource(args), RolloutDataSourceWithBuffer(args)
    for size in (30, 25):
        ours.get_samples(size), theirs.get_samples(size)
    ours.save(3)
    following = [group[0].label for group in theirs.get_samples(33)]
    for kind in (DataSource, RolloutDataSourceWithBuffer):
        resumed = kind(args)
        resumed.load(3)
        assert [group[0].label for group in resumed.get_samples(33)] == following


def test_the_buffer(file: Callable[..., str], qwen_folder: str) -> None:
    ours = DataSource(arguments(file(rows()), qwen_folder))
    first = ours.get_samples(4)
    ours.add_samples(first[:2])
    again = ours.get_samples(3)
    assert again[:2] == first[:2]
    assert again[2][0].index == 8


def test_details_are_dumped(file: Callable[..., str], qwen_folder: str, tmp_path: Path) -> None:
    DataSource(arguments(file(rows()), qwen_folder, dump_details=str(tmp_path / "details")))
    assert (tmp_path / "details" / "tokenizer" / "tokenizer.json").exists()


# -- what falls back ---------------------------------------------------------------------------------------------------


def check_falls_back(args: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    ours, theirs = DataSource(args), RolloutDataSourceWithBuffer(args)
    assert [text for text in caplog.messages if text.startswith(FALLBACK)] == [FALLBACK + reason]
    assert repr(ours.get_samples(len(theirs))) == repr(theirs.get_samples(len(theirs)))


def check_raises(args: Any, error: type[Exception]) -> None:
    for kind in (DataSource, RolloutDataSourceWithBuffer):
        with pytest.raises(error):
            kind(args)


def test_tools_that_differ(file: Callable[..., str], qwen_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    given = [{**row, "tools": json.dumps(TOOLS * (1 + number % 2))} for number, row in enumerate(rows())]
    path = file(given)
    args = arguments(path, qwen_folder, tool_key="tools")
    check_falls_back(args, f"{path}: tools differ from row to row", caplog)
    check_same(arguments(path, qwen_folder, tool_key="tools", apply_chat_template=False))


def test_lines_that_slime_skips(tmp_path: Path, qwen_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    path = Path(write(tmp_path / "a.jsonl", rows()))
    text = path.read_text()
    path.write_text(text + "{broken\n")
    line = "line 41: not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    check_falls_back(arguments(str(path), qwen_folder), f"{path}, {line}", caplog)
    path.write_text("\ufeff" + text)
    check_falls_back(arguments(str(path), qwen_folder), f"{path}: the file begins with a byte order mark", caplog)
    path.write_text("[\n" + text)
    check_falls_back(arguments(str(path), qwen_folder), f"{path}: the file begins with a JSON array", caplog)


def test_labels_with_nulls(tmp_path: Path, qwen_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    given = rows()
    given[5]["label"] = None
    check_same(arguments(write(tmp_path / "a.parquet", given), qwen_folder, label_key="label"))
    path = write(tmp_path / "a.jsonl", given)
    reason = f"{path}: column 'label' has nulls, or lines without it"
    check_falls_back(arguments(path, qwen_folder, label_key="label"), reason, caplog)


def test_images(tmp_path: Path, qwen_folder: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    processed(monkeypatch)
    given = rows()
    for row in given:
        for message in row["prompt"]:
            message["content"] = [{"type": "text", "text": message["content"]}]
    path = write(tmp_path / "a.parquet", given)
    reason = f"{path}: there is a processor, and column 'prompt' is not messages with text"
    check_falls_back(arguments(path, qwen_folder, apply_chat_template=False), reason, caplog)
    args = arguments(path, qwen_folder, apply_chat_template=False, multimodal_keys={"image": "images"})
    check_falls_back(args, "multimodal_keys is set", caplog)


def test_columns_that_are_used_twice(
    file: Callable[..., str], qwen_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(file(rows()), qwen_folder, label_key="prompt")
    check_falls_back(args, "column 'prompt' is used twice, or has a name that gpuload uses", caplog)


def test_all_prompts_are_too_long(file: Callable[..., str], qwen_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    ours = DataSource(arguments(file(rows()), qwen_folder, rollout_max_prompt_len=3))
    assert len(ours) == 0
    assert any("all 40 rows were dropped" in text for text in caplog.messages)


def test_errors_are_slimes(tmp_path: Path, qwen_folder: str) -> None:
    check_raises(arguments(str(tmp_path / "missing.parquet"), qwen_folder), FileNotFoundError)
    check_raises(arguments(write(tmp_path / "a.jsonl", rows()), qwen_folder, label_key="answer"), KeyError)
    given = [{**row, "tools": None if number == 8 else TOOLS} for number, row in enumerate(rows())]
    for name in ("b.jsonl", "b.parquet"):
        path = write(tmp_path / name, given)
        check_raises(arguments(path, qwen_folder, tool_key="tools", apply_chat_template=False), AssertionError)
    given = [{**row, "tools": "[1" if number == 30 else "[]"} for number, row in enumerate(rows())]
    path = write(tmp_path / "c.parquet", given)
    check_raises(arguments(path, qwen_folder, tool_key="tools", apply_chat_template=False), json.JSONDecodeError)


def test_prompts_that_cannot_be_rendered(
    file: Callable[..., str], qwen_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = rows()
    given[4]["prompt"][-1]["content"] = None
    check_raises(arguments(file(given), qwen_folder), UndefinedError)
    assert any("1 row cannot be rendered: content of message" in text for text in caplog.messages)


# -- real data ---------------------------------------------------------------------------------------------------------


@shared
@pytest.mark.parametrize("name", ["gsm8k", "xquad_12lang", "bfcl_tools", "zh_multiturn", "code_prompts"])
@pytest.mark.parametrize("tokenizer", ["qwen3", "llama3.1-instruct"])
def test_real_prompts(name: str, tokenizer: str, tmp_path: Path) -> None:
    table = pq.read_table(SHARED / "datasets" / f"{name}.parquet")
    path = str(tmp_path / "some.parquet")
    pq.write_table(table.take(pa.array(range(0, len(table), max(1, len(table) // 400)))), path)
    keys = {"label_key": "reward_model", "metadata_key": "extra_info"}
    folder = str(SHARED / "tokenizers" / tokenizer)
    check_same(arguments(path, folder, rollout_max_prompt_len=300, rollout_shuffle=True, **keys), epochs=1)
