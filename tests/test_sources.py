"""sources.py against real servers on loopback: moto's S3, and a web server that fails as it is told."""

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.http import HTTPFileSystem
from fsspec.registry import _registry
from huggingface_hub import HfFileSystem
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

import gpuload
from gpuload.core.errors import SourceError, TokenizerError
from gpuload.demo_data import demo_files
from gpuload.sources.fetch import FORMATS, SourceFile, resolve
from gpuload.sources.read import open_file
from gpuload.sources.urls import without_secrets

BODY = bytes(range(256)) * 1000
PATIENCE = 20  # seconds a test waits for what should happen at once


class FileServer(ThreadingHTTPServer):
    """One file, served at every address."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body = BODY
        self.headers: dict[str, str] = {"ETag": '"first"'}
        self.status = {"HEAD": 200, "GET": 200}
        self.drops = 0  # how many of the next bodies end half-way
        self.cuts = 0  # how many of the next bodies are the half of the file, with a length to match
        self.asked: list[tuple[str, str]] = []  # method, path
        self.chunked = False  # whether bodies are sent without their length
        self.pause: Callable[[], Any] = lambda: None  # called half-way through each body

    def url(self, path: str = "train.parquet") -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"

    def count(self, method: str) -> int:
        return sum(asked == method for asked, _ in self.asked)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is what some tests are about, and no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FileServer

    def do_HEAD(self) -> None:
        self.server.asked.append(("HEAD", self.path))
        self._head("HEAD", None if self.server.chunked else len(self.server.body))

    def do_GET(self) -> None:
        self.server.asked.append(("GET", self.path))
        body, half = self.server.body, len(self.server.body) // 2
        if self.server.cuts:
            self.server.cuts -= 1
            body = body[:half]
        if self._head("GET", None if self.server.chunked else len(body)) != 200:
            return
        if self.server.chunked:
            self.wfile.write(body)
            self.close_connection = True
            return
        self.wfile.write(body[:half])
        self.server.pause()
        if self.server.drops:
            self.server.drops -= 1
            self.close_connection = True
        else:
            self.wfile.write(body[half:])

    def _head(self, method: str, length: int | None) -> int:
        status = self.server.status[method]
        self.send_response(status)
        if length is None and status == 200:
            self.send_header("Connection", "close")  # the end of the connection is the end of the body
        else:
            self.send_header("Content-Length", str(length if status == 200 else 0))
        for key, value in self.server.headers.items():
            self.send_header(key, value)
        self.end_headers()
        return status

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def _fresh_file_systems(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """fsspec keeps file systems, and with them the endpoint and credentials of the test before."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    _forget_file_systems()
    yield
    _forget_file_systems()


