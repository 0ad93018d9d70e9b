"""PromptLoader: order, ranks, state; resuming, also after a training loop was killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import user
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

import gpuload
from gpuload.core.errors import OptionError, ResumeError
from gpuload.core.options import nearest
from gpuload.dataset.loader import PromptLoader


@pytest.fixture(scope="module")
def prompts(gsm8k: str, qwen: Any) -> gpuload.PromptDataset:
    return gpuload.load(gsm8k, qwen, max_samples=103, max_prompt_length=256)


def rows(batch: dict[str, Any]) -> list[int]:
    return [extra["index"] for extra in batch["extra_info"]]


def test_an_epoch_in_order(prompts: gpuload.PromptDataset) -> None:
    loader = prompts.loader(10)
    batches = list(loader)
    assert len(loader) == len(batches) == 11
    assert [row for batch in batches for row in rows(batch)] == list(range(103))
    assert batches[0]["input_ids"].shape == (10, 256)
    assert batches[-1]["input_ids"].shape == (3, 256)
    assert len(list(prompts.loader(10, drop_last=True))) == len(prompts.loader(10, drop_last=True)) == 10


def test_a_batch_equals_its_rows(prompts: gpuload.PromptDataset) -> None:
    batch = next(iter(prompts.loader(7, shuffle=True, seed=3)))
    numbers = rows(batch)
    expected = gpuload.collate_fn([prompts[number] for number in numbers])
    assert batch.keys() == expected.keys()
    for key, values in expected.items():
        if isinstance(values, torch.Tensor):
            assert torch.equal(batch[key], values)
        else:
            assert batch[key].dtype == object
            assert batch[key].shape == values.shape == (7,)
            assert batch[key].tolist() == values.tolist()


def test_shuffling_by_seed_and_epoch(prompts: gpuload.PromptDataset) -> None:
    def epochs(seed: int) -> list[list[int]]:
        loader = prompts.loader(16, shuffle=True, seed=seed)
        return [[row for batch in loader for row in rows(batch)] for _ in range(2)]

    first, second = epochs(0)
    assert sorted(first) == sorted(second) == list(range(103))
    assert first != second
    assert epochs(0) == [first, second]
    assert epochs(1)[0] != first


def test_shuffle_and_seed_of_the_load_are_the_loaders_defaults(gsm8k: str, qwen: Any) -> None:
    shuffled = gpuload.load(gsm8k, qwen, max_samples=-1, shuffle=True, seed=4)
    first = rows(next(iter(shuffled.loader(50))))
    assert first == rows(next(iter(shuffled.loader(50, shuffle=True, seed=4)))) != list(range(50))
    assert rows(next(iter(shuffled.loader(50, shuffle=False)))) == list(range(50))


@given(world_size=st.integers(1, 9), batch_size=st.integers(1, 40), shuffle=st.booleans(), drop_last=st.booleans())
def test_ranks_share_an_epoch(
    prompts: gpuload.PromptDataset, world_size: int, batch_size: int, shuffle: bool, drop_last: bool
) -> None:
    if drop_last and 103 // world_size < batch_size:
        with pytest.raises(OptionError, match="drop_last leaves no batch"):
            prompts.loader(batch_size, world_size=world_size, drop_last=True)
        return
    per_rank = []
    for rank in range(world_size):
        loader = prompts.loader(
            batch_size, shuffle=shuffle, rank=rank, world_size=world_size, drop_last=drop_last, padding="longest"
        )
        batches = [rows(batch) for batch in loader]
        assert len(batches) == len(loader)
        per_rank.append(batches)
    shapes = [[len(batch) for batch in batches] for batches in per_rank]
    assert all(shape == shapes[0] for shape in shapes)  # equal counts and sizes: no rank waits for another for ever
    seen = [row for batches in per_rank for batch in batches for row in batch]
    if drop_last:
        assert len(set(seen)) == len(seen)
        assert all(size == batch_size for size in shapes[0])
    else:
        assert set(seen) == set(range(103))
        assert len(seen) - 103 < world_size


def test_padding_to_the_longest(prompts: gpuload.PromptDataset) -> None:
    batch = prompts.batch([0, 1, 2], padding="longest")
    lengths = [len(ids) for ids in batch["raw_prompt_ids"]]
    assert batch["input_ids"].shape == (3, max(lengths))
    wide = prompts.batch([0, 1, 2])
    for key in ("input_ids", "attention_mask", "position_ids"):
        assert torch.equal(batch[key], wide[key][:, -max(lengths) :])


def test_resume_gives_the_identical_next_batches(prompts: gpuload.PromptDataset) -> None:
    loader = prompts.loader(8, shuffle=True, seed=5)
    list(loader)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))  # plain data
    expected = [rows(batch) for batch in iterator]
    resumed = prompts.loader(8, shuffle=True, seed=5)
    resumed.load_state_dict(state)
    assert [rows(batch) for batch in resumed] == expected
    assert [rows(batch) for batch in resumed] == [rows(batch) for batch in loader]  # and the epoch after it


def test_an_iteration_that_goes_on_does_not_move_the_place_that_was_set_since(prompts: gpuload.PromptDataset) -> None:
    state = prompts.loader(10).state_dict() | {"position": 50}
    for begin in (lambda loader: loader.load_state_dict(state), lambda loader: loader.set_epoch(5)):
        loader = prompts.loader(10)
        old = iter(loader)
        next(old)
        begin(loader)
        place = loader.state_dict()
        list(old)
        assert loader.state_dict() == place
    loader = prompts.loader(10)
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    list(first)
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 10)


def test_a_state_at_the_end_of_an_epoch_begins_the_next(prompts: gpuload.PromptDataset) -> None:
    loader = prompts.loader(8, shuffle=True)
    list(loader)
    resumed = prompts.loader(8, shuffle=True)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.epoch == 1
    assert rows(next(iter(resumed))) == rows(next(iter(loader)))


def test_an_epoch_that_was_broken_off_is_followed_by_the_next(prompts: gpuload.PromptDataset) -> None:
    loader = prompts.loader(8, shuffle=True)
    for _ in loader:
        break
    second = rows(next(iter(loader)))
    loader.set_epoch(1)
    assert rows(next(iter(loader))) == second
    loader.set_epoch(0)
    assert rows(next(iter(loader))) != second


def test_a_state_of_other_data_is_rejected_by_name(
    gsm8k: str, qwen: Any, qwen_folder: str, write: Callable[..., str]
) -> None:
    from transformers import AutoTokenizer

    other_tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    other_tokenizer.chat_template = "{{ messages[0].content }}"
    state = gpuload.load(gsm8k, qwen, max_samples=40).loader(4).state_dict()

    def rejected(prompts: gpuload.PromptDataset, message: str, **settings: Any) -> None:
        with pytest.raises(ResumeError, match=message):
            prompts.loader(**({"batch_size": 4} | settings)).load_state_dict(state)

    rejected(gpuload.load(gsm8k, qwen, max_samples=41), "options: max_samples was 40, is 41")
    rejected(gpuload.load(gsm8k, qwen, max_samples=40, max_prompt_length=99), "max_prompt_length was 1024, is 99")
    rejected(gpuload.load(gsm8k, other_tokenizer, max_samples=40), "tokenizer: another one")
    changed = write([user(f"question {i}") for i in range(50)], "gsm8k.parquet")
    rejected(gpuload.load(changed, qwen, max_samples=40), "files: 0: gsm8k.parquet was")
    rejected(gpuload.load(gsm8k, qwen, max_samples=40), "seed was 0, is 1", seed=1)
    rejected(gpuload.load(gsm8k, qwen, max_samples=40), "drop_last was False, is True", drop_last=True)
    same = gpuload.load(gsm8k, qwen, max_samples=40, verify="off", strict=True)
    same.loader(4).load_state_dict(state)  # what makes no difference to the batches is not held against it
    with pytest.raises(ResumeError, match="version 99"):
        same.loader(4).load_state_dict(state | {"version": 99})


def test_the_same_files_elsewhere_resume(gsm8k: str, qwen: Any, tmp_path: Path) -> None:
    copy = tmp_path / "renamed.parquet"
    copy.write_bytes(Path(gsm8k).read_bytes())
    state = gpuload.load(gsm8k, qwen, max_samples=40).loader(4).state_dict()
    gpuload.load(copy, qwen, max_samples=40).loader(4).load_state_dict(state)


@pytest.mark.parametrize("answer", ["BBB", None])
def test_other_columns_are_part_of_the_data(
    answer: str | None, tmp_path: Path, qwen: Any, write: Callable[..., str]
) -> None:
    """Also where footer, size and tokens are the same."""

    def load(answers: list[Any]) -> gpuload.PromptDataset:
        rewards = [{"ground_truth": answer} for answer in answers]
        file = write({"prompt": [user("a"), user("b")], "reward_model": rewards, "same": [1, 2]})
        return gpuload.load(file, qwen)

    state = load(["AAA", "CCC"]).loader(1).state_dict()
    load(["AAA", "CCC"]).loader(1).load_state_dict(json.loads(json.dumps(state)))
    with pytest.raises(ResumeError, match=r"columns: reward_model has other values\. Load"):
        load(["AAA", answer]).loader(1).load_state_dict(state)
    prompts = gpuload.load(write({"prompt": [user("a"), user("b")], "new": [1, 2], "same": [1, 2]}), qwen)
    with pytest.raises(ResumeError, match="columns: reward_model is missing now; columns: new is new"):
        prompts.loader(1).load_state_dict(state)


def test_values_changed_in_place_are_other_data(tmp_path: Path, qwen: Any) -> None:
    path = tmp_path / "data.parquet"
    table = pa.table({"prompt": [user("a")] * 3, "answer": ["AAA", "MMM", "ZZZ"]})
    pq.write_table(table, path, compression="none", use_dictionary=False)
    state = gpuload.load(path, qwen).loader(1).state_dict()
    path.write_bytes(path.read_bytes().replace(b"MMM", b"KKK"))
    with pytest.raises(ResumeError, match="saved for other data: columns: answer has other values. Load"):
        gpuload.load(path, qwen).loader(1).load_state_dict(state)


class Numbers:
    """The loader's view of a dataset, for tests of the order."""

    fingerprint: ClassVar[Any] = {"files": {}, "options": {}, "tokenizer": None, "tokens": "", "columns": {}}

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def batch(self, rows: Any, padding: Any) -> dict[str, Any]:
        return {"rows": rows.tolist()}

    def ahead(self, batches: Any) -> Any:
        return batches


