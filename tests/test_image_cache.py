"""Data with images in the token cache and in stores on disk: a second load opens no image, and has the same rows."""

import copy
import errno
import gc
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cache_cases import entries, flip_a_bit
from image_cases import BUILDERS, encoded, picture
from PIL import Image

import gpuload
from gpuload.cache import column_file
from gpuload.cache import known_files as known
from gpuload.cache import store as store_of_tokens
from gpuload.core.errors import DataError, StoreError
from gpuload.core.files import PartialDirectory
from gpuload.kinds.images import prompts as image_prompts
from gpuload.kinds.images.cached import as_json
from gpuload.kinds.images.engine import ImageEngine
from gpuload.media import headers


@pytest.fixture(scope="module")
def qwen() -> Any:
    return BUILDERS["qwen2_5_vl"]()


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of these tests are not too new."""
    monkeypatch.setattr(known, "SETTLED", -1e9)


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, whoever opens an image of the data or tokenizes a row is wrong."""

    def forbid() -> None:
        def wrong(*_: Any, **__: Any) -> Any:
            raise AssertionError("an image was opened, or a row made again")

        for place, name in ((image_prompts, "read_header"), (headers, "_parsed"), (ImageEngine, "render")):
            monkeypatch.setattr(place, name, wrong)
        monkeypatch.setattr(headers.FileBytes, "__init__", wrong)

    return forbid


STORES = pytest.mark.parametrize("store", ["memory", "disk"])


def write(path: Path, images: Any, **more: Any) -> str:
    """Rows with one image each, and some without."""
    rows = [f"<image>What is number {k}?" if each else f"Nothing {k}" for k, each in enumerate(images)]
    table = {"a": list(range(len(rows))), "prompt": rows, "images": images, "b": [str(k) for k in range(len(rows))]}
    pq.write_table(pa.table({**table, **more}), path, row_group_size=5)
    return str(path)


def held(count: int = 12) -> list[Any]:
    """Images in the data itself; one is damaged, and one row has none."""
    made: list[Any] = [
        [{"bytes": encoded(picture(30 + 11 * k, 200 - 9 * k), "PNG"), "path": None}] for k in range(count)
    ]
    made[3][0]["bytes"] = made[3][0]["bytes"][:100]
    made[5] = []
    return made


def on_disk(folder: Path, count: int = 12) -> list[Any]:
    """Images in files; one row has none."""
    for k in range(count):
        picture(30 + 11 * k, 200 - 9 * k).save(folder / f"{k}.png")
    return [[f"{k}.png"] if k != 5 else [] for k in range(count)]


def load(files: Any, processor: Any, **options: Any) -> Any:
    return gpuload.load(files, processor, **{"max_prompt_length": 400, "progress": False, **options})


def same(found: Any, wanted: Any) -> None:
    """Rows, columns, batches, states and fingerprints are equal."""
    assert found.tokens.to_lists() == wanted.tokens.to_lists()
    assert found.column_names == wanted.column_names
    assert found.take(["a", "images", "b"]) == wanted.take(["a", "images", "b"])
    assert [found.origin(row) for row in range(len(found))] == [wanted.origin(row) for row in range(len(wanted))]
    assert found.fingerprint == wanted.fingerprint
    for name in ("rows_read", "rows_kept", "overlong", "rejected", "examples", "tokens", "longest"):
        assert getattr(found.report, name) == getattr(wanted.report, name), name
    for one, other in zip(found.loader(4, seed=1, shuffle=True), wanted.loader(4, seed=1, shuffle=True), strict=True):
        assert one.keys() == other.keys()
        for key, values in other.items():
            assert one[key].tolist() == values.tolist(), key