def _forget_file_systems() -> None:
    for kind in (S3FileSystem, HTTPFileSystem, HfFileSystem):
        kind.clear_instance_cache()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def web() -> Iterator[FileServer]:
    with FileServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of an empty bucket called `bucket`, in an environment as a user sets it up for s3fs."""
    for key in [key for key in os.environ if key.startswith("AWS_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    yield client
    for found in client.list_objects_v2(Bucket="bucket").get("Contents", []):
        client.delete_object(Bucket="bucket", Key=found["Key"])
    client.delete_bucket(Bucket="bucket")


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def paths(found: list[SourceFile]) -> list[str]:
    return [file.path for file in found]


def content(found: list[SourceFile]) -> list[bytes]:
    return [Path(file.path).read_bytes() for file in found]


def copies(cache: Path) -> list[Path]:
    """What a reader of the cache would take for a file."""
    return sorted(path for path in cache.glob("*") if path.suffix in FORMATS)


def message(files: Any, cache: Path) -> str:
    with pytest.raises(SourceError) as raised:
        resolve(files, str(cache))
    return str(raised.value)


# Local files


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.parquet", "parquet"),
        ("a.json", "json"),
        ("a.jsonl", "json"),
        ("A.PARQUET", "parquet"),
        ("a[1].json", "json"),
    ],
)
def test_a_path_is_one_file_with_the_name_the_user_gave_it(
    name: str, kind: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, name, "other.parquet")
    monkeypatch.chdir(tmp_path)
    (found,) = resolve(name, str(cache))
    assert (found.name, found.format) == (name, kind)
    assert content([found]) == [name.encode()]
    assert not cache.exists()


def test_a_pathlib_path_is_as_good_as_a_string(tmp_path: Path, cache: Path) -> None:
    touch(tmp_path, "a.parquet")
    path = tmp_path / "a.parquet"
    assert resolve(path, str(cache)) == resolve(str(path), str(cache)) == [SourceFile(str(path), str(path), "parquet")]


@pytest.mark.parametrize("name", ["~/a.parquet", "~/*.parquet", "~"])
def test_a_tilde_is_the_home_folder(name: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "a.parquet")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths(resolve(name, str(cache))) == [str(tmp_path / "a.parquet")]


def test_an_unknown_user_has_no_home_folder(cache: Path) -> None:
    assert message("~no-such-user/train.parquet", cache).startswith("~no-such-user/train.parquet: no file matches")
    with pytest.raises(TokenizerError, match="no such directory: check the path"):
        gpuload.load(pa.table({"prompt": ["a"]}), "~no-such-user/tokenizer")


def test_a_glob_gives_its_files_sorted_and_no_folders(tmp_path: Path, cache: Path) -> None:
    touch(tmp_path, "b2.parquet", "b10.parquet", "a.parquet", "c.parquet/part.parquet", "d.jsonl")
    found = resolve(str(tmp_path / "*.parquet"), str(cache))
    assert paths(found) == [str(tmp_path / name) for name in ("a.parquet", "b10.parquet", "b2.parquet")]
    assert [file.name for file in found] == paths(found)


def test_a_double_star_reaches_every_folder_below(tmp_path: Path, cache: Path) -> None:
    touch(tmp_path, "a.parquet", "x/b.parquet", "x/y/c.parquet", "x/y/c.json")
    found = resolve(str(tmp_path / "**" / "*.parquet"), str(cache))
    assert paths(found) == [str(tmp_path / name) for name in ("a.parquet", "x/b.parquet", "x/y/c.parquet")]


def test_a_folder_gives_its_readable_files_and_those_below_sorted(tmp_path: Path, cache: Path) -> None:
    touch(tmp_path, "b.parquet", "a.jsonl", "c.json", "README.md", "below/d.parquet", "below/a/e.json")
    found = resolve(tmp_path, str(cache))
    expected = ("a.jsonl", "b.parquet", "below/a/e.json", "below/d.parquet", "c.json")
    assert paths(found) == [str(tmp_path / name) for name in expected]
    assert [file.format for file in found] == ["json", "parquet", "json", "parquet", "json"]


def test_a_folder_is_read_without_hidden_files_and_folders(tmp_path: Path, cache: Path) -> None:
    touch(tmp_path, "a.parquet", ".b.parquet", "._a.parquet", "_c.parquet", ".git/d.json", "x/_temporary/0/e.parquet")
    assert paths(resolve(tmp_path, str(cache))) == [str(tmp_path / "a.parquet")]
    assert paths(resolve(tmp_path / "_c.parquet", str(cache))) == [str(tmp_path / "_c.parquet")]


def test_links_to_folders_are_followed_once(tmp_path: Path, cache: Path) -> None:
    touch(tmp_path, "data/a.parquet", "elsewhere/b.parquet")
    (tmp_path / "data" / "below").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "loop").symlink_to(tmp_path / "data")
    expected = [str(tmp_path / "data" / name) for name in ("a.parquet", "below/b.parquet")]
    assert paths(resolve(tmp_path / "data", str(cache))) == expected


@pytest.mark.parametrize("name", ["train.parquet", "*.parquet", "", "**/*"])
def test_a_dangling_link_is_an_error_that_names_link_and_target(name: str, tmp_path: Path, cache: Path) -> None:
    touch(tmp_path, "a.parquet")
    (tmp_path / "train.parquet").symlink_to(tmp_path / "blobs" / "0123")
    told = message(tmp_path / name, cache)
    expected = f"{tmp_path}/train.parquet: a symlink to {tmp_path}/blobs/0123, which does not exist: restore the file"
    assert told == expected


def test_a_dangling_link_is_not_listed_as_present(tmp_path: Path, cache: Path) -> None:
    touch(tmp_path, "a.parquet")
    (tmp_path / "gone.parquet").symlink_to(tmp_path / "blobs" / "0123")
    assert message(tmp_path / "trian.parquet", cache).endswith("which has a.parquet")


def test_a_name_that_is_not_utf8_is_an_error_that_can_be_printed(tmp_path: Path, cache: Path) -> None:
    name = os.path.join(tmp_path, "caf\udce9.parquet")
    Path(name).write_bytes(b"x")
    for given in (name, tmp_path, os.path.join(tmp_path, "*")):
        told = message(given, cache)
        assert told == f"{tmp_path}/caf\\udce9.parquet: the name is not valid UTF-8: rename the file"
    assert "no file matches" in message(os.path.join(tmp_path, "\udce9.parquet"), cache)


def test_a_name_that_the_locale_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "ü.jsonl").write_text("{}")
    program = "import sys, gpuload\ntry: gpuload.load(sys.argv[1], 'none')\nexcept Exception as error: print(error)"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, env=os.environ | locale)
    assert b"the locale has no UTF-8, so this name cannot be read: set PYTHONUTF8=1" in done.stdout, done


@pytest.mark.parametrize(
    ("name", "reason"), [("x" * 300 + ".parquet", "File name too long"), ("a\0b.parquet", "no file matches")]
)
def test_a_name_that_no_file_can_have_is_an_error_of_ours(name: str, reason: str, tmp_path: Path, cache: Path) -> None:
    assert reason in message(tmp_path / name, cache)


@pytest.mark.parametrize("files", [{"train": "a.parquet"}, {"a.parquet"}])
def test_a_dict_or_a_set_of_files_is_an_error(files: Any, cache: Path) -> None:
    assert message(files, cache).startswith(f"files is of type {type(files).__name__}: pass a path, a URL or a list")


def test_a_folder_within_a_folder_is_no_file_whatever_its_name(tmp_path: Path, cache: Path) -> None:
    touch(tmp_path, "a.parquet", "spark.parquet/part-0.parquet")
    assert paths(resolve(tmp_path / "*.parquet", str(cache))) == [str(tmp_path / "a.parquet")]
    assert paths(resolve(tmp_path / "spark.parquet", str(cache))) == [str(tmp_path / "spark.parquet/part-0.parquet")]


def test_a_question_mark_in_a_name_is_a_part_of_it(tmp_path: Path, cache: Path) -> None:
    touch(tmp_path, "a?b=1.json", "is it?.jsonl")
    assert paths(resolve(tmp_path, str(cache))) == [str(tmp_path / "a?b=1.json"), str(tmp_path / "is it?.jsonl")]
    assert paths(resolve(tmp_path / "*t?.jsonl", str(cache))) == [str(tmp_path / "is it?.jsonl")]


def test_an_ending_in_capitals_counts_in_a_folder_too(tmp_path: Path, cache: Path) -> None:
    touch(tmp_path, "a.parquet", "b.PARQUET")
    assert paths(resolve(tmp_path, str(cache))) == [str(tmp_path / "a.parquet"), str(tmp_path / "b.PARQUET")]


def test_a_list_keeps_its_order_and_its_repetitions(tmp_path: Path, cache: Path) -> None:
    touch(tmp_path, "z.parquet", "m/2.json", "m/1.json", "a.parquet")
    given = [tmp_path / "z.parquet", str(tmp_path / "m" / "*"), tmp_path / "a.parquet", str(tmp_path / "z.parquet")]
    expected = [str(tmp_path / name) for name in ("z.parquet", "m/1.json", "m/2.json", "a.parquet", "z.parquet")]
    assert paths(resolve(given, str(cache))) == expected
    assert paths(resolve(tuple(given), str(cache))) == expected


def test_a_file_url_is_the_local_file_itself(tmp_path: Path, cache: Path) -> None:
    touch(tmp_path, "b.parquet", "a.parquet")
    assert paths(resolve(f"file://{tmp_path}/a.parquet", str(cache))) == [str(tmp_path / "a.parquet")]
    both = [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]
    assert paths(resolve(f"file://{tmp_path}/*.parquet", str(cache))) == both
    assert not cache.exists()


def test_a_file_url_without_a_file_is_rejected_by_name(tmp_path: Path, cache: Path) -> None:
    assert f"{tmp_path}/a.parquet" in message(f"file://{tmp_path}/a.parquet", cache)


@pytest.mark.parametrize("name", ["trian.parquet", "val*.parquet", "trian"])
def test_where_nothing_matches_the_message_names_it_and_what_there_is(name: str, tmp_path: Path, cache: Path) -> None:
    touch(tmp_path, "train.parquet", "test.jsonl", "README.md")
    told = message(str(tmp_path / name), cache)
    assert told.startswith(f"{tmp_path / name}: no file matches")
    assert "test.jsonl, train.parquet" in told
    assert "README.md" not in told


def test_where_a_relative_name_matches_nothing_the_message_says_where_it_looked(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path.resolve()) in message("train.parquet", cache)


@pytest.mark.parametrize("name", ["a.parquet", "*.parquet"])
def test_a_missing_folder_is_named(name: str, tmp_path: Path, cache: Path) -> None:
    assert f"no such directory: {tmp_path / 'nowhere'}" in message(str(tmp_path / "nowhere" / name), cache)


def test_a_file_in_the_place_of_a_folder_is_a_clear_error(tmp_path: Path, cache: Path) -> None:
    touch(tmp_path, "a.parquet")
    assert f"{tmp_path}/a.parquet/b.parquet: no file matches" in message(f"{tmp_path}/a.parquet/b.parquet", cache)


@pytest.mark.parametrize("name", ["rows.parquet", "*", ""])
def test_a_pipe_is_not_opened(name: str, tmp_path: Path, cache: Path) -> None:
    os.mkfifo(tmp_path / "rows.parquet")
    touch(tmp_path, "train.parquet")
    if name == "*":
        assert [file.name for file in resolve(str(tmp_path / name), cache)] == [str(tmp_path / "train.parquet")]
    else:
        assert f"{tmp_path}/rows.parquet: not a regular file" in message(str(tmp_path / name), cache)
    assert "train.parquet" in message(str(tmp_path / "other.parquet"), cache)
    assert "rows.parquet" not in message(str(tmp_path / "other.parquet"), cache)


def test_a_folder_without_readable_files_says_what_it_looked_for(tmp_path: Path, cache: Path) -> None:
    touch(tmp_path, "README.md")
    told = message(tmp_path, cache)
    assert str(tmp_path) in told
    assert ".parquet, .json, .jsonl" in told


@pytest.mark.parametrize("files", [[], ()])
def test_no_files_at_all_is_an_error(files: Any, cache: Path) -> None:
    assert "no files given" in message(files, cache)


@pytest.mark.parametrize(("name", "ending"), [("a.csv", "'.csv'"), ("a", "''"), ("a.parquet.gz", "'.gz'")])
def test_an_unknown_ending_is_named_and_so_are_the_known_ones(
    name: str, ending: str, tmp_path: Path, cache: Path
) -> None:
    touch(tmp_path, name, "b.parquet")
    told = message([tmp_path / "b.parquet", tmp_path / name], cache)
    assert f"{tmp_path / name}: unknown file extension {ending}" in told
    assert ".parquet, .json, .jsonl" in told


@pytest.mark.parametrize(
    ("files", "kind"), [([5], "int"), (["a.parquet", None], "NoneType"), (5, "int"), (None, "NoneType")]
)
def test_what_is_no_name_is_rejected_by_its_type(
    files: Any, kind: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, "a.parquet")
    monkeypatch.chdir(tmp_path)
    assert f"not {kind}" in message(files, cache)


def test_an_empty_name_is_not_the_working_folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a variable that was never set gives it."""
    touch(tmp_path, "a.parquet")
    monkeypatch.chdir(tmp_path)
    assert "empty" in message("", cache)


