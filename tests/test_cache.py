"""The token cache: warm equals cold in everything, whatever decides the ids decides the key, damage is a miss."""

import copy
import errno
import itertools
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cache_cases import TEMPLATE, entries, same
from conftest import user
from hypothesis import given
from hypothesis import strategies as st
from tiers import SHARED, shared, shared_files
from transformers import AutoTokenizer

import gpuload
from gpuload.cache import directory
from gpuload.cache.entry import Entry, EntryWriter, read_entry
from gpuload.cache.store import TokenCache
from gpuload.cli.main import main
from gpuload.core.arrays import Ragged
from gpuload.core.errors import DataError, MismatchError, StoreError, TokenizerError
from gpuload.core.files import PartialDirectory
from gpuload.engines.host import engine as cpu
from gpuload.engines.host.encode import HostEncoder
from gpuload.engines.protocol import Tokenized
from gpuload.pipeline.keep_in_memory import InMemory

# -- warm equals cold ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_prompt_length": 30},
        {"max_prompt_length": 9, "filter_overlong_prompts": False, "truncation": "middle"},
        {"return_raw_chat": True},
        {"pad_token_id": 3, "seed": 4, "shuffle": True},
    ],
    ids=str,
)
def test_warm_equals_cold(
    options: dict[str, Any], files: list[str], qwen: Any, warm_cache: Path, made: list[int]
) -> None:
    filled = gpuload.load(files, qwen, chat_template=TEMPLATE)
    assert (filled.report.from_cache, filled.report.into_cache) == ([], files)
    assert f"3 of 3 files written to {warm_cache}" in str(filled.report)
    cold = gpuload.load(files, qwen, chat_template=TEMPLATE, token_cache=False, **options)
    assert cold.report.by_reference
    assert cold.report.rows_rejected == 5
    count = len(made)
    warm = gpuload.load(files, qwen, chat_template=TEMPLATE, **options)
    assert len(made) == count  # nothing was rendered or encoded
    assert (warm.report.from_cache, warm.report.into_cache) == (files, [])
    same(warm, cold)
    assert f"tokens of 3 of 3 files read from {warm_cache}" in str(warm.report)
    assert "rows compared when their tokens were cached, none differed" in str(warm.report)


@pytest.mark.parametrize("shuffle", [False, True])
def test_samples_of_a_warm_cache(
    shuffle: bool, gsm8k: str, files: list[str], qwen: Any, warm_cache: Path, made: list[int]
) -> None:
    wanted = [files[1], gsm8k]
    options = {"max_samples": 1000, "shuffle": shuffle, "seed": 3}
    cold = gpuload.load(wanted, qwen, token_cache=False, **options)
    gpuload.load(wanted, qwen)
    count = len(made)
    warm = gpuload.load(wanted, qwen, **options)
    assert len(made) == count
    same(warm, cold, checked=False)


def test_some_rows_of_a_file_are_no_entry(gsm8k: str, files: list[str], qwen: Any, warm_cache: Path) -> None:
    """An entry has all rows: of a sample, only files that it has wholly are kept."""
    options = {"max_samples": 100, "device": "cpu"}
    sampled = gpuload.load([files[1], gsm8k], qwen, **options)
    assert sampled.report.into_cache == [files[1]]
    assert len(entries(warm_cache)) == 1
    again = gpuload.load([files[1], gsm8k], qwen, **options)
    assert again.report.from_cache == [files[1]]
    same(again, sampled)


def test_old_and_new_files_side_by_side(files: list[str], gsm8k: str, qwen: Any, warm_cache: Path) -> None:
    gpuload.load([files[0], files[2]], qwen, chat_template=TEMPLATE)
    mixed = [files[0], gsm8k, files[2], files[0], files[1]]
    warm = gpuload.load(mixed, qwen, chat_template=TEMPLATE)
    assert warm.report.from_cache == [files[0], files[2], files[0]]
    assert warm.report.into_cache == [gsm8k, files[1]]
    assert "each different word once" in warm.report.engine
    same(warm, gpuload.load(mixed, qwen, chat_template=TEMPLATE, token_cache=False), checked=False)
    assert gpuload.load(mixed, qwen, chat_template=TEMPLATE).report.from_cache == mixed


