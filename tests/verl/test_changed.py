"""A verl whose code is not known: its dataset classes are compared with ours, and the log says how that went."""

import sys
from importlib.metadata import version
from typing import Any

import pytest
from conftest import user
from same import NUMBERED as COLUMNS
from same import assert_same, gpuload_dataset, verl_dataset
from sft_cases import CONVERSATIONS, LONG, TOOLS, compare
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.dataset.rl_dataset import RLHFDataset as VerlDataset

import gpuload.integrations.verl
from gpuload.integrations.known_code import change
from gpuload.integrations.verl import SFTDataset, contract
from gpuload.integrations.verl.rows import ArrowRows

NUMBERED = [*COLUMNS["prompt"]]
RLHF_CHANGE = f"verl {version('verl')}: RLHFDataset._read_files_and_tokenize has changed"
SFT_CHANGE = f"verl {version('verl')}: MultiTurnSFTDataset._read_files_and_process has changed"


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "KNOWN", {place: {} for place in contract.KNOWN})


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "has changed" in message or "falls back" in message]


def test_the_installed_verl_is_known() -> None:
    methods = [getattr(VerlDataset, name) for name in ("_read_files_and_tokenize", "__getitem__")]
    methods += [getattr(MultiTurnSFTDataset, name) for name in ("_read_files_and_process", "__getitem__")]
    assert change("verl", contract.KNOWN, *methods) is None


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize("data", [{"max_prompt_length": 40}, {"filter_overlong_prompts": False}])
def test_prompts_are_used_if_rows_are_equal(write: Any, qwen: Any, caplog: Any, data: dict[str, Any]) -> None:
    prompts = [row + user("long " * 60) if number % 7 == 0 else row for number, row in enumerate(NUMBERED * 2)]
    file = write(prompts)
    found = gpuload_dataset(file, qwen, gpuload={"reuse_ids": True, "device": "cpu"}, **data)
    assert isinstance(found.dataframe, ArrowRows)
    assert said(caplog) == [f"gpuload: {RLHF_CHANGE}; 64 rows prepared by both are equal: used"]
    assert len(found) == len(verl_dataset(file, qwen, **data))
    caplog.clear()
    found = gpuload_dataset(file, qwen, **data)
    assert_same(found, verl_dataset(file, qwen, **data))


@pytest.mark.usefixtures("unknown")
def test_prompts_are_read_by_verl_if_rows_differ(
    write: Any, qwen: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = VerlDataset.__getitem__

    def changed(self: Any, item: int) -> Any:
        row = stock(self, item)
        return row | {"turns": 2} if len(row["raw_prompt"]) == 2 else row

    monkeypatch.setattr(VerlDataset, "__getitem__", changed)
    file = write([*NUMBERED * 10, user("a") + user("b"), *NUMBERED])
    found = gpuload_dataset(file, qwen)
    assert not isinstance(found.dataframe, ArrowRows)
    assert said(caplog) == [
        f"gpuload: falls back to verl's own dataset class: {RLHF_CHANGE}, and 64 rows read by both differ"
    ]
    assert sum("turns" in found[row] for row in range(len(found))) == 1


@pytest.mark.usefixtures("unknown")
def test_a_class_that_cannot_be_made_of_the_rows(
    write: Any, qwen: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(self: Any) -> None:
        raise RuntimeError("new")

    changed.__qualname__ = "RLHFDataset._read_files_and_tokenize"
    monkeypatch.setattr(VerlDataset, "_read_files_and_tokenize", changed)
    with pytest.raises(RuntimeError, match="new"):
        gpuload_dataset(write(NUMBERED), qwen)
    assert said(caplog) == [f"gpuload: falls back to verl's own dataset class: {RLHF_CHANGE}: RuntimeError: new"]


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize("config", [LONG, {"max_length": 24, "truncation": "right", "pad_mode": "right"}])
def test_conversations_are_used_if_rows_are_equal(write: Any, qwen: Any, caplog: Any, config: dict[str, Any]) -> None:
    tools = [TOOLS[:1] if number % 3 else [] for number in range(len(CONVERSATIONS) * 9)]
    file = write({"messages": CONVERSATIONS * 9, "tools": tools})
    assert compare(file, qwen, config).report is not None
    assert said(caplog) == [f"gpuload: {SFT_CHANGE}; 64 rows prepared by both are equal: used"]


@pytest.mark.usefixtures("unknown")
def test_conversations_are_tokenized_by_verl_if_rows_differ(
    write: Any, qwen: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of padding, which the usual sample has not."""
    stock = MultiTurnSFTDataset.__getitem__

    def changed(self: Any, item: int) -> Any:
        row = stock(self, item)
        if self.pad_mode == "right":
            row["position_ids"] = row["position_ids"] + 1
        return row

    monkeypatch.setattr(MultiTurnSFTDataset, "__getitem__", changed)
    dataset = SFTDataset(write({"messages": CONVERSATIONS}), qwen, {"max_length": 200, "pad_mode": "right"})
    assert dataset.report is None
    (line,) = said(caplog)
    assert line.endswith(f": {SFT_CHANGE}, and {len(CONVERSATIONS)} rows read by both differ")
    assert dataset[0]["position_ids"][0] == 1


@pytest.mark.parametrize(
    ("name", "home", "stock"),
    [
        ("RLHFDataset", VerlDataset, "RLHFDataset"),
        ("SFTDataset", MultiTurnSFTDataset, "MultiTurnSFTDataset"),
    ],
)
def test_other_parameters(name: str, home: Any, stock: str, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpuload.integrations.verl._class_of.cache_clear()
    monkeypatch.setattr(home, "__getitem__", lambda self, item, more: item)
    assert getattr(gpuload.integrations.verl, name) is getattr(gpuload.integrations.verl, name) is home
    why = f"{stock}.__getitem__ has the parameters self, item, more"
    assert said(caplog) == [f"gpuload: falls back to verl's own {stock}: verl {version('verl')}: {why}"]
    gpuload.integrations.verl._class_of.cache_clear()


def test_a_function_that_has_moved(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpuload.integrations.verl._class_of.cache_clear()
    monkeypatch.delattr(sys.modules["verl.utils.py_functional"], "convert_nested_value_to_list_recursive")
    assert gpuload.integrations.verl.SFTDataset is MultiTurnSFTDataset
    assert "verl.utils.py_functional has no convert_nested_value_to_list_recursive" in caplog.text
    gpuload.integrations.verl._class_of.cache_clear()
    assert gpuload.integrations.verl.SeedRLHFDataset