# S3


def test_an_s3_object_is_copied_whole(s3: Any, cache: Path) -> None:
    s3.put_object(Bucket="bucket", Key="deep/train.parquet", Body=BODY)
    (found,) = resolve("s3://bucket/deep/train.parquet", str(cache))
    assert (found.name, found.format) == ("s3://bucket/deep/train.parquet", "parquet")
    assert content([found]) == [BODY]
    assert copies(cache) == [Path(found.path)]


def test_an_s3_glob_gives_its_objects_sorted_each_by_its_own_name(s3: Any, cache: Path) -> None:
    for key in ("train/b.parquet", "train/a.parquet", "train/c.jsonl", "train/below/d.parquet", "test/e.parquet"):
        s3.put_object(Bucket="bucket", Key=key, Body=key.encode())
    found = resolve("s3://bucket/train/*.parquet", str(cache))
    assert content(found) == [b"train/a.parquet", b"train/b.parquet"]
    assert [file.name for file in found] == ["s3://bucket/train/a.parquet", "s3://bucket/train/b.parquet"]
    assert content(resolve("s3://bucket/**/e.parquet", str(cache))) == [b"test/e.parquet"]


def test_an_s3_folder_gives_its_readable_objects_and_those_below_sorted(s3: Any, cache: Path) -> None:
    hidden = ("train/_temporary/0/e.parquet", "train/.f.parquet")
    for key in ("train/b.parquet", "train/a.json", "train/README.md", "train/below/d.parquet", *hidden):
        s3.put_object(Bucket="bucket", Key=key, Body=key.encode())
    expected = [b"train/a.json", b"train/b.parquet", b"train/below/d.parquet"]
    assert content(resolve("s3://bucket/train", str(cache))) == expected
    assert content(resolve("s3://bucket/train/", str(cache))) == expected


