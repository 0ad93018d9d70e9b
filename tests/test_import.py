"""`import gpuload` is light and starts nothing."""

import subprocess
import sys

import pytest

import gpuload


def test_import_is_light() -> None:
    heavy = "torch transformers tokenizers gigatoken awkward cudf pylibcudf cupy rmm numba pandas datasets".split()
    code = f"import sys, gpuload; print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_load_starts_no_cuda_and_no_cudf() -> None:
    code = (
        "import sys, gpuload, torch; from gpuload.demo_data import demo_files;"
        "gpuload.load(*demo_files(), max_samples=5).batch([0]);"
        "print(torch.cuda.is_initialized(), [m for m in ('cudf', 'pylibcudf', 'cupy', 'datasets') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False []\n"
    )


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
    }
    for name in dir(gpuload):
        assert getattr(gpuload, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        gpuload.lode  # noqa: B018