@STORES
def test_a_second_load_opens_no_image(
    store: str, qwen: Any, tmp_path: Path, warm_cache: Path, settled: None, untouched: Callable[[], None]
) -> None:
    files = [write(tmp_path / "held.parquet", held()), write(tmp_path / "files.parquet", on_disk(tmp_path))]
    wanted = load(files, qwen, token_cache=False)
    assert len(wanted) < 24  # too long, or damaged
    first = load(files, qwen, store=store)
    assert first.report.into_cache == files, first.report
    same(first, wanted)
    untouched()
    second = load(files, qwen, store=store)
    assert second.report.from_cache == files
    same(second, wanted)
    same(load(files, qwen, store=store, max_prompt_length=60), load(files, qwen, store="memory", max_prompt_length=60))
    same(pickle.loads(pickle.dumps(second)), wanted)
    sample = load(files, qwen, store=store, max_samples=9, shuffle=True, seed=2)
    assert len(sample) <= 9


def test_stores_and_the_cache_share_ids(
    qwen: Any, tmp_path: Path, warm_cache: Path, settled: None, untouched: Callable[[], None]
) -> None:
    file = write(tmp_path / "files.parquet", on_disk(tmp_path))
    wanted = load(file, qwen)
    untouched()
    for store in ("disk", "memory", "disk"):
        found = load(file, qwen, store=store)
        assert found.report.from_cache == [file]
        same(found, wanted)


def test_columns_of_the_data_are_not_read_again(
    qwen: Any, tmp_path: Path, warm_cache: Path, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read = write(tmp_path / "x.parquet", held()), []
    load(file, qwen)
    right = pq.ParquetFile.read_row_group
    iterated = pq.ParquetFile.iter_batches

    def noted(step: Any) -> Any:
        def call(self: Any, *given: Any, **more: Any) -> Any:
            read.extend(more.get("columns") or [])
            return step(self, *given, **more)

        return call

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted(right))
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", noted(iterated))
    load(file, qwen)
    assert set(read) == {"a", "b"}


@STORES
@pytest.mark.parametrize("change", ["other", "touched", "removed", "new", "link"])
def test_files_of_images_that_have_changed(
    store: str, change: str, qwen: Any, tmp_path: Path, warm_cache: Path, settled: None
) -> None:
    images = on_disk(tmp_path)
    os.rename(tmp_path / "7.png", tmp_path / "real7.png")
    (tmp_path / "7.png").symlink_to("real7.png")
    file = write(tmp_path / "x.parquet", [*images, ["missing.png"]])
    first = load(file, qwen, store=store)
    assert (first.report.rows_rejected, first.report.into_cache) == (1, [file])
    assert load(file, qwen, store=store).report.from_cache == [file]
    if change == "other":
        about = os.stat(tmp_path / "4.png")
        data = encoded(picture(140, 31), "BMP")
        (tmp_path / "4.png").write_bytes(data[: about.st_size].ljust(about.st_size, b"\0"))
        os.utime(tmp_path / "4.png", ns=(about.st_atime_ns, about.st_mtime_ns))
    elif change == "touched":
        os.utime(tmp_path / "4.png")
    elif change == "removed":
        os.unlink(tmp_path / "4.png")
    elif change == "new":
        picture(44, 55).save(tmp_path / "missing.png")
    else:
        (tmp_path / "7.png").unlink()
        (tmp_path / "7.png").symlink_to("2.png")
    wanted = load(file, qwen, token_cache=False)
    again = load(file, qwen, store=store)
    assert again.report.into_cache == [file]
    same(again, wanted)
    last = load(file, qwen, store=store)
    assert last.report.from_cache == [file]
    same(last, wanted)


@STORES
def test_other_files_with_the_same_times(
    store: str, qwen: Any, tmp_path: Path, warm_cache: Path, settled: None
) -> None:
    """Two directories take each other's place: that changes nothing of the files in them but where they are."""
    one, other = (encoded(picture(*size), "BMP") for size in ((60, 120), (120, 60)))
    assert len(one) == len(other)
    both = [tmp_path / "images", tmp_path / "others"]
    for directory in both:
        directory.mkdir()
    for _ in range(1000):
        with open(both[0] / "0.bmp", "wb") as first, open(both[1] / "0.bmp", "wb") as second:
            first.write(one)
            second.write(other)
        found, its = (os.stat(directory / "0.bmp") for directory in both)
        if (found.st_mtime_ns, found.st_ctime_ns) == (its.st_mtime_ns, its.st_ctime_ns):
            break
    else:
        pytest.skip("the clock of the file system is too fine")
    file = write(tmp_path / "x.parquet", [["images/0.bmp"]])
    load(file, qwen, store=store)
    assert load(file, qwen, store=store).report.from_cache == [file]
    both[0].rename(tmp_path / "old")
    both[1].rename(both[0])
    again = load(file, qwen, store=store)
    assert again.report.into_cache == [file]
    same(again, load(file, qwen, token_cache=False))


