"""`import gpuload` is light and starts nothing."""

import json
import subprocess
import sys
from typing import Any

import pytest

import gpuload

HEAVY = set(
    "torch transformers tokenizers gigatoken awkward msgspec pyarrow cudf pylibcudf cupy "
    "rmm numba pandas datasets".split()
)
PROBE = """
import json, sys

asked = set()

class Recorder:  # of modules that are looked for, whether they are installed or not
    @staticmethod
    def find_spec(name, path=None, target=None):
        asked.add(name.partition(".")[0])

sys.meta_path.insert(0, Recorder)
found = {}
import gpuload
found["package"] = sorted(asked)
found["own"] = sorted(name for name in sys.modules if name.startswith("gpuload"))
import gpuload.integrations.slime, gpuload.integrations.trl
found["integrations"] = sorted(asked)

from gpuload.demo_data import demo_files
gpuload.load(*demo_files(), max_samples=5, token_cache=False).batch([0])
import torch
found["cuda"] = torch.cuda.is_initialized()
found["after a load"] = sorted(sys.modules)

import gpuload.integrations.automodel.masks, gpuload.integrations.nemo_rl.rows
found["masks and rows"] = sorted(asked)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    """What a new process has imported after each step. There is one for all of them: most of its time is imports."""
    return json.loads(subprocess.run([sys.executable, "-c", PROBE], stdout=subprocess.PIPE, check=True).stdout)


def test_import_is_light(found: Any) -> None:
    assert "gpuload" in found["package"]
    assert HEAVY.isdisjoint(found["package"])
    assert found["own"] == ["gpuload", "gpuload._version"]


def test_importing_an_integration_is_light(found: Any) -> None:
    assert (HEAVY | {"trl", "slime", "pyarrow"}).isdisjoint(found["integrations"])


def test_a_load_starts_no_cuda_and_no_cudf(found: Any) -> None:
    assert found["cuda"] is False
    assert "transformers" in found["after a load"]
    assert {"cudf", "pylibcudf", "cupy", "datasets", "pandas"}.isdisjoint(found["after a load"])


def test_masks_and_rows_of_integrations_do_not_import_their_trainers(found: Any) -> None:
    assert "gpuload" in found["masks and rows"]
    assert {"nemo_automodel", "nemo_rl"}.isdisjoint(found["masks and rows"])


def test_names() -> None:
    assert set(dir(gpuload)) == {
        "load",
        "load_chats",
        "load_pairs",
        "ChatDataset",
        "Options",
        "PairDataset",
        "PromptDataset",
        "PromptLoader",
        "collate_fn",
        "GpuloadError",
        "save_to_disk",
        "check",
        "Finding",
    }
    for name in dir(gpuload):
        assert getattr(gpuload, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        gpuload.lode  # noqa: B018


def test_first_loads_in_several_threads(gsm8k: str, qwen_folder: str) -> None:
    """Transformers replaces its module while it is imported, and threads that wait for that get the old one."""
    code = """
import sys, threading
import gpuload
sys.setswitchinterval(1e-5)
def load():
    prompts = gpuload.load(sys.argv[1], sys.argv[2], max_samples=20, token_cache=False)
    print(f"{len(prompts)}\\n", end="")
threads = [threading.Thread(target=load) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    done = subprocess.run([sys.executable, "-c", code, gsm8k, qwen_folder], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["20"] * 4, "")