def test_an_s3_folder_within_a_folder_is_no_file_whatever_its_name(s3: Any, cache: Path) -> None:
    for key in ("train/a.parquet", "train/spark.parquet/part-0.parquet"):
        s3.put_object(Bucket="bucket", Key=key, Body=key.encode())
    assert content(resolve("s3://bucket/train/*.parquet", str(cache))) == [b"train/a.parquet"]


def test_objects_of_one_name_in_two_folders_are_not_mixed_up(s3: Any, cache: Path) -> None:
    for key in ("a/train.parquet", "b/train.parquet"):
        s3.put_object(Bucket="bucket", Key=key, Body=key.encode())
    given = ["s3://bucket/b/train.parquet", "s3://bucket/a/train.parquet"]
    assert content(resolve(given, str(cache))) == [b"b/train.parquet", b"a/train.parquet"]


def test_the_only_match_of_a_glob_is_named_and_cached_by_its_own_address(s3: Any, cache: Path) -> None:
    s3.put_object(Bucket="bucket", Key="train/a.parquet", Body=BODY)
    by_glob = resolve("s3://bucket/train/*.parquet", str(cache))
    assert [file.name for file in by_glob] == ["s3://bucket/train/a.parquet"]
    assert resolve("s3://bucket/train/a.parquet", str(cache)) == by_glob
    assert len(copies(cache)) == 1


