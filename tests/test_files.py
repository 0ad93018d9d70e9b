"""The cache directory is resolved in one place, and files are replaced as a whole."""

from pathlib import Path

import pytest

from gpuload.files import cache_root, replacing


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("GPULOAD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_root() == tmp_path / ".cache" / "gpuload"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "gpuload"
    monkeypatch.setenv("GPULOAD_CACHE", "~/mine")
    assert cache_root() == tmp_path / "mine"
    assert cache_root("~/given") == tmp_path / "given"
    assert cache_root("") == tmp_path / "mine"


@pytest.mark.parametrize("locked", [False, True])
def test_replacing_a_file(tmp_path: Path, locked: bool) -> None:
    file = tmp_path / "directory" / "file"
    for content in ("first", "second"):
        with replacing(file, locked) as partial:
            partial.write_text(content)
            assert not file.exists() or file.read_text() == "first"
        assert file.read_text() == content
    with pytest.raises(ZeroDivisionError), replacing(file, locked) as partial:
        partial.write_text(f"half of {1 / 0}")
    assert file.read_text() == "second"
    assert list(file.parent.iterdir()) == [file]


def test_a_lock_overwrites_what_a_killed_process_left(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with replacing(file, locked=True) as partial:
        name = partial
        partial.write_text("x")
    name.write_text("left by a killed process")
    with replacing(file, locked=True) as partial:
        partial.write_text("y")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
