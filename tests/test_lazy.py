"""Names of a package, and Python objects of a batch, that are made when they are first used."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import MutableMapping
from typing import Any

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

import gpuload
from gpuload.core.lazy import Later, LazyDict, lazy_names


def test_a_value_is_made_once_and_when_it_is_read() -> None:
    made: list[str] = []

    def value(name: str) -> Later:
        return Later(lambda: made.append(name) or name)

    lazy = LazyDict(a=1, b=value("b"), c=value("c"))
    assert (list(lazy), len(lazy), "b" in lazy, "d" in lazy) == (["a", "b", "c"], 3, True, False)
    assert repr(lazy) == "{'a': 1, 'b': <not read yet>, 'c': <not read yet>}"
    assert made == []
    assert lazy["b"] == lazy["b"] == lazy.get("b") == "b"
    assert made == ["b"]
    shallow = copy.copy(lazy)
    assert made == ["b"]
    expected = {"a": 1, "b": "b", "c": "c"}
    assert dict(lazy) == {**lazy} == dict(lazy.items()) == expected
    assert made == ["b", "c"]
    assert shallow == lazy == expected
    for same in (lazy | {}, {} | lazy, lazy.copy(), copy.deepcopy(lazy), pickle.loads(pickle.dumps(lazy))):
        assert same == expected


def test_a_pickled_value_is_not_made_elsewhere() -> None:
    lazy = LazyDict(a=Later(lambda: [1]))
    assert type(pickle.loads(pickle.dumps(lazy)).data["a"]) is list


@pytest.fixture(scope="module")
def prompts(gsm8k: str, qwen: Any) -> gpuload.PromptDataset:
    return gpuload.load(gsm8k, qwen, max_samples=20, max_prompt_length=256, return_raw_chat=True)


def test_a_batch_is_freed_without_a_garbage_collection(prompts: gpuload.PromptDataset) -> None:
    gc.collect()
    gc.disable()
    try:
        batch = prompts.batch([0, 1])
        tensor = weakref.ref(batch["input_ids"])
        del batch
        assert tensor() is None
    finally:
        gc.enable()


def test_torch_accepts_batches(prompts: gpuload.PromptDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pin_memory` of torch's loaders passes mappings through, and pins views of one tensor one by one."""
    batch = prompts.batch([0, 1])
    assert isinstance(batch, MutableMapping)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self.clone())  # without a GPU it is an error
    pinned = pin_memory(batch)
    assert pinned.keys() == batch.keys()
    for key, value in batch.items():
        same = torch.equal(pinned[key], value) if isinstance(value, torch.Tensor) else pinned[key] is value
        assert same, key
    rows = [{key: batch[key][row] for key in batch} for row in range(2)]
    assert torch.equal(gpuload.collate_fn(rows)["position_ids"], batch["position_ids"])
    stacked = torch.utils.data.default_collate([{"ids": row["input_ids"]} for row in rows])
    assert torch.equal(stacked["ids"], batch["input_ids"])


def test_names_are_imported_on_first_access() -> None:
    look_up, names = lazy_names("json", {"dump": "os.path:join", "JSONDecoder": ".decoder"})
    assert names() == ["JSONDecoder", "dump"]
    assert look_up("dump") is os.path.join
    assert look_up("JSONDecoder") is json.JSONDecoder
    with pytest.raises(AttributeError, match="module 'json' has no attribute 'load'"):
        look_up("load")


def test_a_process_that_is_forked_within_a_pause_collects_garbage_after_it() -> None:
    program = """
import gc, os
from gpuload.core.memory import garbage_collection_paused

with garbage_collection_paused():
    if os.fork():
        os.wait()
with garbage_collection_paused():
    assert not gc.isenabled()
print(gc.isenabled(), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_a_process_that_is_forked_while_a_value_is_made() -> None:
    """Another thread makes the same value of another object."""
    program = """
import os, signal, threading, warnings
from contextlib import nullcontext
warnings.simplefilter("ignore")
import pyarrow as pa
from gpuload.engines.host.render import HostText
lock = getattr(vars(HostText)["sizes"], "lock", nullcontext())  # none from Python 3.12 on
held, done = threading.Event(), threading.Event()
def hold():
    with lock:
        held.set()
        done.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if not child:
    signal.alarm(20)
    os._exit(int(HostText(text=pa.array(["text"], pa.large_string())).sizes[0]))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
done.set()
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "4\n"