def test_new_files_of_images_are_not_trusted(qwen: Any, tmp_path: Path, warm_cache: Path) -> None:
    file = write(tmp_path / "x.parquet", on_disk(tmp_path))
    assert "files of images have been written in the last seconds" in str(load(file, qwen).report)
    assert not list(warm_cache.glob("*.arrow"))
    same(load(file, qwen, store="disk"), load(file, qwen))
    assert not list((warm_cache.parent / "store").glob("*.arrow"))


def _other_size(processor: Any) -> None:
    processor.image_processor.size = {"shortest_edge": 3136, "longest_edge": 28 * 28 * 9}


def _other_patch(processor: Any) -> None:
    processor.image_processor.merge_size = 1


def _other_token(processor: Any) -> None:
    processor.image_token = "<|vision_pad|>"


@pytest.mark.parametrize("change", [_other_size, _other_patch, _other_token, None])
def test_what_decides_ids_is_in_the_key(
    change: Callable[[Any], None] | None, qwen: Any, tmp_path: Path, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "x.parquet", held())
    load(file, qwen)
    others: list[dict[str, Any]] = [{"max_image_pixels": 9000}, {"image_loader": "pil"}, {"check_media": "header"}]
    others += [{"mm_processor_kwargs": {"size": {"shortest_edge": 3136, "longest_edge": 28 * 28 * 12}}}]
    if change is None:
        for options in others:
            assert load(file, qwen, **options).report.from_cache == []
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000_000)
        assert load(file, qwen).report.from_cache == []
        return
    other = BUILDERS["qwen2_5_vl"]()
    assert load(file, other).report.from_cache == [file]
    change(other)
    assert load(file, other, verify="off").report.from_cache == []