@pytest.mark.parametrize("url", ["s3://bucket/train/a.parquet", "s3://bucket/train/*.parquet", "s3://bucket/train"])
def test_a_changed_s3_object_is_fetched_again_in_the_same_process(url: str, s3: Any, cache: Path) -> None:
    """s3fs remembers listings, and with them sizes and etags that are no longer true."""
    s3.put_object(Bucket="bucket", Key="train/a.parquet", Body=BODY)
    before = resolve(url, str(cache))
    unchanged = os.stat(before[0].path).st_mtime_ns
    assert paths(resolve(url, str(cache))) == paths(before)
    assert os.stat(before[0].path).st_mtime_ns == unchanged

    changed = BODY[::-1]  # as long as before
    s3.put_object(Bucket="bucket", Key="train/a.parquet", Body=changed)
    assert content(resolve(url, str(cache))) == [changed]


def test_a_new_object_in_an_s3_folder_is_found_in_the_same_process(s3: Any, cache: Path) -> None:
    s3.put_object(Bucket="bucket", Key="train/a.parquet", Body=b"a")
    assert content(resolve("s3://bucket/train/*.parquet", str(cache))) == [b"a"]
    s3.put_object(Bucket="bucket", Key="train/b.parquet", Body=b"b")
    assert content(resolve("s3://bucket/train/*.parquet", str(cache))) == [b"a", b"b"]


@pytest.mark.parametrize(
    "url",
    ["s3://bucket/nothing.parquet", "s3://bucket/no*.parquet", "s3://missing/train.parquet", "s3://missing/*.parquet"],
)
def test_a_missing_s3_key_or_bucket_is_an_error_that_names_it(url: str, s3: Any, cache: Path) -> None:
    s3.put_object(Bucket="bucket", Key="train.parquet", Body=BODY)
    told = message(url, cache)
    assert told.startswith(f"{url}: no ")
    assert copies(cache) == []


@pytest.mark.parametrize("url", ["s3://bucket/train.parquet", "s3://bucket/*.parquet"])
def test_s3_without_credentials_is_an_error_of_ours(
    url: str, s3: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    told = message(url, cache)
    assert told.startswith(f"{url}: ")
    assert "credentials" in told


# HTTP and the cache


def test_a_web_file_is_copied_once_and_keeps_its_ending(web: FileServer, cache: Path) -> None:
    (found,) = resolve(web.url(), str(cache))
    assert (found.name, found.format) == (web.url(), "parquet")
    assert found.path.endswith("-train.parquet")
    assert content([found]) == [BODY]

    assert resolve(web.url(), str(cache)) == [found]
    assert web.count("GET") == 1
    assert copies(cache) == [Path(found.path)]


def test_a_copy_that_was_deleted_is_made_again(web: FileServer, cache: Path) -> None:
    resolve(web.url(), str(cache))
    shutil.rmtree(cache)
    assert content(resolve(web.url(), str(cache))) == [BODY]


def test_a_query_is_part_of_the_address_but_not_of_the_ending(web: FileServer, cache: Path) -> None:
    (found,) = resolve(web.url("train.jsonl?download=true"), str(cache))
    assert found.format == "json"
    assert found.path.endswith("-train.jsonl")
    assert {path for _, path in web.asked} == {"/train.jsonl?download=true"}
    (other,) = resolve(web.url("train.jsonl?download=false"), str(cache))
    assert other.path != found.path


@pytest.mark.parametrize("name", ["x" * 240, "文" * 80], ids=["latin", "chinese"])
def test_a_name_too_long_for_the_cache_is_shortened(name: str, web: FileServer, cache: Path) -> None:
    (found,) = resolve(web.url(f"{name}.parquet"), str(cache))
    assert found.path.endswith(f"{name[-1]}.parquet")
    assert content([found]) == [BODY]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"ETag": '"1"'}, {"ETag": '"2"'}),
        (
            {"Last-Modified": "Mon, 02 Nov 2026 10:00:00 GMT"},
            {"Last-Modified": "Mon, 02 Nov 2026 10:00:01 GMT"},
        ),
    ],
    ids=["etag", "last-modified"],
)
def test_a_changed_web_file_is_fetched_again_though_its_size_is_the_same(
    before: dict[str, str], after: dict[str, str], web: FileServer, cache: Path
) -> None:
    web.headers = before
    old = resolve(web.url(), str(cache))
    web.headers, web.body = after, BODY[::-1]
    assert content(resolve(web.url(), str(cache))) == [BODY[::-1]]
    assert content(old) == [BODY], "a reader of the old copy is not disturbed"