def test_the_tokenizer_is_identified_while_others_encode(
    write: Callable[..., str], qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless an entry has as many rows: its name says whether it is that of the file."""
    steps: list[str] = []
    for owner, name in ((TokenCache, "_key"), (InMemory, "add")):
        real = getattr(owner, name)

        def spy(*given: Any, real: Any = real, name: str = name) -> Any:
            steps.append(name)
            return real(*given)

        monkeypatch.setattr(owner, name, spy)
    one, other, longer = ({"prompt": [user(f"{word} {k}") for k in range(count)]} for word, count in
                          (("a", 5), ("b", 5), ("c", 6)))  # fmt: skip
    for table, first in ((one, "add"), (longer, "add"), (other, "_key"), (one, "_key"), (longer, "_key")):
        steps.clear()
        file = write(table)
        cached = first == "_key" and table is not other
        found = gpuload.load(file, qwen)
        assert steps[0] == first
        assert found.report.from_cache == [file] * cached
        assert found.report.into_cache == [file] * (not cached)
        same(found, gpuload.load(file, qwen, token_cache=False), checked=False)


def _adds_a_token(tokenizer: Any) -> None:
    tokenizer.add_tokens(["magic"])


def _sets_an_attribute(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.model.end_of_word_suffix = "</w>"


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("change", [_adds_a_token, _sets_an_attribute])
def test_a_tokenizer_that_is_changed_during_a_load(
    change: Callable[[Any], None], store: Any, write: Callable[..., str], qwen: Any, warm_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whose ids its rows have, nobody knows: later loads do not get them, whichever tokenizer they have."""
    file = [write({"prompt": [user(f"magic {word} {k}") for k in range(50)]}) for word in "ab"]
    changed, find = copy.deepcopy(qwen), TokenCache.find

    def change_then(self: TokenCache, source: Any) -> Any:
        found = find(self, source)
        change(changed)
        return found

    monkeypatch.setattr(TokenCache, "find", change_then)
    found = gpuload.load(file, changed, store=store, verify="off")
    assert str(found.report).count("the tokenizer was changed while the load used it") == 1
    monkeypatch.setattr(TokenCache, "find", find)
    for tokenizer in (qwen, changed):
        again = gpuload.load(file, tokenizer, store=store)
        assert not again.report.from_cache
        assert again.tokens.to_lists() == gpuload.load(file, tokenizer, token_cache=False).tokens.to_lists()


def test_a_renamed_file_is_found(files: list[str], qwen: Any, warm_cache: Path, tmp_path: Path) -> None:
    gpuload.load(files[0], qwen)
    os.rename(files[0], tmp_path / "moved.parquet")
    assert gpuload.load(tmp_path / "moved.parquet", qwen).report.from_cache == [str(tmp_path / "moved.parquet")]


def test_the_text_has_to_be_made(files: list[str], qwen: Any, warm_cache: Path) -> None:
    gpuload.load(files, qwen)
    before = {path: path.stat().st_mtime_ns for path in entries(warm_cache)}
    warm = gpuload.load(files, qwen, return_full_prompt=True)
    assert warm.report.from_cache == warm.report.into_cache == []
    assert entries(warm_cache) == sorted(before)
    same(warm, gpuload.load(files, qwen, return_full_prompt=True, token_cache=False))


def test_rejected_rows_are_rejected_again(files: list[str], qwen: Any, warm_cache: Path) -> None:
    gpuload.load(files, qwen, chat_template=TEMPLATE)
    assert gpuload.load(files, qwen, chat_template=TEMPLATE).report.from_cache == files
    told = []
    for cached in (True, False):
        with pytest.raises(DataError, match="first.parquet row 7: prompt is null") as raised:
            gpuload.load(files, qwen, chat_template=TEMPLATE, strict=True, token_cache=cached)
        told.append(str(raised.value))
    assert told[0] == told[1]


def test_a_load_that_keeps_no_row_still_fills_the_cache(files: list[str], qwen: Any, warm_cache: Path) -> None:
    for found in (0, 1):
        with pytest.raises(DataError, match="all 300 rows were dropped"):
            gpuload.load(files[0], qwen, max_prompt_length=1)
        assert len(entries(warm_cache)) == 1, found


@shared
def test_real_files(qwen: Any, warm_cache: Path, made: list[int]) -> None:
    """In the wild: whatever can be loaded, warm and cold."""
    compared = 0
    for file in shared_files("wild/*.parquet")[::3]:
        try:
            cold = gpuload.load(file, qwen, token_cache=False, max_samples=300)
        except gpuload.GpuloadError:
            continue
        gpuload.load(file, qwen, max_prompt_length=100_000)
        count = len(made)
        warm = gpuload.load(file, qwen, max_samples=300)
        assert len(made) == count, file
        same(warm, cold, checked=False)
        compared += 1
    assert compared > 10


@given(st.data())
def test_rows_of_an_entry(data: Any) -> None:
    """Any range of rows, wherever the parts' edges are, and counts that add up."""
    lengths = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=4))
    parts, rows, row = [], [], 0
    for of_part in lengths:
        rejected = {i: f"row {row + i}" for i, length in enumerate(of_part) if length == 0}
        ids = [[row + i] * length for i, length in enumerate(of_part)]
        compiled = len(ids) - len(rejected) - data.draw(st.integers(0, 1)) * (len(ids) > len(rejected))
        by_reference = len(ids) - len(rejected) - compiled
        reasons = {"why": by_reference} if by_reference else {}
        sizes = np.array(of_part)
        parts.append(
            Tokenized(
                ids=Ragged.from_lists(ids),
                text_sizes=sizes,
                text_nbytes=int(sizes.sum()),
                rejected=rejected,
                compiled_rows=compiled,
                reasons=reasons,
            )
        )
        rows += ids
        row += len(ids)
    with tempfile.TemporaryDirectory() as folder:
        writer = EntryWriter(Path(folder), "key", "source")
        for part in parts:
            writer.write(part, 0)
        writer.close("sample")
        entry = Entry.again(writer.path, "key", row)
    edges = sorted({0, row, *data.draw(st.lists(st.integers(0, row), max_size=4))})
    pairs = list(itertools.pairwise(edges))
    ranges = [entry.rows(low, high) for low, high in pairs]
    for (low, high), found in zip(pairs, ranges, strict=True):
        assert found.ids.to_lists() == rows[low:high]
        assert found.text_sizes.tolist() == [len(ids) for ids in rows[low:high]]
        assert found.rejected == {i: f"row {low + i}" for i, ids in enumerate(rows[low:high]) if not ids}
        picked = data.draw(st.lists(st.integers(0, high - low - 1), unique=True).map(sorted))
        assert found.take(np.array(picked, np.int64)).ids.to_lists() == [rows[low + i] for i in picked]
    assert sum(found.compiled_rows for found in ranges) == sum(part.compiled_rows for part in parts)
    assert sum(found.reasons.get("why", 0) for found in ranges) == sum(part.reasons.get("why", 0) for part in parts)