def test_the_configuration_is_read_without_a_copy_of_the_tokenizer(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes half a second, several times a load."""
    monkeypatch.setattr(type(qwen.tokenizer), "__deepcopy__", None, raising=False)
    assert json.loads(as_json(qwen))["image_processor"]["merge_size"] == qwen.image_processor.merge_size
    assert qwen.tokenizer is not None


def test_changed_images_in_the_data_have_another_key(qwen: Any, tmp_path: Path, warm_cache: Path) -> None:
    images = held()
    load(write(tmp_path / "x.parquet", images), qwen)
    images[0] = [{"bytes": encoded(picture(31, 201), "PNG"), "path": None}]
    other = write(tmp_path / "y.parquet", images)
    assert load(other, qwen).report.from_cache == []
    os.rename(other, tmp_path / "z.parquet")
    assert load(tmp_path / "z.parquet", qwen).report.from_cache == [str(tmp_path / "z.parquet")]


def test_processors_that_nothing_identifies_are_not_cached(
    qwen: Any, tmp_path: Path, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "x.parquet", held())
    with monkeypatch.context() as patch:
        patch.setattr(qwen.image_processor, "preprocess", qwen.image_processor.preprocess)
        assert "preprocess was replaced on this Qwen2VLImageProcessor" in str(load(file, qwen).report)
    kind = type("OwnProcessor", (type(qwen),), {"__module__": "own"})
    monkeypatch.setattr(qwen, "__class__", kind)
    assert "OwnProcessor has code from outside transformers" in str(load(file, qwen).report)
    assert not list(warm_cache.glob("*.arrow"))


@STORES
@pytest.mark.usefixtures("settled")
def test_pixels(store: str, qwen: Any, tmp_path: Path, warm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write(tmp_path / "files.parquet", on_disk(tmp_path, 6)), write(tmp_path / "held.parquet", held(6))]
    files.append(write(tmp_path / "more.parquet", held(9)[4:]))
    for media in ("inputs", "pil"):
        options = {"store": store, "media": media}
        wanted = load(files, qwen, token_cache=False, **options)
        first = load(files, qwen, **options)
        assert first.report.into_cache == files, first.report
        with monkeypatch.context() as patch:
            patch.setattr(image_prompts, "read_header", None)
            patch.setattr(ImageEngine, "render", None)
            second = load(files, qwen, **options)
        assert second.report.from_cache == files
        for found in (first, second, pickle.loads(pickle.dumps(second))):
            assert found.fingerprint == wanted.fingerprint
            for batch, other in zip(found.loader(4), wanted.loader(4), strict=True):
                assert batch["image_grid_thw"].equal(other["image_grid_thw"])
                if media == "inputs":
                    assert batch["pixel_values"].equal(other["pixel_values"])
                else:
                    assert list(batch["images"]) == list(other["images"])
    kept = warm_cache.parent / "media"
    assert len(list(kept.glob("*.images"))) == 4
    del wanted, first, second, found, batch, other
    gc.collect()
    assert {path.suffix for path in kept.iterdir()} == {".images"}


def test_a_process_has_the_images_of_another(qwen: Any, tmp_path: Path, warm_cache: Path) -> None:
    """Conversations and pairs, with images in the data: saved by one process, opened by the next."""
    said = [[{"role": "assistant", "content": str(k)}] for k in range(12)]
    asked = [[{"role": "user", "content": "<image>?"}] for _ in said]
    images = [[{"bytes": encoded(picture(30 + 11 * k, 200 - 9 * k), "PNG"), "path": None}] for k in range(12)]
    table = {"prompt": asked, "chosen": said, "rejected": said[::-1], "completion": said, "images": images}
    for name, wrong in (("chats", ["chosen", "rejected"]), ("pairs", ["completion"])):
        pq.write_table(pa.table(table).drop_columns(wrong), tmp_path / f"{name}.parquet")
    script = """if True:
        import sys, gpuload
        folder, store, wanted, torchvision = sys.argv[1:]
        if int(torchvision):
            sys.path.append("..")
            import bench.cuda_torchvision, torchvision
        from image_cases import BUILDERS
        for name in ("chats", "pairs"):
            load = getattr(gpuload, f"load_{name}")
            file = f"{folder}/{name}.parquet"
            rows = load(file, BUILDERS["qwen2_5_vl"](), max_length=400, store=store, media="inputs", progress=False)
            assert rows.report.from_cache == [file] * int(wanted), rows.report
            batch = rows.batch(range(len(rows)))
            sums = {key: float(batch[key].double().sum()) for key in ("input_ids", "image_grid_thw", "pixel_values")}
            print(rows.fingerprint, len(rows), sums)
    """
    for store in ("disk", "memory"):
        environment = {**os.environ, "GPULOAD_CACHE": str(tmp_path / store)}
        said_by = [
            subprocess.run(
                [sys.executable, "-c", script, str(tmp_path), store, number, str(int("on_torchvision" in sys.modules))],
                capture_output=True, text=True, check=True, env=environment, cwd=Path(__file__).parent,
            ).stdout
            for number in "01"
        ]  # fmt: skip
        assert said_by[0] == said_by[1]


@STORES
def test_copies_of_images_that_are_gone_or_too_large(
    store: str, qwen: Any, tmp_path: Path, warm_cache: Path, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, options = write(tmp_path / "x.parquet", held()), {"store": store, "media": "inputs"}
    few = load(file, qwen, token_cache_bytes=3_000, **options)
    assert "the images in the data have more bytes than token_cache_bytes=3,000" in str(few.report)
    wanted = load(file, qwen, **options)
    (kept,) = (warm_cache.parent / "media").glob("*.images")
    whole = kept.read_bytes()
    for damaged in (None, whole[:-1]):
        kept.unlink()  # the datasets that have it are not concerned
        if damaged is not None:
            kept.write_bytes(damaged)
        again = load(file, qwen, **options)
        assert again.report.from_cache == []
        for one, other in zip(again.loader(4), wanted.loader(4), strict=True):
            assert one["pixel_values"].equal(other["pixel_values"])
        (kept,) = set((warm_cache.parent / "media").glob("*.images")) - {kept}
    kept.unlink()
    monkeypatch.setattr(os, "link", _no_links)
    for _ in range(2):  # nobody finds the copy of the first
        unlinked = load(file, qwen, **options)
        assert unlinked.batch([0])["pixel_values"].equal(wanted.batch([0])["pixel_values"])
        assert unlinked.report.from_cache == []
        assert "images in the data are not cached: " in str(unlinked.report)
        assert "is on a file system without hard links" in str(unlinked.report)


@STORES
@pytest.mark.parametrize("media", ["reference", "inputs"])
def test_a_file_that_is_given_twice(
    store: str, media: str, qwen: Any, tmp_path: Path, warm_cache: Path, settled: None
) -> None:
    """Also the files after it are cached."""
    one, other = write(tmp_path / "a.parquet", held()), write(tmp_path / "b.parquet", held(7))
    files, options = [one, one, other], {"store": store, "media": media}
    first = load(files, qwen, **options)
    assert not [note for note in first.report.notes if "cached" in note]
    again = load(files, qwen, **options)
    assert set(again.report.from_cache) == {one, other}
    if media == "reference":
        same(again, first)
        return
    assert again.tokens.to_lists() == first.tokens.to_lists()
    assert _pixels(again) == _pixels(first)


def test_a_pickled_dataset_whose_images_are_gone(qwen: Any, tmp_path: Path, warm_cache: Path) -> None:
    found = load(write(tmp_path / "x.parquet", held()), qwen, media="inputs", token_cache=False)
    pickled = pickle.dumps(found)
    assert len(pickle.loads(pickled).images(0)) == 1
    del found
    gc.collect()
    with pytest.raises(
        DataError, match=r"row 0: image 0 cannot be .* is gone, .* Keep the dataset there, or load again"
    ):
        pickle.loads(pickled).images(0)


def test_a_deep_copy_keeps_its_images(qwen: Any, tmp_path: Path, warm_cache: Path) -> None:
    found = load(write(tmp_path / "x.parquet", held()), qwen, media="inputs", token_cache=False)
    copied = copy.deepcopy(found)
    del found
    gc.collect()
    assert len(copied.images(0)) == 1


@STORES
def test_copies_of_images_have_a_bound(store: str, qwen: Any, tmp_path: Path, warm_cache: Path, settled: None) -> None:
    files = [write(tmp_path / f"{k}.parquet", held()[k:]) for k in range(3)]
    options = {"store": store, "media": "inputs"}

    def copied() -> list[int]:
        return [path.stat().st_size for path in (warm_cache.parent / "media").glob("*.images")]

    load(files[:1], qwen, **options)
    (one,) = copied()
    for again in range(2):
        for count in (2, 3):
            more = load(files[:count], qwen, token_cache_bytes=one, **options)
            assert more.report.from_cache == files[:1]
            assert f"the images in the data have more bytes than token_cache_bytes={one:,}" in str(more.report)
            assert copied() == [one], again
    every = load(files, qwen, **options)
    assert every.report.into_cache == files[1:]
    assert len(copied()) == 3
    few = load(files, qwen, token_cache_bytes=2 * one, **options)
    assert few.report.from_cache == files
    assert len(copied()) == 2
    assert sum(copied()) <= 2 * one
    assert _pixels(few) == _pixels(every)


@STORES
@pytest.mark.parametrize("media", ["inputs", "pil"])
def test_copies_of_images_that_are_damaged(
    store: str, media: str, qwen: Any, tmp_path: Path, warm_cache: Path, settled: None
) -> None:
    """The first who reads it says so, in whatever process, and the next load does not find it."""
    rows = [[encoded(picture(30 + 11 * k, 90).rotate(turn), "BMP") for k in range(4)] for turn in (0, 180)]
    file, other = (write(tmp_path / f"{k}.parquet", [[data] for data in row]) for k, row in enumerate(rows))
    options, folder = {"store": store, "media": media}, warm_cache.parent / "media"
    wanted = _pixels(load([file, other], qwen, token_cache=False, **options))
    for damage in (_flipped, lambda data: bytes(len(data)), None):
        load([file, other], qwen, **options)
        whole = {path: path.read_bytes() for path in folder.glob("*.images")}
        damaged = list(whole.values())[::-1] if damage is None else map(damage, whole.values())
        for path, data in zip(whole, damaged, strict=True):
            path.unlink()
            path.write_bytes(data)
        found = load([file, other], qwen, **options)
        assert found.report.from_cache == [file, other]
        for row in (0, 4):
            with pytest.raises(DataError, match=r"parquet row 0: image 0 cannot be read .* been damaged. Load again"):
                pickle.loads(pickle.dumps(found)).images(row)
        again = load([file, other], qwen, **options)
        assert again.report.into_cache == [file, other]
        assert _pixels(again) == wanted


def _pixels(dataset: Any) -> list[bytes]:
    return [image.tobytes() for row in range(len(dataset)) for image in dataset.images(row)]


def _flipped(data: bytes) -> bytes:
    return data[:5000] + bytes([data[5000] ^ 128]) + data[5001:]


@STORES
@pytest.mark.parametrize("media", ["inputs", "pil"])
@pytest.mark.usefixtures("settled")
def test_a_complete_cache_that_cannot_be_written(
    store: str, media: str, qwen: Any, tmp_path: Path, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, folder = {"store": store, "media": media}, warm_cache.parent / "media"
    files = [write(tmp_path / "files.parquet", on_disk(tmp_path))]
    load(files, qwen, **options)
    assert not folder.exists()
    files.append(write(tmp_path / "held.parquet", held()))
    wanted = _pixels(load(files, qwen, **options))
    gc.collect()

    def read_only(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for place, name in ((os, "link"), (os, "utime"), (os, "replace"), (PartialDirectory, "__init__")):
        monkeypatch.setattr(place, name, read_only)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    found = load(files, qwen, **options)
    assert found.report.from_cache == files
    assert _pixels(found) == _pixels(pickle.loads(pickle.dumps(found))) == wanted
    (copy,) = folder.glob("*")
    flip_a_bit(copy)
    with pytest.raises(DataError, match="has been damaged. Load again"):
        _pixels(found)
    assert not list(folder.glob("*"))
    with pytest.raises(StoreError, match="images cannot be stored in .*media: .*Read-only"):
        load(files, qwen, **options)


def _no_links(*_: Any) -> None:
    raise OSError("no links here")


@STORES
@pytest.mark.parametrize("what", [".arrow", ".columns"])
def test_damage_is_a_miss(
    store: str, what: str, qwen: Any, tmp_path: Path, warm_cache: Path, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "x.parquet", on_disk(tmp_path))
    wanted = load(file, qwen, store=store)
    folder = warm_cache.parent / ("store" if store == "disk" else "tokens")
    for entry in entries(folder):
        if entry.suffix == what:
            data = bytearray(entry.read_bytes())
            entry.unlink()
            entry.write_bytes(data[: len(data) // 2])
    again = load(file, qwen, store=store)
    assert again.report.from_cache == []
    same(again, wanted)
    assert load(file, qwen, store=store).report.from_cache == [file]


def test_flipped_bits_in_memory_are_a_miss(qwen: Any, tmp_path: Path, warm_cache: Path, settled: None) -> None:
    file = write(tmp_path / "x.parquet", on_disk(tmp_path))
    wanted = load(file, qwen)
    for suffix in (".arrow", ".columns"):
        (entry,) = warm_cache.glob(f"*{suffix}")
        flip_a_bit(entry)
        found = load(file, qwen)
        assert found.report.from_cache == []
        same(found, wanted)


@STORES
def test_ids_and_references_of_two_loads_are_not_mixed(
    store: str, qwen: Any, tmp_path: Path, warm_cache: Path, settled: None
) -> None:
    """As if a process was killed when it had written one of the files."""
    file = write(tmp_path / "x.parquet", on_disk(tmp_path))
    load(file, qwen, store=store)
    folder = warm_cache.parent / ("store" if store == "disk" else "tokens")
    before = {path: path.read_bytes() for path in entries(folder)}
    picture(300, 20).save(tmp_path / "4.png")
    wanted = load(file, qwen, store=store)
    after = {path: path.read_bytes() for path in entries(folder)}
    for path in before.keys() & after.keys():
        for name in after:
            name.unlink(missing_ok=True)
            name.write_bytes(after[name])
        path.unlink()
        path.write_bytes(before[path])
        same(load(file, qwen, store=store), wanted)


@STORES
def test_chats_and_pairs(
    store: str,
    qwen: Any,
    tmp_path: Path,
    warm_cache: Path,
    settled: None,
    untouched: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(column_file, "PART_BYTES", 500)
    images = on_disk(tmp_path)
    images[5] = ["4.png"]
    said = [{"role": "assistant", "content": "Yes."}]
    asked = [[{"role": "user", "content": f"<image>{k}?"}] for k in range(12)]
    turns = [[{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": str(k)}] for k in range(12)]
    pairs = {"prompt": asked, "chosen": [said] * 12, "rejected": [[{"role": "assistant", "content": "No."}]] * 12}
    talks = {"images": images, "n": list(range(12)), "conversations": turns}
    pq.write_table(pa.table(talks), tmp_path / "chats.parquet")
    pq.write_table(pa.table({**pairs, "images": images}), tmp_path / "pairs.parquet")
    made: list[tuple[Callable[..., Any], str]] = [
        (gpuload.load_chats, str(tmp_path / "chats.parquet")),
        (gpuload.load_pairs, str(tmp_path / "pairs.parquet")),
    ]
    first = [function(file, qwen, max_length=400, store=store) for function, file in made]
    untouched()
    for (function, file), wanted in zip(made, first, strict=True):
        found = function(file, qwen, max_length=400, store=store)
        assert found.report.from_cache == [file]
        batch, other = (each.batch(range(len(wanted))) for each in (found, wanted))
        assert batch.keys() == other.keys()
        assert all(batch[key].tolist() == other[key].tolist() for key in other)
        assert found.fingerprint == wanted.fingerprint


def test_rows_of_a_sample_and_columns_of_messages(
    qwen: Any, tmp_path: Path, warm_cache: Path, settled: None, untouched: Callable[[], None]
) -> None:
    """Images in parts of messages, JSON, and a part of the rows."""
    picture(60, 90).save(tmp_path / "a.png")
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Which?"}]
    rows = [{"prompt": [{"role": "user", "content": parts if k % 3 else f"{k}"}], "n": k} for k in range(20)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = load(tmp_path / "x.jsonl", qwen, return_raw_chat=True)
    untouched()
    found = load(tmp_path / "x.jsonl", qwen, return_raw_chat=True)
    assert found.report.from_cache == [str(tmp_path / "x.jsonl")]
    assert [row["raw_prompt"] for row in found] == [row["raw_prompt"] for row in wanted]
    assert [row["images"] for row in found] == [row["images"] for row in wanted]
    some = load(tmp_path / "x.jsonl", qwen, max_samples=7, shuffle=True, seed=1)
    numbers = some.origins[:, 1].tolist()
    assert [row["raw_prompt_ids"] for row in some] == [wanted[number]["raw_prompt_ids"] for number in numbers]
    assert [row["images"] for row in some] == [wanted[number]["images"] for number in numbers]


def test_frames_are_not_looked_for(qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As little data without images."""
    monkeypatch.setattr(store_of_tokens, "LEAST_BYTES", 4 << 20)
    table = pa.table({"prompt": ["<image>?"], "images": held(6)[:1]})
    assert "tokens are not cached" not in str(load(table, qwen).report)
    assert not entries(warm_cache)
