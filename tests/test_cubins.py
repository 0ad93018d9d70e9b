"""Machine code in wheels: made by nvcc, and chosen by GPU and source; otherwise kernels are compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpuload.core.errors import DeviceError
from gpuload.engines.device import cubins, kernels
from gpuload.engines.device.kernel_source import signatures


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cubins, "folder", lambda: tmp_path)
    return tmp_path


class DriverError(Exception):
    """As CuPy's."""


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A CuPy that notes what modules are made of, for a GPU of a given capability."""
    made: list[dict[str, Any]] = []

    class RawModule:
        def __init__(self, **given: Any) -> None:
            self.given = given
            made.append(given)

        def get_function(self, name: str) -> str:
            if fake.broken and "path" in self.given:
                raise DriverError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")
            return f"{name} of {'a file' if 'path' in self.given else 'source'}"

    def device(number: int) -> Any:
        return SimpleNamespace(compute_capability=fake.capability)

    cuda = SimpleNamespace(Device=device, driver=SimpleNamespace(CUDADriverError=DriverError))
    fake = SimpleNamespace(cuda=cuda, RawModule=RawModule, made=made, capability="90", broken=False)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(kernels, "load_cupy", lambda: fake)
    kernels._functions.cache_clear()
    yield fake
    kernels._functions.cache_clear()


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [
        ("75", None),
        ("80", 80),
        ("86", 80),
        ("89", 80),
        ("90", 90),
        ("100", 100),
        ("103", 100),
        ("110", None),
        ("121", 120),
    ],
)
def test_which_file_is_for_a_gpu(place: Path, cupy: Any, capability: str, architecture: int | None) -> None:
    for one in cubins.ARCHITECTURES:
        cubins._file(one).touch()
    cupy.capability = capability
    found = kernels._functions(0)("pad")
    assert found == ("pad of a file" if architecture else "pad of source")
    if architecture:
        assert Path(cupy.made[0]["path"]).name.startswith(f"sm_{architecture}-")
        assert kernels.machine_code[0] == Path(cupy.made[0]["path"]).name
        assert len(cupy.made) == 1


def test_files_of_another_source_are_not_used(place: Path, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cubins._file(90).touch()
    changed = cubins.source() + "// changed"
    monkeypatch.setattr(cubins, "source", lambda: changed)
    assert cubins.shipped("90") is None
    assert kernels._functions(0)("pad") == "pad of source"


def test_where_a_file_cannot_be_loaded_kernels_are_compiled(
    place: Path, cupy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cubins._file(90).touch()
    cupy.broken = True
    with caplog.at_level("INFO"):
        assert kernels._functions(0)("pad") == "pad of source"
    assert "UNSUPPORTED_PTX_VERSION" in caplog.text
    assert kernels.machine_code[0] == "compiled here", "what `gpuload doctor` prints"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_nvcc_makes_files_with_all_kernels(place: Path) -> None:
    (place / "sm_90-0.cubin").touch()  # of an earlier source
    (file,) = cubins.compile_all((90,))
    assert [*place.iterdir()] == [file] == [cubins.shipped("90")]
    code = file.read_bytes()
    assert code[:4] == b"\x7fELF"
    assert all(name.encode() in code for name in signatures())
    assert len(cubins.ARCHITECTURES) * len(code) < 5 << 20


def test_without_nvcc(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(DeviceError, match="nvcc is not on the PATH"):
        cubins.compile_all()


def test_cupy_keeps_what_it_compiles_on_disk(tmp_path: Path) -> None:
    """As for `RawModule`, in two processes; loading machine code would need a GPU."""
    pytest.importorskip("cupy")
    script = """
from gpuload.engines.device.kernels import load_cupy
load_cupy()
from cupy.cuda import compiler
class Loader:
    class Module:
        def load(self, code): print(code[:4] == b"\\x7fELF")
        def _set_mapping(self, names): print("compiled")
compiler.function = Loader
compiler._get_arch_for_options_for_nvrtc = lambda arch=None: ("-arch=sm_90", "cubin")
text = 'extern "C" __global__ void f(int* a) { a[0] = 1; }'
compiler._compile_module_with_cache(text, ("-std=c++17",), arch="90")
"""
    about = os.environ | {"CUPY_CACHE_DIR": str(tmp_path / "new")}
    outputs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=about).stdout
        for _ in range(2)
    ]
    assert outputs == ["compiled\nTrue\n", "True\n"]


def test_where_launches_are_waited_for_kernels_are_compiled_with_a_bound_for_waiting_threads(
    place: Path, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cubins._file(90).touch()
    monkeypatch.setenv("GPULOAD_SYNC", "1")
    assert kernels._functions(0)("pad") == "pad of source"
    assert any("GPULOAD_MOST_SPINS" in option for option in cupy.made[0]["options"])