# -- exactness -------------------------------------------------------------------------------------------------------


def test_verification_is_never_weaker_than_asked(files: list[str], qwen: Any, warm_cache: Path) -> None:
    def found(verify: str) -> bool:
        report = gpuload.load(files[0], qwen, verify=verify).report
        assert bool(report.from_cache) != bool(report.into_cache)
        if verify == "full":
            assert report.check.rows + report.check.earlier == report.rows_read - report.rows_rejected
        return bool(report.from_cache)

    asked = ["off", "off", "sample", "off", "sample", "full", "full", "sample", "off"]
    assert [found(verify) for verify in asked] == [False, True, False, True, True, False, True, True, True]
    assert len(entries(warm_cache)) == 1


def test_wrong_tokens_are_never_kept(
    write: Callable[..., str], gsm8k: str, qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of the file where one differs, and not those of any other file of the load."""
    real = cpu.host_encoder

    def wrong(*given: Any) -> HostEncoder:
        def encode(text: pa.LargeStringArray) -> Ragged:
            ids = real(*given).encode(text)
            for row in range(len(ids)):
                if text[row].as_py().startswith("<|im_start|>alone"):
                    ids[row][-1] += 1
            return ids

        return HostEncoder("wrong", encode)

    two = [gsm8k, write([user("not this"), user("alone")])]
    # Every row is compared: a sample stops after a tenth of a second, which on a busy machine is the first file.
    options: dict[str, Any] = {"chat_template": "<|im_start|>{{ messages[0].content }}", "verify": "full"}
    with monkeypatch.context() as patched:
        patched.setattr(cpu, "host_encoder", wrong)
        with pytest.warns(UserWarning, match="data.parquet row 1"):
            prompts = gpuload.load(two, qwen, **options)
        assert prompts.report.into_cache == []
        with pytest.raises(MismatchError):
            gpuload.load(two, qwen, strict=True, **options)
    assert entries(warm_cache) == []
    right = gpuload.load(two, qwen, **options)
    assert right.report.from_cache == []
    assert right.tokens.to_lists() == prompts.tokens.to_lists()


# -- damage, other processes, little room ----------------------------------------------------------------------------


def test_a_damaged_entry_is_made_again(files: list[str], qwen: Any, warm_cache: Path) -> None:
    cold = gpuload.load(files[0], qwen, chat_template=TEMPLATE)
    (entry,) = entries(warm_cache)
    whole = entry.read_bytes()
    table = pa.table({"ids": [[1, 2]] * 300})
    with pa.OSFile(str(entry), "wb") as sink, pa.ipc.new_file(sink, table.schema) as foreign:
        foreign.write_table(table)
    strange = [entry.read_bytes(), b"", b"not an entry", b"\0" * len(whole), whole[:-1], whole[: len(whole) // 2]]
    strange += [whole[: len(whole) // 3] + b"\0" * 4096 + whole[len(whole) // 3 + 4096 :]]
    for content in strange:
        entry.write_bytes(content)
        again = gpuload.load(files[0], qwen, chat_template=TEMPLATE)
        assert again.report.into_cache == [files[0]]
        assert entries(warm_cache) == [entry]
        assert gpuload.load(files[0], qwen, chat_template=TEMPLATE).report.from_cache == [files[0]]
    same(again, cold)


def test_no_changed_byte_changes_a_token(files: list[str], qwen: Any, warm_cache: Path, tmp_path: Path) -> None:
    """One byte at a time, in a process of its own: what is read is what was written, or nothing."""
    gpuload.load(files[0], qwen, chat_template=TEMPLATE)
    (entry,) = entries(warm_cache)
    script = tmp_path / "flip.py"
    script.write_text(
        "import random, sys\n"
        "from pathlib import Path\n"
        "from gpuload.cache.entry import read_entry\n"
        "entry, key, copy = Path(sys.argv[1]), Path(sys.argv[1]).stem, Path(sys.argv[2])\n"
        "def known(found):\n"
        "    return [vars(part) | {'text_sizes': part.text_sizes.tolist(), 'ids': part.ids.to_lists()}\n"
        "        for part in found.parts], found.verified, found.compared\n"
        "whole, expected = entry.read_bytes(), known(read_entry(entry, key, 300))\n"
        "assert len(expected[0]) == 3 and expected[0][0]['rejected']\n"
        "random.seed(0)\n"
        "places = [*range(len(whole) - 3000, len(whole)), *random.sample(range(len(whole)), 3000)]\n"
        "missed = 0\n"
        "for place in places:\n"
        "    changed = bytearray(whole)\n"
        "    changed[place] ^= 1 << random.randrange(8)\n"
        "    copy.write_bytes(changed)\n"
        "    found = read_entry(copy, key, 300)\n"
        "    missed += found is None\n"
        "    assert found is None or known(found) == expected, place\n"
        "print(missed)\n"
    )
    done = _python(script, entry, tmp_path / "copy.arrow")
    assert int(done) > 2000


def test_an_entry_of_another_key_or_size(files: list[str], qwen: Any, warm_cache: Path) -> None:
    gpuload.load(files[0], qwen)
    (entry,) = entries(warm_cache)
    assert read_entry(entry, entry.stem, 300) is not None
    assert read_entry(entry, entry.stem, 299) is None
    assert read_entry(entry, "another", 300) is None
    assert read_entry(entry.with_name("none.arrow"), entry.stem, 300) is None


def _python(*arguments: object) -> str:
    return _finish(_start(*arguments))


def _start(*arguments: object) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(Path(gpuload.__file__).parents[1])}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    return out.strip()


def test_processes_that_start_together(
    files: list[str], gsm8k: str, qwen: Any, qwen_folder: str, warm_cache: Path, tmp_path: Path
) -> None:
    some = str(tmp_path / "some.parquet")
    pq.write_table(pq.read_table(gsm8k).slice(0, 1000), some)
    script = tmp_path / "load.py"
    script.write_text(
        "import sys, gpuload\n"
        "prompts = gpuload.load(sys.argv[2:], sys.argv[1])\n"
        "print(prompts.fingerprint['tokens'], len(prompts.report.from_cache) + len(prompts.report.into_cache))\n"
    )
    wanted = [*files, some]
    ranks = [_start(script, qwen_folder, *wanted) for _ in range(2)]
    expected = gpuload.load(wanted, qwen, token_cache=False).fingerprint["tokens"]
    assert {_finish(rank) for rank in ranks} == {f"{expected} 4"}
    assert sorted(path.suffix for path in entries(warm_cache)) == [".arrow"] * 4
    warm = gpuload.load(wanted, qwen)
    assert warm.report.from_cache == wanted
    assert warm.fingerprint["tokens"] == expected


def test_what_was_not_used_for_the_longest_time_goes_first(
    write: Callable[..., str], qwen: Any, warm_cache: Path
) -> None:
    files = [write([user(f"{number} " * 500)], f"{number}.parquet") for number in range(4)]
    sizes = []
    for age, file in zip((50, 40, 30), files, strict=False):
        gpuload.load(file, qwen, max_prompt_length=4000)
        (new,) = [path for path in entries(warm_cache) if path.stat().st_mtime > time.time() - 20]
        os.utime(new, (time.time() - age,) * 2)
        sizes.append(new.stat().st_size)
    assert gpuload.load(files[0], qwen, max_prompt_length=4000).report.from_cache == [files[0]]  # and is used now
    gpuload.load(files[3], qwen, max_prompt_length=4000, token_cache_bytes=sum(sizes) + 100)
    kept = [bool(gpuload.load(file, qwen, max_prompt_length=4000).report.from_cache) for file in files]
    assert kept == [True, False, True, True]


def test_what_others_are_writing_counts(files: list[str], qwen: Any, warm_cache: Path) -> None:
    gpuload.load(files[0], qwen)
    other = PartialDirectory(warm_cache)
    (other.path / "half").write_bytes(bytes(100_000))
    held = entries(warm_cache)
    gpuload.load(files[1], qwen, token_cache_bytes=100_000)
    other.remove()
    (new,) = entries(warm_cache)
    assert new not in held


def test_a_load_removes_what_killed_ones_left(files: list[str], qwen: Any, warm_cache: Path) -> None:
    """Also a load that finds everything in the cache and writes nothing."""
    gpuload.load(files[1], qwen)
    for folder in (warm_cache, warm_cache.parent):
        left = PartialDirectory(folder)
        (left.path / "half").touch()
        left._lock.close()
    gpuload.load(files[1], qwen)
    assert len(entries(warm_cache)) == 1
    assert list(warm_cache.parent.glob("*.partial")) == []


def test_a_load_that_does_not_fit(files: list[str], gsm8k: str, qwen: Any, warm_cache: Path) -> None:
    """What fits is kept, and found by the next load, which does not write the rest in its place."""
    gpuload.load(files[0], qwen)
    (entry,) = entries(warm_cache)
    bound = entry.stat().st_size + 20_000
    for _ in range(2):
        report = gpuload.load([files[0], gsm8k], qwen, token_cache_bytes=bound).report
        assert (report.from_cache, report.into_cache) == ([files[0]], [])
        assert f"tokens are not cached: they would exceed token_cache_bytes={bound:,}" in report.notes
        assert entries(warm_cache) == [entry]


def test_the_bound_is_a_part_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.arrow").write_bytes(b"\0" * 5000)
    disk = type("usage", (), {"free": 15_000})
    monkeypatch.setattr(directory.shutil, "disk_usage", lambda folder: disk)
    assert directory.default_bound(tmp_path) == 2000
    disk.free = 10**15  # type: ignore[attr-defined]
    assert directory.default_bound(tmp_path) == 20 * 10**9


def test_a_folder_that_cannot_be_written(files: list[str], qwen: Any, tmp_path: Path, warm_cache: Path) -> None:
    (tmp_path / "a file").touch()
    prompts = gpuload.load(files, qwen, cache_dir=str(tmp_path / "a file"))
    (note,) = [note for note in prompts.report.notes if "not cached" in note]
    assert note == f"tokens are not cached: {tmp_path / 'a file' / 'tokens'}: Not a directory"
    same(prompts, gpuload.load(files, qwen, token_cache=False))


def test_a_folder_that_cannot_be_looked_at(
    files: list[str],
    qwen_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As if the cache were in the closed home of another user: `stat` fails, and not because there is nothing."""
    closed = tmp_path / ("x" * 300)
    monkeypatch.setenv("GPULOAD_CACHE", str(closed))
    prompts = gpuload.load(files, qwen_folder)
    assert f"tokens are not cached: {closed / 'tokens'}: File name too long" in prompts.report.notes
    same(prompts, gpuload.load(files, qwen_folder, token_cache=False))
    with pytest.raises(StoreError, match="cannot write the store: File name too long"):
        gpuload.load(files, qwen_folder, store="disk")
    assert main(["cache"]) == 0
    assert "0 entries" in capsys.readouterr().out
    assert main(["demo"]) == 1
    assert "the demo's tokenizer cannot be written (File name too long)" in capsys.readouterr().err
    with pytest.raises(TokenizerError):
        gpuload.load(files, str(closed / "tokenizer"))


def test_a_working_directory_whose_name_is_not_utf8(
    files: list[str], qwen_folder: str, tmp_path: Path, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    expected = gpuload.load(files, qwen_folder, token_cache=False).tokens.to_lists()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GPULOAD_CACHE", "cache")
    for name in files:
        shutil.copy(name, Path(name).name)
    names = [Path(name).name for name in files]
    assert gpuload.load(names, qwen_folder).tokens.to_lists() == expected
    assert gpuload.load(names, qwen_folder).report.from_cache == names
    stored = gpuload.load(names, qwen_folder, store="disk")
    monkeypatch.chdir("/")  # as Hydra does after it has read its configuration
    copied = pickle.loads(pickle.dumps(stored))
    assert [row["raw_prompt_ids"] for row in copied] == expected


@pytest.mark.parametrize("at", ["write", "close"])
def test_a_full_disk(at: str, files: list[str], qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpuload.load(files[1], qwen)
    real = getattr(EntryWriter, at)

    def full(writer: EntryWriter, *arguments: Any) -> None:
        if writer.rows:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(writer, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(EntryWriter, at, full)
        prompts = gpuload.load([files[1], files[0], files[2]], qwen)
    assert prompts.report.from_cache == [files[1]]
    assert f"tokens are not cached: {warm_cache}: No space left on device" in prompts.report.notes
    assert len(entries(warm_cache)) == 1 + len(prompts.report.into_cache)
    same(prompts, gpuload.load([files[1], files[0], files[2]], qwen, token_cache=False), checked=False)


def test_nothing_is_left_of_a_load_that_fails(files: list[str], qwen: Any, warm_cache: Path) -> None:
    with pytest.raises(DataError):
        gpuload.load([files[1], files[0]], qwen, chat_template=TEMPLATE, strict=True)
    assert entries(warm_cache) == []


# -- other engines, the command line ---------------------------------------------------------------------------------


def test_an_entry_serves_every_engine(files: list[str], qwen: Any, warm_cache: Path) -> None:

    from simulator.host_kernels import COMPILER, HostKernels

    if COMPILER is None:
        pytest.skip("no C++ compiler")
    from simulator import engine_on, load_with

    on_device = engine_on(HostKernels())
    cold = gpuload.load(files[:2], qwen)
    warm = load_with(on_device, files, qwen)
    assert warm.report.from_cache == files[:2]
    assert warm.report.into_cache == [files[2]]
    same(load_with(on_device, files[:2], qwen), cold)


def test_prepare(
    files: list[str], qwen_folder: str, qwen: Any, warm_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["prepare", *files, "--tokenizer", qwen_folder, "--template-kwargs", '{"enable_thinking": false}']
    assert main(command) == 0
    assert f"tokens of 3 of 3 files written to {warm_cache}" in capsys.readouterr().out
    assert main(command) == 0
    assert f"tokens of 3 of 3 files read from {warm_cache}" in capsys.readouterr().out
    options: dict[str, Any] = {"apply_chat_template_kwargs": {"enable_thinking": False}}
    assert gpuload.load(files, qwen, **options).report.from_cache == files
    assert main([*command, "--verify", "full"]) == 0
    assert gpuload.load(files, qwen, verify="full", **options).report.from_cache == files

    assert main([*command, "--cache-dir", str(tmp_path / "elsewhere")]) == 0
    assert main(["cache", "--clear", "--cache-dir", str(tmp_path / "elsewhere")]) == 0
    assert f"{tmp_path / 'elsewhere' / 'tokens'}: removed 3 entries" in capsys.readouterr().out
    assert len(entries(warm_cache)) == 3
    for clear in ([], ["--clear"]):
        with pytest.raises(SystemExit):
            main(["cache", *clear, "--cache-dir", "s3://user:secret@bucket/tokens"])
        assert "--cache-dir s3://bucket/tokens: a URL: pass a local directory" in capsys.readouterr().err
    assert len(entries(warm_cache)) == 3
    assert main(["cache", "--clear"]) == 0
    assert entries(warm_cache) == []


def test_the_list_of_cached_files(
    files: list[str], qwen: Any, warm_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "--cache-dir", str(tmp_path / "nowhere")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'nowhere' / 'tokens'}: 0 entries, 0.0 MB\n"
    loaded = gpuload.load(files, qwen, chat_template=TEMPLATE)
    found = {file.source: file for file in directory.cached_files(warm_cache)}
    assert set(found) == set(files)
    assert sum(file.rows for file in found.values()) == loaded.report.rows_read
    oldest = entries(warm_cache)[0]
    oldest.write_bytes(b"damaged")
    os.utime(oldest, (1e9, 1e9))
    assert main(["cache"]) == 0
    first, _, titles, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{warm_cache}: 3 entries, 0.")
    assert titles.split() == ["last", "use", "size", "rows", "what", "file"]
    assert lines[-1].startswith("2001-09-0")
    assert lines[-1].endswith("0  ids      (damaged: it is made again when it is needed)")
    assert {line.rpartition("  ")[2] for line in lines[:-1]} < set(files)
    gpuload.load(files, qwen, chat_template=TEMPLATE, store="disk")
    assert main(["cache"]) == 0
    rows = [line.split()[-2:] for line in capsys.readouterr().out.splitlines() if line.endswith(tuple(files))]
    assert sorted(rows) == sorted([what, file] for what in ("ids", "columns") for file in files)
    assert main(["cache", "--clear"]) == 0
    assert f"{warm_cache.parent / 'store'}: removed 6 entries" in capsys.readouterr().out


def test_prepare_says_what_is_wrong(
    files: list[str], qwen_folder: str, warm_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["prepare", files[0], "--tokenizer", qwen_folder]
    (tmp_path / "a file").touch()
    assert main([*command, "--cache-dir", str(tmp_path / "a file")]) == 1
    assert "1 of 1 files are not in the cache: tokens are not cached: " in capsys.readouterr().err
    assert main([*command, "--template-kwargs", "{"]) == 1
    assert "not valid JSON" in capsys.readouterr().err
    for wrong in (["prepare"], ["prepare", files[0]], ["prepare", "--tokenizer", qwen_folder]):
        with pytest.raises(SystemExit) as stop:
            main(wrong)
        assert stop.value.code == 2
    capsys.readouterr()


@shared
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "llama3.1-instruct", "mistral-nemo", "smollm"])
def test_real_tokenizers(name: str, gsm8k: str, warm_cache: Path, made: Sequence[int]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    options: dict[str, Any] = {"pad_token_id": 0}
    if tokenizer.chat_template is None:
        options["chat_template"] = TEMPLATE
    cold = gpuload.load(gsm8k, tokenizer, max_samples=-1, **options)
    count = len(made)
    warm = gpuload.load(gsm8k, AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name), **options)
    assert warm.report.from_cache == [gsm8k]
    assert len(made) == count
    same(warm, cold)
