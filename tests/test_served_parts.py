"""Rows as served, part by part, as workers of a Ray cluster make them. `test_ray_dataset.py` has the cluster."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_served import MESSAGES, STRIPPING

import gpuload
from gpuload.core.errors import OptionError
from gpuload.integrations.ray import dataset as ray_dataset
from gpuload.integrations.ray import read_chats, read_prompts, report
from gpuload.integrations.ray.reports import ReportKeeper

pytestmark = pytest.mark.filterwarnings("ignore:.*rows were dropped")

OTHER = [{"role": "user", "content": "Bye."}, {"role": "assistant", "content": "So.", "reasoning_content": "hm"}]
ROWS = [MESSAGES, OTHER, MESSAGES[:1], [*MESSAGES, *OTHER], OTHER, MESSAGES]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Three files in row groups of two, the second one without rows; with conversations of no, one and more rows."""
    found = []
    for name, some in (("a", ROWS), ("b", []), ("c", ROWS[1:])):
        found.append(str(tmp_path / f"{name}.parquet"))
        made = pa.Table.from_pylist([{"messages": each, "n": k, "turn": "own"} for k, each in enumerate(ROWS)])
        pq.write_table(made.slice(len(ROWS) - len(some)), found[-1], row_group_size=2)
    return found


class Mapped:
    """A dataset of Ray Data as far as it is used: items, mapped by one actor for each of them."""

    def __init__(self, items: list[dict[str, bytes]]):
        self.items = items

    def map_batches(self, actor: Any, fn_constructor_args: Any, **settings: Any) -> "Mapped":
        made = (actor(*fn_constructor_args)(pa.Table.from_pylist([item])) for item in self.items)
        self.table = pa.concat_tables([table for tables in made for table in tables])
        return self


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Puts something else in the place of Ray; the devices for which workers were asked for."""
    ray, data, collating, found = ModuleType("ray"), ModuleType("ray.data"), ModuleType("ray.data.collate_fn"), []
    vars(ray).update(data=data, get=lambda value: value)
    vars(data).update(from_items=lambda items, **settings: Mapped(items), ActorPoolStrategy=lambda **size: None)
    vars(collating).update(ArrowBatchCollateFn=object)
    for module in (ray, data, collating):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "gpuload.integrations.ray.collate", raising=False)
    keeper = ReportKeeper()
    remote = SimpleNamespace(**{name: SimpleNamespace(remote=getattr(keeper, name)) for name in ("put", "get")})
    monkeypatch.setattr(ray_dataset, "start_keeper", lambda: remote)

    def workers_for(device: str, *given: Any) -> tuple[Any, str]:
        found.append(device)
        return SimpleNamespace(concurrency=1, num_cpus=1, num_gpus=0), "cpu"

    monkeypatch.setattr(ray_dataset, "workers_for", workers_for)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_length": 42},
        {"max_length": 60, "overlong": "keep_start"},
        {"max_samples": 7, "loss_on": "last_turn"},
        {"missing_reasoning": "learn", "thinking": ("<think>\n", "\n</think>\n\n"), "history": "sampled"},
    ],
    ids=str,
)
def test_chats_are_those_of_load_chats(
    files: list[str], qwen: Any, devices: list[str], tmp_path: Path, options: dict[str, Any]
) -> None:
    (tmp_path / "t.jinja").write_text(STRIPPING)
    options = {"chat_template": STRIPPING, "serving_template": str(tmp_path / "t.jinja"), **options}
    expected = gpuload.load_chats(files, qwen, turns="served", progress=False, **options)
    dataset = read_chats(files, qwen, turns="served", rows_per_task=2, **options)
    found, wanted = dataset.table, expected.to_arrow().read_all()  # type: ignore[attr-defined]
    assert found.select(wanted.schema.names).equals(wanted)
    assert "loss_on" in options or len(set(found["conversation"].to_pylist())) < len(found)
    ours, theirs = report(dataset), expected.report
    origins = [(ours.files[each["file"]], each["row"]) for each in found["origin"].to_pylist()]
    assert origins == [expected.origin(row) for row in range(len(expected))]
    for name in "rows_read rows_kept overlong rejected counts tokens longest shortest".split():
        assert getattr(ours, name) == getattr(theirs, name), name
    assert devices == ["cpu"]  # there is no engine for GPUs
    from gpuload.integrations.ray.collate import collate_fn

    batch = collate_fn(dataset)(found)
    for name, values in expected.batch(range(len(expected))).items():
        same = torch.equal if isinstance(values, torch.Tensor) else lambda one, other: one.tolist() == other.tolist()
        assert same(batch[name], values), name


def test_prompts_of_turns_are_those_of_load(files: list[str], qwen: Any, devices: list[str]) -> None:
    for more in ({}, {"max_samples": 8, "max_prompt_length": 40}):
        options = {"prompt_key": "messages", "turns": "served", "return_raw_chat": True, **more}
        expected = gpuload.load(files, qwen, progress=False, **options)
        dataset = read_prompts(files, qwen, rows_per_task=2, **options)
        found, wanted = dataset.table, expected.to_arrow().read_all()  # type: ignore[attr-defined]
        assert found.select(wanted.schema.names).equals(wanted)
        rows = [(each["file"], each["row"]) for each in found["origin"].to_pylist()]
        first = {0: 0, 2: len(ROWS)}
        assert [first[file] + row for file, row in rows] == found["conversation"].to_pylist()
        assert report(dataset).rows_kept == len(found) == len(expected)
    assert devices == ["auto"] * 2


def test_texts_are_an_error_at_once(tmp_path: Path, qwen: Any, devices: list[str]) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "t.parquet")
    with pytest.raises(OptionError, match="has texts: turns='served' is for conversations"):
        read_prompts(str(tmp_path / "t.parquet"), qwen, turns="served")
    with pytest.raises(OptionError, match="is text that no template renders"):
        read_chats(str(tmp_path / "t.parquet"), qwen, turns="served", format="text", messages_key="prompt")
    assert not devices
