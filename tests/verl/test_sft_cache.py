"""SFTDataset and the token cache: a second start finds the rows of the first one, and they are those of verl."""

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("verl.utils.dataset")

from omegaconf import OmegaConf
from sft_cases import CONVERSATIONS, LONG, PRINTS_ARGUMENTS, TOOLS, assert_equal, conversation, raising_rows
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from gpuload.cache.token_store import DiskTokens
from gpuload.core.arrays import Ragged
from gpuload.core.errors import OptionError, StoreError
from gpuload.core.marks import LOSS
from gpuload.integrations.messages import cache as message_cache
from gpuload.integrations.verl import SFTDataset, contract, turns

NULL = [*conversation("x"), {"role": "assistant", "content": None}]
ROWS = [*CONVERSATIONS, NULL] * 3
CONFIG = {**LONG, "ignore_input_ids_mismatch": True}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many conversations each call of the tokenizer of conversations has got."""
    made: list[int] = []
    original = turns.ConversationTokenizer.tokenize

    def counted(self: Any, conversations: Any, *args: Any) -> Any:
        made.append(len(conversations))
        return original(self, conversations, *args)

    monkeypatch.setattr(turns.ConversationTokenizer, "tokenize", counted)
    return made


@pytest.fixture
def opened(qwen_folder: str) -> Callable[..., Any]:
    """opened(template=None) → a tokenizer of its own, as another process has one."""

    def open_tokenizer(template: str | None = None) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
        tokenizer.chat_template = template or tokenizer.chat_template
        return tokenizer

    return open_tokenizer


def start(file: Any, tokenizer: Any, config: dict[str, Any] | None = None, samples: int = -1, **gpuload: Any) -> Any:
    section = OmegaConf.create({**CONFIG, **(config or {}), "gpuload": gpuload})
    dataset = SFTDataset(file, tokenizer, section, max_samples=samples)
    assert dataset.report is not None
    return dataset


def same(one: Any, other: Any) -> None:
    assert_equal(one, other)
    assert raising_rows(one) == raising_rows(other)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_second_start_tokenizes_nothing(
    store: str, write: Any, opened: Any, warm_cache: Path, calls: list[int]
) -> None:
    file = write({"messages": ROWS, "other": range(len(ROWS))})
    cold = start(file, opened(), store=store)
    assert sum(calls) == len(ROWS)
    warm = start(file, opened(), store=store)
    assert sum(calls) == len(ROWS)
    same(warm, cold)
    same(warm, MultiTurnSFTDataset([file], opened(), CONFIG))
    assert raising_rows(warm)
    assert type(warm._ids) is type(cold._ids) is (DiskTokens if store == "disk" else Ragged)
    directory = warm_cache.parent / "store" if store == "disk" else warm_cache
    (entry,) = files_of(directory)
    assert entry.suffix == ".arrow"
    # Both reports have the same counts; the second one says where rows are from.
    parts = [dataset.report.split("; ") for dataset in (cold, warm)]
    assert parts[0][1:] == parts[1][1:]
    assert parts[1][0].endswith(", from the cache")
    assert (f"ids are on disk, in {directory}" in warm.report) == (store == "disk")


def test_calls_of_the_tokenizer_at_a_second_start_do_not_depend_on_the_rows(
    write: Any, opened: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for name, rows in (("few.parquet", CONVERSATIONS[:3]), ("many.parquet", CONVERSATIONS[:5] * 40)):
        file = write({"messages": rows}, name)
        start(file, opened(), verify="off")
        made = [0]
        with monkeypatch.context() as patch:
            for method in ("__call__", "apply_chat_template"):
                original = getattr(PreTrainedTokenizerBase, method)

                def counted(*args: Any, original: Any = original, made: list[int] = made, **kwargs: Any) -> Any:
                    made[0] += 1
                    return original(*args, **kwargs)

                counted.__module__ = original.__module__
                patch.setattr(PreTrainedTokenizerBase, method, counted)
            assert "from the cache" in start(file, opened(), verify="off").report
        counts.append(made[0])
    assert 0 < counts[0] == counts[1]


@pytest.mark.parametrize(
    "other",
    ["template", "tokenizer", "content", "arguments", "mismatch", "thinking", "key", "system prompt", "verl", "verify"],
)
def test_other_conditions_are_not_found(
    other: str, write: Any, opened: Any, warm_cache: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, config, tokenizer, verify = ROWS, {}, opened(PRINTS_ARGUMENTS), "off"
    columns: dict[str, Any] = {"messages": rows, "chat": rows}
    first = {"apply_chat_template_kwargs": {"style": "a"}}
    start(write(columns), opened(PRINTS_ARGUMENTS), first, verify=verify)
    before = len(files_of(warm_cache))
    if other == "template":
        tokenizer = opened(PRINTS_ARGUMENTS + " ")
    elif other == "tokenizer":
        tokenizer.add_tokens(["42"])
    elif other == "content":
        columns["messages"] = [*rows[:-2], rows[0], rows[-1]]
    elif other == "arguments":
        config = {"apply_chat_template_kwargs": {"style": "b"}}
    elif other == "mismatch":
        config = {"ignore_input_ids_mismatch": False}
    elif other == "thinking":
        config = {"enable_thinking_default": True}
    elif other == "key":
        config = {"messages_key": "chat"}
    elif other == "system prompt":
        computed = contract.system_and_generation_prompt
        longer = lambda *args: (computed(*args)[0] + [1], computed(*args)[1])  # noqa: E731
        monkeypatch.setattr("gpuload.integrations.verl.sft.system_and_generation_prompt", longer)
    elif other == "verl":
        monkeypatch.setattr(message_cache, "digest", lambda function: "another")
    else:
        verify = "sample"
    calls.clear()
    found = start(write(columns), tokenizer, first | config, verify=verify)
    assert sum(calls) == len(rows)
    assert "from the cache" not in found.report
    # The same once more is found.
    calls.clear()
    assert "from the cache" in start(write(columns), tokenizer, first | config, verify=verify).report
    assert not calls
    # A stricter comparison replaces the entry; everything else is an entry of its own.
    assert len(files_of(warm_cache)) == before + (other != "verify")


def test_the_same_rows_in_another_place_are_found(
    write: Any, opened: Any, warm_cache: Path, calls: list[int], tmp_path: Path
) -> None:
    file = write({"messages": ROWS})
    cold = start(file, opened())
    moved = tmp_path / "elsewhere" / "rows.parquet"
    moved.parent.mkdir()
    moved.write_bytes(Path(file).read_bytes())
    os.utime(moved, (1e9, 1e9))
    calls.clear()
    same(start(str(moved), opened(), {"max_length": 4095, "pad_mode": "no_padding"}), cold)
    assert not calls


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_some_rows_of_several_files(
    shuffle: bool, store: str, write: Any, opened: Any, warm_cache: Path, calls: list[int]
) -> None:
    tools = [TOOLS[:1] if number % 2 else None for number in range(len(ROWS))]
    thinking = [number % 3 == 0 for number in range(len(ROWS))]
    files = [
        write({"messages": ROWS, "enable_thinking": thinking}, "a.parquet"),
        write({"messages": ROWS[::-1], "tools": tools, "enable_thinking": thinking}, "b.parquet"),
    ]
    config = {"shuffle": shuffle, "seed": 7}
    for samples in (-1, 50):
        cold = start(files, opened(), config, samples, store=store)
        made = sum(calls)
        warm = start(files, opened(), config, samples, store=store)
        assert sum(calls) == made
        if store == "disk":  # ids were written batch by batch, and each file is a batch at least
            assert len(cold._ids.files[0].parts) == 2
        same(warm, cold)
        same(warm, MultiTurnSFTDataset(list(files), opened(), {**CONFIG, **config}, None, samples))
    assert sum(calls) == 2 * len(ROWS) + 50
    # As many other rows are not the same ones.
    start(files, opened(), {"shuffle": True, "seed": 8}, 50, store=store)
    assert sum(calls) == 2 * len(ROWS) + 100


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("place", ["end", "ids"])
def test_a_damaged_entry_is_made_again(
    place: str, store: str, write: Any, opened: Any, warm_cache: Path, calls: list[int]
) -> None:
    file = write({"messages": ROWS})
    cold = start(file, opened(), store=store)
    (entry,) = files_of(warm_cache.parent / "store" if store == "disk" else warm_cache)
    data = bytearray(entry.read_bytes())
    # The longest block has the ids: all other blocks are read when the file is opened.
    at = len(data) - 40 if place == "end" else len(data) // 2
    data[at] ^= 1
    damaged = entry.with_suffix(".damaged")
    damaged.write_bytes(data)
    damaged.replace(entry)
    calls.clear()
    again = start(file, opened(), store=store)
    assert sum(calls) == len(ROWS)
    same(again, cold)
    calls.clear()
    same(start(file, opened(), store=store), cold)
    assert not calls


def test_an_entry_that_differs_from_verl_is_made_again(
    write: Any, opened: Any, warm_cache: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample is compared at each start: here an entry has been written with a wrong mask, unnoticed."""
    file = write({"messages": ROWS})
    right = SFTDataset._add

    def wrong(self: Any, batch: Any, tokenizer: Any, cache: Any) -> Any:
        add = cache.add

        def turned(ids: Ragged, *rest: Any, **counts: int) -> None:
            add(Ragged(ids.values ^ LOSS, ids.offsets), *rest, **counts)

        cache.add = turned
        return right(self, batch, tokenizer, cache)

    monkeypatch.setattr(SFTDataset, "_add", wrong)
    start(file, opened())
    monkeypatch.setattr(SFTDataset, "_add", right)
    calls.clear()
    found = start(file, opened())
    assert sum(calls) == len(ROWS)
    assert "rows from the cache are made again" in found.report
    same(found, MultiTurnSFTDataset([file], opened(), CONFIG))
    calls.clear()
    start(file, opened())
    assert not calls