def test_a_web_file_of_another_size_is_fetched_again_without_a_validator(web: FileServer, cache: Path) -> None:
    web.headers = {}
    resolve(web.url(), str(cache))
    web.body = BODY + b"more"
    assert content(resolve(web.url(), str(cache))) == [BODY + b"more"]


def test_a_server_that_rejects_head_serves_all_the_same(web: FileServer, cache: Path) -> None:
    """As addresses signed for GET do."""
    web.status["HEAD"] = 403
    assert content(resolve(web.url(), str(cache))) == [BODY]


@pytest.mark.parametrize("drops", [1, 2])
def test_a_dropped_connection_is_tried_again(drops: int, web: FileServer, cache: Path) -> None:
    web.drops = drops
    found = resolve(web.url(), str(cache))
    assert content(found) == [BODY]
    assert web.count("GET") == drops + 1
    assert list(map(str, copies(cache))) == paths(found)


def test_a_connection_that_is_always_dropped_is_an_error_and_leaves_no_file(web: FileServer, cache: Path) -> None:
    web.drops = 100
    assert message(web.url(), cache).startswith(f"{web.url()}: download failed after 3 attempts: ")
    assert web.count("GET") == 3
    assert not [path for path in cache.iterdir() if path.suffix != ".lock"]

    web.drops = 0
    assert content(resolve(web.url(), str(cache))) == [BODY]


def test_fewer_bytes_than_announced_are_not_the_file(web: FileServer, cache: Path) -> None:
    """As a proxy serves it that has kept half a file."""
    web.cuts = 3
    assert f"{len(BODY) // 2} of {len(BODY)} bytes arrived" in message(web.url(), cache)
    assert copies(cache) == []

    web.cuts = 1
    assert content(resolve(web.url(), str(cache))) == [BODY]


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "json"])
def test_a_cut_copy_of_unknown_length_is_made_again(ending: str, web: FileServer, cache: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"row {i}"} for i in range(50)]
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
        web.body = (tmp_path / "a.parquet").read_bytes()
    else:
        lines = [json.dumps(row) for row in rows]
        web.body = ("\n".join(lines) if ending == "jsonl" else f"[{', '.join(lines)}]\n").encode()
    web.chunked, web.cuts = True, 2  # fsspec's first GET asks for the length
    found = resolve(web.url(f"train.{ending}"), str(cache))
    assert content(found) == [web.body]
    assert web.count("GET") == 3

    Path(found[0].path).write_bytes(web.body[: len(web.body) // 2])  # as an earlier version of gpuload left it
    assert content(resolve(web.url(f"train.{ending}"), str(cache))) == [web.body]
    assert web.count("GET") == 5

    web.cuts = 100  # the file itself is damaged
    Path(found[0].path).unlink()
    with pytest.raises(SourceError, match="truncated parquet file|not valid JSON"):
        open_file(*resolve(web.url(f"train.{ending}"), str(cache)))
    assert web.count("GET") == 8


def test_a_stalled_server_fails_after_the_time_that_was_given(web: FileServer, cache: Path) -> None:
    release = threading.Event()
    web.pause = lambda: release.wait(PATIENCE)
    with pytest.raises(SourceError, match=r"failed after 3 attempts: .*[Tt]imeout"):
        resolve(web.url(), str(cache), 0.1)
    release.set()


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://user:SECRET@host/a/b.parquet", "https://host/a/b.parquet"),
        ("https://host/b.parquet?sig=SECRET&x=1", "https://host/b.parquet?redacted-"),
        ("https://host/b.parquet#SECRET", "https://host/b.parquet?redacted-"),
        ("s3://KEY:SECRET@bucket/b.parquet", "s3://bucket/b.parquet"),
        ("403, url='http://host/b.parquet?sig=SECRET' at", "403, url='http://host/b.parquet?redacted-"),
        ("http://[::1?sig=SECRET", "http://[::1"),
        ("data/a?b.parquet", "data/a?b.parquet"),
    ],
)
def test_what_may_be_secret_is_removed_from_a_url(address: str, shown: str) -> None:
    assert without_secrets(address).startswith(shown)
    assert "SECRET" not in without_secrets(address)


