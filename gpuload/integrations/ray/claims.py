"""Claims: who is making a piece, so that two runs on one store do not do the same work.

A claim is a small file that its worker renews. A claim that nobody has renewed for `STALE` seconds, on the clock of
whoever looks at it, is that of a dead worker. Nothing depends on claims but time: whoever makes a piece makes the same
bytes.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpuload.cache.shared_store import SharedStore
from gpuload.core.errors import StoreError

RENEWED = 10.0
"""Seconds after which a worker renews its claim."""

STALE = 60.0
"""Seconds after which a claim that was not renewed may be taken over."""


@contextmanager
def claimed(store: SharedStore, name: str, run: str, take_over: bytes | None = None) -> Iterator[bytes | None]:
    """Holds a claim while the block is executed.

    Args:
        store: where it is.
        name: of the claim.
        run: of this process's run: a claim of the same run is that of a worker that died, because a run does not start
            a piece twice.
        take_over: the content of a stale claim, which is replaced.

    Yields:
        None if the claim is held; else the content of the claim that another run holds.
    """
    other = _claim(store, name, run, take_over)
    if other is not None:
        yield other
        return
    ended = threading.Event()
    renewing = threading.Thread(target=_renew, args=(store, name, run, ended), daemon=True)
    renewing.start()
    try:
        yield None
    finally:
        ended.set()
        renewing.join()
        store.remove(name)


def _claim(store: SharedStore, name: str, run: str, take_over: bytes | None) -> bytes | None:
    """Takes a claim; returns the content of another run's, if that holds it."""
    if store.write_new(name, _content(run)):
        return None
    other = store.read(name)
    if other is None:  # its owner has finished
        return b""
    if other != take_over and _run_of(other) != run:
        return other
    store.write(name, _content(run))
    return None


def _renew(store: SharedStore, name: str, run: str, ended: threading.Event) -> None:
    while not ended.wait(RENEWED):
        try:
            store.write(name, _content(run))
        except StoreError:  # what the worker writes next fails, too, and says why
            return


def _content(run: str) -> bytes:
    return json.dumps({"run": run, "renewed": time.time()}).encode()


def _run_of(content: bytes) -> str | None:
    try:
        return str(json.loads(content)["run"])
    except (ValueError, KeyError, TypeError):  # half of a claim: its owner is writing it
        return None


class ClaimWatch:
    """Watches the claims of other runs, and says which are stale.

    Args:
        clock: seconds, on any scale.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._seen: dict[str, tuple[bytes | None, float]] = {}

    def stale(self, name: str, content: bytes | None) -> bool:
        """Whether a claim is gone, or has had the same content for `STALE` seconds.

        Args:
            content: what it has now; None if there is none.
        """
        if content is None:
            return True
        seen, since = self._seen.get(name, (None, 0.0))
        if seen != content:
            self._seen[name] = content, self._clock()
            return False
        return self._clock() - since > STALE