def run(
    loaders: list[PromptLoader], steps: int, state: dict[str, Any] | None = None
) -> tuple[list[int], dict[str, Any]]:
    """All ranks for some steps, or to the end of the epoch: their rows in the global order, and the state then."""
    for loader in loaders:
        if state:
            loader.load_state_dict(state)
    rows: list[int] = []
    states = [loader.state_dict() for loader in loaders]
    iterators = [iter(loader) for loader in loaders]
    for _ in range(steps):
        batches = [next(iterator, {"rows": []})["rows"] for iterator in iterators]
        assert len(set(map(len, batches))) == 1
        rows += [row for together in zip(*batches, strict=True) for row in together]
        states = [loader.state_dict() for loader in loaders]
        if not batches[0]:
            break
    assert all(state == states[0] for state in states)
    return rows, json.loads(json.dumps(states[0]))


@examples(200)
@given(st.data())
def test_resuming_with_other_ranks(data: Any) -> None:
    """Whatever the ranks and batch sizes of each part, an epoch's order is gone through exactly."""
    count, drop_last = data.draw(st.integers(1, 60)), data.draw(st.booleans())
    division = st.tuples(st.integers(1, 5), st.integers(1, 9)).filter(lambda d: not drop_last or d[0] * d[1] <= count)

    def ranks(size: int, world: int) -> list[PromptLoader]:
        more: dict[str, Any] = {"shuffle": True, "seed": 7, "drop_last": drop_last}
        return [PromptLoader(Numbers(count), size, rank=rank, world_size=world, **more) for rank in range(world)]

    order = np.random.default_rng([7, 0]).permutation(count).tolist()
    done: list[int] = []
    state = None
    for _ in range(data.draw(st.integers(1, 3))):
        size, world = data.draw(division)
        left = max(0, count - len(done)) / (size * world)
        steps = data.draw(st.integers(0, min(4, int(left) if drop_last else -int(-left // 1))))
        rows, state = run(ranks(size, world), steps, state)
        done += rows
        assert state["position"] == min(len(done), count)  # the last rows may be repeated ones
    size, world = data.draw(division)
    last = ranks(size, world)
    done += run(last, 1000, state)[0]
    if drop_last:
        assert done == order[: len(done)]
        assert count - len(done) < size * world
    else:
        assert done[:count] == order
        assert done[count:] == (order * 60)[: len(done) - count]
    assert all(loader.epoch == 1 for loader in last)
    fresh = ranks(size, world)
    for loader in fresh:
        loader.set_epoch(1)
    assert run(last, 1000)[0] == run(fresh, 1000)[0]


@pytest.mark.parametrize("batch", [0, 3, 5])
def test_a_state_of_version_1(batch: int) -> None:
    saved = {"batch_size": 2, "shuffle": True, "seed": 0, "world_size": 3, "drop_last": False}
    old = {name: value for name, value in Numbers.fingerprint.items() if name != "columns"}
    state = {"version": 1, "epoch": 0, "batch": batch, "settings": saved, "fingerprint": old}
    loader = PromptLoader(Numbers(26), 4, shuffle=True)
    loader.load_state_dict(state)
    rest = [row for batch in loader for row in batch["rows"]]
    assert rest == np.random.default_rng([0, 0]).permutation(26)[batch * 6 :].tolist()


DAMAGED = {
    "None": (None, "expected the dict that state_dict\\(\\) returned, not None"),
    "a list": ([1], "expected the dict"),
    "empty": ({}, "version None"),
    "a version that is a list": ({"version": [1]}, "version \\[1\\]"),
    "negative": ({"position": -3}, "damaged: position=-3 in an epoch of 10 rows: use another checkpoint"),
    "beyond the epoch": ({"position": 11}, "damaged: position=11 in an epoch of 10 rows"),
    "far beyond": ({"position": 10**6}, "damaged: position=1000000"),
    "a fraction": ({"position": 1.5}, "damaged: position=1.5"),
    "true": ({"position": True}, "damaged: position=True"),
    "no position": ({"position": None}, "damaged: position=None"),
    "an epoch before the first": ({"epoch": -1}, "damaged: epoch=-1"),
    "no settings": ({"settings": None}, "it has no settings or no fingerprint"),
    "no fingerprint": ({"fingerprint": None}, "it has no settings or no fingerprint"),
    "half of the settings": ({"settings": {"shuffle": False}}, "damaged: settings={'shuffle': False}"),
    "batches of version 1": ({"batch": -3}, "damaged: unexpected 'batch'"),
    "version 1, negative": ({"version": 1, "batch": -3}, "damaged: batch=-3 in an epoch of 10 rows"),
    "version 1, beyond": ({"version": 1, "batch": 4}, "damaged: batch=4 in an epoch of 10 rows"),
    "version 1, far beyond": ({"version": 1, "batch": 10**6}, "damaged: batch=1000000"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_state(name: str) -> None:
    change, message = DAMAGED[name]
    loader = PromptLoader(Numbers(10), 4)
    state: Any = change
    if isinstance(change, dict) and change and change.get("version") in (None, 1):
        state = loader.state_dict() | change
        if "version" in change:
            del state["position"]
    with pytest.raises(ResumeError, match=message):
        loader.load_state_dict(state)
    assert len(list(loader)) == 3


def test_a_state_without_settings() -> None:
    loader = PromptLoader(Numbers(10), 4)
    state = loader.state_dict()
    for key in ("settings", "fingerprint", "epoch", "position"):
        with pytest.raises(ResumeError, match="damaged"):
            loader.load_state_dict({name: value for name, value in state.items() if name != key})


@pytest.mark.parametrize("epoch", [-1, 1.5, "2", None])
def test_epochs_that_do_not_exist(epoch: Any) -> None:
    with pytest.raises(OptionError, match=f"epoch={epoch!r}: expected an integer of at least 0"):
        PromptLoader(Numbers(10), 4).set_epoch(epoch)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"batch_size": 4, "rank": 2, "world_size": 2}, "rank=2: expected 0 to 1"),
        ({"batch_size": 4, "seed": -1}, "seed=-1"),
        ({"batch_size": 4, "padding": "widest"}, "padding='widest': expected one of 'max_length', 'longest'"),
        ({"batch_size": 4, "world_size": 0}, "world_size=0"),
    ],
)
def test_nonsense_settings(prompts: gpuload.PromptDataset, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        prompts.loader(**wrong)


def test_rows_outside(prompts: gpuload.PromptDataset) -> None:
    assert rows(prompts.batch([-1, 0])) == [102, 0]
    for row in (103, -104):
        with pytest.raises(IndexError, match=f"index {row} is out of range for a dataset with 103 rows"):
            prompts[row]
    assert len([prompts[i] for i in np.arange(3)]) == 3


@pytest.mark.parametrize(
    "given", [[1, 2], slice(1, 3), range(1, 3), np.array([1, -101]), torch.tensor([1, 2])], ids=str
)
def test_rows_several(prompts: gpuload.PromptDataset, given: Any) -> None:
    found = prompts[given]
    assert isinstance(found, list)
    assert [row["extra_info"]["index"] for row in found] == [1, 2]


@pytest.mark.parametrize("given", [3, -100, np.int32(3), torch.tensor(3), np.array(3)], ids=repr)
def test_rows_one(prompts: gpuload.PromptDataset, given: Any) -> None:
    assert prompts[given]["extra_info"]["index"] == 3
    assert prompts.origin(given)[1] == 3
    assert prompts.tokens[given].tolist() == prompts[3]["raw_prompt_ids"]


@pytest.mark.parametrize("given", ["3", "prompt", 1.7, True, None, (0, 1), {0}, np.float64(1)], ids=repr)
def test_rows_by_nonsense(prompts: gpuload.PromptDataset, given: Any) -> None:
    with pytest.raises(TypeError, match="pass the number of a row, a slice, or a list of numbers. Columns are"):
        prompts[given]
    with pytest.raises(TypeError, match="is not the number of a row: pass an integer"):
        prompts.origin(given)


@pytest.mark.parametrize("given", [[1.7], ["3"], [True, False], [[0, 1]], np.zeros(3, bool), torch.ones(2)], ids=repr)
def test_rows_several_by_nonsense(prompts: gpuload.PromptDataset, given: Any) -> None:
    for several in (prompts.__getitem__, prompts.batch, lambda rows: prompts.take(["extra_info"], rows)):
        with pytest.raises(TypeError, match="are not the numbers of rows: pass a sequence of integers"):
            several(given)


def test_rows_of_a_subset(prompts: gpuload.PromptDataset) -> None:
    subset = torch.utils.data.Subset(prompts, [5, 7, 9])
    assert [row["extra_info"]["index"] for row in subset[[0, 2]]] == [5, 9]


def test_columns_by_nonsense(prompts: gpuload.PromptDataset) -> None:
    assert prompts.take(["data_source"], [-1, 0]) == {"data_source": ["openai/gsm8k"] * 2}
    with pytest.raises(OptionError, match="take: 0 is not the name of a column; expected one of ability, data_source"):
        prompts.take([0, 1])
    with pytest.raises(OptionError, match="take: 'abilty' is not the name of a column: did you mean ability"):
        prompts.take(["abilty"])
    with pytest.raises(OptionError, match="take: expected a list of column names, such as .'ability'."):
        prompts.take("ability")
    with pytest.raises(IndexError, match="index 103 is out of range"):
        prompts.take(["ability"], [103])


def test_nearest_name() -> None:
    assert nearest("promtp", {"prompt", "answer"}) == ": did you mean prompt?"
    assert nearest("zzz", {"prompt", "answer"}) == "; expected one of answer, prompt"


TRAINING = """
import json, sys, time
import gpuload
file, tokenizer, checkpoint, log, steps = sys.argv[1:]
prompts = gpuload.load(file, tokenizer, max_samples=2000, max_prompt_length=256)
loader = prompts.loader(batch_size=32, shuffle=True, seed=1)
try:
    state = json.load(open(checkpoint))
except FileNotFoundError:
    state = None
if state:
    loader.load_state_dict(state)
done = 0
while done < int(steps):
    for batch in loader:
        with open(log, "a") as out:
            print(json.dumps([e["index"] for e in batch["extra_info"]]), file=out, flush=True)
        with open(checkpoint + ".new", "w") as out:
            json.dump(loader.state_dict(), out)
        import os
        os.replace(checkpoint + ".new", checkpoint)
        done += 1
        time.sleep(0.01)
        if done >= int(steps):
            break
"""


def test_resume_after_kill_9(gsm8k: str, qwen_folder: str, tmp_path: Path) -> None:
    """A training loop killed at a random moment goes on with the batch after its last checkpoint."""

    def train(name: str, steps: int) -> subprocess.Popen[bytes]:
        arguments = [gsm8k, qwen_folder, str(tmp_path / f"{name}.ckpt"), str(tmp_path / f"{name}.log"), str(steps)]
        return subprocess.Popen([sys.executable, "-c", TRAINING, *arguments])

    assert train("whole", 100).wait(120) == 0
    killed = train("killed", 10_000)
    log = tmp_path / "killed.log"
    deadline = time.monotonic() + 60
    while not log.exists() or log.read_text().count("\n") < 20:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(10)
    given_out = log.read_text().splitlines()
    state = json.loads((tmp_path / "killed.ckpt").read_text())
    step = state["epoch"] * 63 + -(-state["position"] // 32)
    assert len(given_out) - 1 <= step <= len(given_out)  # killed between a batch and its checkpoint, or after it
    assert train("killed", 100 - step).wait(120) == 0
    resumed = log.read_text().splitlines()[len(given_out) :]
    whole = (tmp_path / "whole.log").read_text().splitlines()
    assert given_out == whole[: len(given_out)]
    assert resumed == whole[step:100]