def test_urls_that_differ_in_their_queries_have_different_names() -> None:
    assert len({without_secrets(f"https://host/a.parquet?part={i}") for i in range(100)}) == 100


def test_no_message_and_no_report_has_a_signature(web: FileServer, cache: Path, gsm8k: str, qwen: Any) -> None:
    url = web.url("train.parquet?sig=SECRET")
    for status in ({"HEAD": 404, "GET": 404}, {"HEAD": 403, "GET": 403}, {"HEAD": 200, "GET": 500}):
        web.status = status
        with pytest.raises(SourceError) as caught:
            resolve(url, str(cache))
        assert "SECRET" not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(SourceError) as caught:
        resolve(web.url("train.csv?sig=SECRET"), str(cache))
    assert "SECRET" not in str(caught.value)

    web.status = {"HEAD": 200, "GET": 200}
    web.body = Path(gsm8k).read_bytes()
    prompts = gpuload.load(url, qwen, max_samples=5, cache_dir=str(cache), device="cpu")
    assert "SECRET" not in str(prompts.report) + str(prompts.fingerprint) + prompts.origin(0)[0]
    assert not [path for path in cache.rglob("*") if b"SECRET" in os.fsencode(path)]


def test_a_missing_web_file_is_an_error_that_names_it(web: FileServer, cache: Path) -> None:
    web.status = {"HEAD": 404, "GET": 404}
    assert message(web.url(), cache) == f"{web.url()}: no such file"
    assert copies(cache) == []


@pytest.mark.parametrize("status", [403, 500])
def test_a_server_that_fails_is_not_a_missing_file(status: int, web: FileServer, cache: Path) -> None:
    web.status = {"HEAD": status, "GET": status}
    told = message(web.url(), cache)
    assert web.url() in told
    assert str(status) in told.replace(web.url(), "")
    assert "no such file" not in told


def test_a_server_that_is_not_there_is_not_a_missing_file(cache: Path) -> None:
    with socket.socket() as taken:  # bound but not listening: connections are rejected
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/train.parquet"
        told = message(url, cache)
    assert told.startswith(f"{url}: ")
    assert "connect" in told.lower()
    assert "no such file" not in told