def test_rows_that_differ_from_verl_do_not_become_an_entry(
    write: Any, opened: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = turns.ConversationTokenizer.tokenize

    def wrong(*args: Any) -> Any:
        tokenized = original(*args)
        tokenized.ids.values[:] ^= LOSS
        return tokenized

    monkeypatch.setattr(turns.ConversationTokenizer, "tokenize", wrong)
    for store in ("memory", "disk"):
        section = {**CONFIG, "gpuload": {"store": store}}
        assert SFTDataset(write({"messages": ROWS}), opened(), section).report is None
    assert files_of(warm_cache) == files_of(warm_cache.parent / "store") == []


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_token_cache_false_keeps_nothing(
    store: str, write: Any, opened: Any, warm_cache: Path, calls: list[int]
) -> None:
    file = write({"messages": ROWS})
    expected = MultiTurnSFTDataset([file], opened(), CONFIG)
    for _ in range(2):
        dataset = start(file, opened(), token_cache=False, store=store)
        same(dataset, expected)
        assert len(files_of(warm_cache.parent / "store")) == (store == "disk")  # its own file
        del dataset
        gc.collect()  # errors of rows have references to it
    assert sum(calls) == 2 * len(ROWS)
    assert files_of(warm_cache) == files_of(warm_cache.parent / "store") == []


def test_the_directory_of_the_data_section(write: Any, opened: Any, warm_cache: Path, tmp_path: Path) -> None:
    file, directory = write({"messages": ROWS}), tmp_path / "own"
    start(file, opened(), {"cache_dir": str(directory)})
    assert "from the cache" in start(file, opened(), {"cache_dir": str(directory)}).report
    assert len(files_of(directory / "tokens")) == 1
    assert files_of(warm_cache) == []


def test_tokens_that_cannot_be_identified(write: Any, opened: Any, warm_cache: Path, calls: list[int]) -> None:
    clock = "{{ strftime_now('%H:%M:%S')[:0] }}" + PRINTS_ARGUMENTS
    file = write({"messages": ROWS})
    for _ in range(2):
        dataset = start(file, opened(clock), verify="off")
        assert "tokens are not cached: the chat template prints the time of day" in dataset.report
    assert sum(calls) == 2 * len(ROWS)


def test_code_of_verl_that_is_not_in_a_file(
    write: Any, opened: Any, warm_cache: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = MultiTurnSFTDataset.__getitem__

    def replaced(self: Any, item: int) -> Any:
        return stock(self, item)

    replaced.__module__, replaced.__qualname__ = stock.__module__, stock.__qualname__
    monkeypatch.setattr(MultiTurnSFTDataset, "__getitem__", replaced)
    for _ in range(2):
        dataset = start(write({"messages": ROWS}), opened())
        assert "tokens are not cached: the code of MultiTurnSFTDataset.__getitem__" in dataset.report
    assert files_of(warm_cache) == []


def test_a_bound_of_the_cache(write: Any, opened: Any, warm_cache: Path) -> None:
    dataset = start(write({"messages": ROWS}), opened(), token_cache_bytes=100)
    assert "tokens are not cached: they would exceed token_cache_bytes=100" in dataset.report
    assert files_of(warm_cache) == []


def test_a_full_disk(write: Any, opened: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write({"messages": ROWS})

    def full(*args: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("gpuload.cache.entry.EntryWriter.write", full)
    dataset = start(file, opened(), store="memory")
    assert "No space left on device" in dataset.report
    with pytest.raises(StoreError, match="the disk is full"):
        start(file, opened(), store="disk")
    assert files_of(warm_cache) == files_of(warm_cache.parent / "store") == []


def test_auto_uses_the_disk_if_memory_is_short(
    write: Any, opened: Any, warm_cache: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write({"messages": ROWS})
    assert isinstance(start(file, opened())._ids, Ragged)
    monkeypatch.setattr("gpuload.pipeline.room.free_memory", lambda: 1000)
    calls.clear()
    found = start(file, opened())
    assert isinstance(found._ids, DiskTokens)
    assert not calls  # the entry of the token cache was moved to the stores
    assert files_of(warm_cache) == []
    # Without space for a store, rows are in memory, and "disk" is an error.
    monkeypatch.setattr("gpuload.cache.directory._free", lambda directory: -(10**9))
    other = write({"messages": ROWS[1:]}, "other.parquet")
    dataset = start(other, opened())
    assert isinstance(dataset._ids, Ragged)
    assert "ids are in memory, although they may take most of it" in dataset.report
    with pytest.raises(StoreError, match="are free"):
        start(other, opened(), {"max_length": 9}, store="disk", token_cache=False)


def test_invalid_settings(write: Any, opened: Any) -> None:
    file = write({"messages": CONVERSATIONS})
    for wrong in ({"store": "disc"}, {"token_cache": "yes"}, {"token_cache_bytes": -1}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            start(file, opened(), **wrong)


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_workers_and_pickles(store: str, write: Any, opened: Any, warm_cache: Path) -> None:
    rows = CONVERSATIONS * 3
    file = write({"messages": rows})
    start(file, opened(), store=store)
    dataset = start(file, opened(), store=store)
    expected = MultiTurnSFTDataset([file], opened(), CONFIG)
    same(pickle.loads(pickle.dumps(dataset)), expected)
    if store == "disk":  # ids are not in the pickle
        assert len(pickle.dumps(dataset._ids)) < 10_000
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=context)
        for row, found in enumerate(loader):
            assert torch.equal(found["input_ids"], expected[row]["input_ids"])
            assert torch.equal(found["loss_mask"], expected[row]["loss_mask"])


def test_a_store_that_was_made_again(write: Any, opened: Any, warm_cache: Path) -> None:
    """Another process that writes the same entry replaces the file: those who have mapped the old one keep it."""
    file = write({"messages": ROWS})
    dataset = start(file, opened(), store="disk")
    (entry,) = files_of(warm_cache.parent / "store")
    sent = pickle.dumps(dataset)
    entry.unlink()
    start(file, opened(), store="disk")
    expected = MultiTurnSFTDataset([file], opened(), CONFIG)
    same(dataset, expected)
    same(pickle.loads(sent), expected)
    entry.unlink()
    same(dataset, expected)
    with pytest.raises(StoreError, match="was removed or replaced"):
        pickle.loads(sent)[0]


RANK = """
import hashlib, os, sys
from transformers import AutoTokenizer
from gpuload.integrations.verl import SFTDataset

file, folder, store, *kill = sys.argv[1:]
if kill:
    import signal
    from gpuload.cache.entry import EntryWriter

    def killed(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    EntryWriter.close = killed  # with all rows written, and not yet complete
config = {"max_length": 4096, "pad_mode": "no_padding", "ignore_input_ids_mismatch": True, "gpuload": {"store": store}}
dataset = SFTDataset(file, AutoTokenizer.from_pretrained(folder), config)
digest = hashlib.sha256()
for row in range(len(dataset)):
    for values in dataset[row].values():
        digest.update(values.numpy().tobytes())
print(digest.hexdigest(), "from the cache" in dataset.report)
"""


def rank(*arguments: str) -> "subprocess.Popen[str]":
    folder = str(Path(message_cache.__file__).parents[3])
    env = os.environ | {"PYTHONPATH": folder, "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen([sys.executable, "-c", RANK, *arguments], env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_ranks_and_a_kill(store: str, write: Any, qwen_folder: str, warm_cache: Path) -> None:
    file = write({"messages": CONVERSATIONS * 5})
    killed = rank(file, qwen_folder, store, "kill")
    assert killed.wait(300) == -signal.SIGKILL
    directory = warm_cache.parent / "store" if store == "disk" else warm_cache
    (unfinished,) = files_of(directory)
    assert unfinished.parent.suffix == ".partial"
    # Ranks that start at once, then one that starts later.
    ranks = [rank(file, qwen_folder, store) for _ in range(2)]
    said = [each.communicate(timeout=300)[0].split()[-2:] for each in ranks]
    said.append(rank(file, qwen_folder, store).communicate(timeout=300)[0].split()[-2:])
    assert len({digest for digest, _ in said}) == 1
    assert said[-1][1] == "True"
    (entry,) = files_of(directory)
    assert entry.suffix == ".arrow"
    assert not list(directory.glob("*.partial"))


def test_an_entry_is_the_table_of_the_report(write: Any, opened: Any, warm_cache: Path) -> None:
    """Rows that verl's method has tokenized, and those that it has to make at each access, are counted in both."""
    rejected = [NULL, *CONVERSATIONS[:4]]
    tools = [TOOLS[:1], TOOLS[:1], None, [], TOOLS]
    file = write({"messages": rejected, "tools": tools})
    cold, warm = start(file, opened()), start(file, opened())
    assert "rows passed to verl's method at each access" in cold.report
    assert cold.report.split("; ")[1:] == warm.report.split("; ")[1:]
    assert pq.read_metadata(file).num_rows == len(warm)


def test_a_cached_start_reads_no_rows_without_a_sample(
    write: Any, opened: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write({"messages": CONVERSATIONS[:3]})
    start(file, opened(), verify="off")

    def read(*args: Any) -> None:
        raise AssertionError("rows are read")

    monkeypatch.setattr("gpuload.integrations.verl.sft.read_conversations", read)
    assert len(start(file, opened(), verify="off")) == 3
