"""Digests of files that have not changed since they were computed.

A file is the same if its device, inode, size and both times are: like git's index, this trusts a state only if the last
change was some time before the digest was computed, because a second change at nearly the same time may leave all of
these as they were.
"""

import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuload.core.files import replacing
from gpuload.sources.local import LocalFile

if TYPE_CHECKING:
    from gpuload.sources.remote import RemoteFile

SETTLED = 10.0  # seconds; the coarsest file systems store times to 2 seconds, and clocks of servers may differ


def known_digest(
    directory: Path, file: "LocalFile | RemoteFile | None", names: Sequence[str], compute: Callable[[], bytes]
) -> bytes:
    """The digest of some columns of a file (None: it is not known which one it is), which is remembered in a directory;
    `compute` computes it. The names are of the columns, and of what else says which values are meant."""
    state, started = _state(file), time.time()
    if file is None or state is None:
        return compute()
    place = os.path.abspath(file.path) if isinstance(file, LocalFile) else f"{file.version[0]}"
    path = directory / f"{hashlib.blake2b(os.fsencode(place), digest_size=16).hexdigest()}.json"
    known = read_facts(path)
    digests: dict[str, str] = known["digests"] if known is not None and known["state"] == state else {}
    name = json.dumps(list(names))
    if name in digests:
        return bytes.fromhex(digests[name])
    digest = compute()
    settled = not isinstance(file, LocalFile) or max(state[3:]) / 1e9 + SETTLED < started
    if settled and _state(file) == state:
        with suppress(OSError):
            write_facts(path, {"state": state, "digests": digests | {name: digest.hex()}})
    return digest


def write_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Writes what is to be remembered: JSON with its checksum in front.

    Raises:
        OSError: it cannot be written.
        TypeError: it is not plain data.
    """
    text = json.dumps(facts)
    with replacing(path) as partial:
        partial.write_text(f"{zlib.crc32(text.encode()):08x} {text}")


def read_facts(path: Path) -> dict[str, Any] | None:
    """What `write_facts` has written; None if there is nothing, or it was damaged since."""
    with suppress(OSError, ValueError):
        checksum, _, text = path.read_bytes().partition(b" ")
        if checksum == b"%08x" % zlib.crc32(text):
            return dict(json.loads(text))
    return None


def _state(file: "LocalFile | RemoteFile | None") -> list[Any] | None:
    """What a file is recognized by; None if that is not enough, or it is not the one that was opened.

    Of a local file: device, inode, size, and the times of the last change of the content and of anything else, in ns.
    Of a remote one: what the server says about its version.
    """
    if file is None:
        return None
    if not isinstance(file, LocalFile):
        return list(file.version) if file.has_version else None
    try:
        about = os.stat(file.path)
    except OSError:
        return None
    found = [about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns]
    return [*found, about.st_ctime_ns] if tuple(found) == file.state else None