def test_a_long_download_is_not_cut_off(web: FileServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp gives up after five minutes even while bytes are coming; here its default is made a fifth of a second."""
    import aiohttp.client

    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.2))
    web.pause = lambda: time.sleep(0.4)
    assert content(resolve(web.url(), str(cache))) == [BODY]


def test_a_file_of_an_unknown_ending_is_not_downloaded(web: FileServer, cache: Path) -> None:
    told = message(web.url("huge.csv?download=true"), cache)
    assert "unknown file extension '.csv'" in told
    assert web.count("GET") == 0


def test_the_half_of_a_killed_download_is_never_taken_for_the_file(web: FileServer, cache: Path) -> None:
    half_sent, killed = threading.Event(), threading.Event()

    def pause() -> None:
        half_sent.set()
        killed.wait(PATIENCE)

    web.pause = pause
    code = "import sys; from gpuload.sources.fetch import resolve; resolve(*sys.argv[1:])"
    with subprocess.Popen([sys.executable, "-c", code, web.url(), str(cache)]) as fetching:
        assert half_sent.wait(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while (
            not any(path.stat().st_size for path in cache.glob("*.partial/*.parquet")) and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        fetching.kill()
    killed.set()
    left = [path.stat().st_size for path in cache.glob("*.partial/*.parquet")]
    assert left
    assert 0 < left[0] < len(BODY), "the test is about a file that is half there"
    assert copies(cache) == []

    web.pause = lambda: None
    assert content(resolve(web.url(), str(cache))) == [BODY]
    assert list(cache.glob("*.partial")) == []


def test_of_several_processes_one_downloads_and_all_get_the_whole_file(web: FileServer, cache: Path) -> None:
    processes = 4

    def until_all_have_asked() -> None:
        deadline = time.monotonic() + PATIENCE
        while web.count("HEAD") < processes and time.monotonic() < deadline:
            time.sleep(0.01)

    web.pause = until_all_have_asked
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        found = [future.result() for future in [pool.submit(resolve, web.url(), str(cache)) for _ in range(processes)]]
    assert web.count("HEAD") == processes, "they were not at it at once"
    assert web.count("GET") == 1
    assert [content(files) for files in found] == [[BODY]] * processes
    assert len(copies(cache)) == 1


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_cache_dir_that_cannot_be_written_is_named(below: str, web: FileServer, tmp_path: Path) -> None:
    touch(tmp_path, "in_the_way")
    folder = tmp_path / "in_the_way" / below
    told = message(web.url(), folder)
    assert told.startswith(f"{web.url()}: cannot write to the cache directory {folder}")
    assert (tmp_path / "in_the_way").read_bytes() == b"in_the_way"


def test_the_cache_dir_may_be_below_the_home_folder(
    web: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (found,) = resolve(web.url(), "~/prompts/cache")
    assert Path(found.path).parent == tmp_path / "prompts" / "cache"


def test_web_local_and_s3_files_may_be_mixed_in_one_list(web: FileServer, s3: Any, tmp_path: Path, cache: Path) -> None:
    s3.put_object(Bucket="bucket", Key="a.parquet", Body=b"from s3")
    touch(tmp_path, "here.json")
    given = [web.url(), tmp_path / "here.json", "s3://bucket/a.parquet"]
    found = resolve(given, str(cache))
    assert content(found) == [BODY, b"here.json", b"from s3"]
    assert [file.name for file in found] == list(map(str, given))


# Protocols


def test_an_unknown_protocol_is_named(cache: Path) -> None:
    told = message("foo://x.parquet", cache)
    assert told.startswith("foo://x.parquet: ")
    assert "Protocol not known: foo" in told


@pytest.mark.parametrize(
    ("url", "package", "module"),
    [
        ("gs://bucket/x.parquet", "gcsfs", "gcsfs"),
        ("abfs://bucket/*.parquet", "adlfs", "adlfs"),
        ("s3://bucket/x.json", "s3fs", "s3fs"),
        ("http://127.0.0.1/x.parquet", "aiohttp", "fsspec.implementations.http"),
    ],
)
def test_a_missing_package_is_named_with_the_word_install(
    url: str, package: str, module: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(_registry, url.partition(":")[0], raising=False)  # what fsspec has imported
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    told = message(url, cache)
    assert told.startswith(f"{url}: ")
    assert "install" in told.lower()
    assert package in told
    assert ("gpuload[remote]" in told) == (package != "adlfs")


@pytest.mark.parametrize("url", ["hf://datasets/some/prompts/train.parquet", "hf://datasets/some/prompts/*.parquet"])
def test_a_hub_that_is_not_there_is_an_error_of_ours(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        told = message(url, cache)
    assert told.startswith(f"{url}: ")
    assert "no such file" not in told


# End to end


def test_what_is_loaded_from_s3_equals_what_is_loaded_from_the_local_files(
    s3: Any, tmp_path: Path, cache: Path
) -> None:
    data, tokenizer = demo_files()
    rows = pq.read_table(data)
    for part in range(2):
        path = tmp_path / f"part-{part}.parquet"
        pq.write_table(rows.slice(part * 20, 20), path)
        s3.upload_file(str(path), "bucket", f"train/{path.name}")
    options = {"max_prompt_length": 128, "device": "cpu", "cache_dir": str(cache)}
    local = gpuload.load(str(tmp_path / "part-*.parquet"), tokenizer, **options)
    remote = gpuload.load("s3://bucket/train/*.parquet", tokenizer, **options)
    assert len(remote) == len(local) > 20
    assert remote.tokens.values.tolist() == local.tokens.values.tolist()
    assert remote.tokens.offsets.tolist() == local.tokens.offsets.tolist()
    assert remote.report.files == ["s3://bucket/train/part-0.parquet", "s3://bucket/train/part-1.parquet"]


def test_packed_files_in_a_directory_are_named(qwen: Any, tmp_path: Path) -> None:
    row = json.dumps({"prompt": [{"role": "user", "content": "a"}]}) + "\n"
    for name in ("a.jsonl", "b.jsonl.gz", "c.ndjson", "notes.txt", ".d.jsonl.gz", "e.png"):
        (tmp_path / name).write_text(row)
    with pytest.warns(UserWarning, match=r"not read: 2 files, such as .*b.jsonl.gz: unpack or rename what is data"):
        assert len(gpuload.load(str(tmp_path), qwen)) == 1
    (tmp_path / "b.jsonl.gz").unlink()
    with pytest.warns(UserWarning, match="not read: 1 file, such as .*c.ndjson"):
        assert len(gpuload.load(str(tmp_path), qwen)) == 1


@pytest.mark.parametrize("inner", ["in/a.jsonl", "in/*.jsonl", "in"])
def test_files_in_archives(inner: str, qwen: Any, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as made:
        made.writestr("in/a.jsonl", json.dumps({"prompt": [{"role": "user", "content": "a"}]}) + "\n")
    assert len(gpuload.load(f"zip://{inner}::{tmp_path}/x.zip", qwen)) == 1
    with pytest.raises(SourceError, match=r"zip://in/b.jsonl::"):
        gpuload.load(f"zip://in/b.jsonl::{tmp_path}/x.zip", qwen)
