"""What the ranks of a load know of each other: who has come, who has failed, and who has died.

A collective operation waits for ranks that will never come. So ranks first meet in the store of `torch.distributed`:

    enter   a rank that begins a load says so; others name the ranks that they miss, and wait for them with patience
    beat    every rank counts in the store; one whose count stands still has died, or its machine cannot be reached
    fail    a rank that fails says why
    meet    all ranks have come to the same point: what they do then together does not wait long for any of them

Rank 0 watches all others, and they watch rank 0. Only one thread of each process talks to the store: whatever it waits
for, the thread of the load notices that no answer comes. While another thread holds the interpreter lock, this one
cannot beat: then a process that knows whether the rank still runs does (`stand_in.py`).
"""

import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpuload.core.errors import GpuloadError, OptionError

logger = logging.getLogger(__name__)

_PATIENCE = 1800.0  # seconds for which ranks wait for others to begin the same load, without the environment variable
_LOG = 60.0  # seconds after which the ranks that are missing are named again
_BEAT = 2.0  # seconds between two beats
_SILENCE = 50.0  # seconds after which a rank that does not beat has died: slow work does not stop its beats
_STAND_IN = 0.2  # of these, after which another process beats for a rank; it needs some seconds to begin
_FAREWELL = 3  # beats for which a rank that has ended the load waits until the others know what they must know
_LEFT = 1 << 40  # added to the beats of a rank that has ended the load


class Heartbeat:
    """The ranks of one load, from the point of view of one of them.

    Args:
        store: of the default process group.
        rank: of this process.
        count: how many ranks there are.

    Raises:
        OptionError: the patience is not a number of seconds.
    """

    def __init__(self, store: Any, rank: int, count: int):
        from torch._C._distributed_c10d import PrefixStore  # which some builds of torch lack

        self._patience = patience()
        # Each rank counts its loads in the store itself: a new store, after a restart, counts from the beginning.
        load = store.add(f"gpuload/loads/{rank}", 1)
        self._store, self._rank, self._count = PrefixStore(f"gpuload/{load}", store), rank, count
        # Beats are counted where a second client of the store finds them: the prefixes of a store cannot be asked for.
        self._name = self._store.compare_set("name", "", f"gpuload/{uuid.uuid4().hex}").decode()
        self._root = store
        while isinstance(self._root, PrefixStore):
            self._root = self._root.underlying_store
        self._answers = threading.Condition()
        self._wanted = self._reached = 0  # the meeting that this rank waits for, and the last at which all were
        self._missing: list[int] = []  # ranks that have not begun this load, when somebody last asked
        self._asked = False
        self._failed: str | None = None  # why the load cannot go on
        self._own: str | None = None  # why this rank has failed
        self._ended = self._informed = False
        self._answered = time.monotonic()  # when the store last answered
        self._thread = threading.Thread(target=self._run, name="gpuload heartbeat", daemon=True)
        self._thread.start()

    # -- the thread of the load ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises an error if the load cannot go on.

        Raises:
            GpuloadError: another rank has failed or died, or the store does not answer.
        """
        if self._failed is None and self._silent() > _SILENCE + _BEAT:
            with self._answers:  # the thread may have an answer, and could not run while the interpreter lock was held
                self._answers.wait_for(lambda: self._failed is not None or self._silent() <= _SILENCE, _BEAT)
            if self._failed is None and self._silent() > _SILENCE:
                self._failed = f"the store of torch.distributed has not answered for {self._silent():.0f} s"
        if self._failed is not None:
            raise GpuloadError(f"distributed=True: another rank failed: {self._failed}")

    def _silent(self) -> float:
        """The seconds since the store has last answered."""
        return time.monotonic() - self._answered

    def meet(self) -> None:
        """Waits until all ranks have called this as often as this one.

        Raises:
            GpuloadError: as for `check`; or ranks have not begun this load within the patience.
        """
        began = logged = time.monotonic()
        with self._answers:
            self._wanted += 1
            first = self._wanted == 1
            self._answers.notify_all()
            while self._reached < self._wanted:
                self.check()
                self._answers.wait(_BEAT)
                waited = time.monotonic() - began
                late = first and waited > self._patience
                if first and (late or time.monotonic() - logged > _LOG) and self._reached < self._wanted:
                    logged, first = time.monotonic(), self._name_missing(waited, late)

    def _name_missing(self, waited: float, late: bool) -> bool:
        """Names the ranks that have not begun this load. Called with the lock. Returns whether there are any.

        Raises:
            GpuloadError: it is too late for them to come.
        """
        self._asked = True
        self._answers.notify_all()
        self._answers.wait_for(lambda: not self._asked or self._failed is not None, _SILENCE)
        self.check()
        if not self._missing:  # all are inside, and some need longer than others
            return False
        ranks = ", ".join(map(str, self._missing[:16])) + ", ..." * (len(self._missing) > 16)
        how_many = f"{len(self._missing)} of {self._count}"
        if late:
            raise GpuloadError(
                f"distributed=True: {how_many} ranks have not begun this load within {waited:.0f} s: {ranks}: look at "
                "their logs: every rank must call load with the same arguments; if they need longer, set "
                "GPULOAD_RANKS_TIMEOUT to more seconds"
            )
        logger.warning(
            f"gpuload: distributed=True: {how_many} ranks have not begun this load after {waited:.0f} s: {ranks}"
        )
        return True

    def fail(self, reason: str) -> None:
        """Tells the other ranks that this one has failed, unless that is because of another one."""
        with self._answers:
            if self._failed is None:
                self._own = reason
                self._answers.notify_all()

    def end(self) -> None:
        """Ends the beats. What `fail` was told is sent before."""
        with self._answers:
            self._ended = True
            self._answers.notify_all()
        self._thread.join(2 * _FAREWELL * _BEAT)

    def explain(self, error: Exception) -> GpuloadError:
        """The error for an exchange of data that has failed, once it is known whether a rank has died."""
        began = time.monotonic()
        try:
            while time.monotonic() - began < 2 * _SILENCE:  # this rank may hear of it last
                self.check()
                time.sleep(min(_BEAT, 0.2))
        except GpuloadError as why:
            return why
        return GpuloadError(f"distributed=True: the ranks cannot exchange data: {type(error).__name__}: {error!s:.300}")

    # -- the thread of the store ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        stand_in = self._start_stand_in()
        try:
            self._talk(stand_in)
        except Exception as error:
            self._tell(f"the store of torch.distributed cannot be reached: has rank 0 died? ({error!s:.200})")
        finally:
            if stand_in is not None:
                _end(stand_in)

    def _start_stand_in(self) -> subprocess.Popen[bytes] | None:
        """The process that beats when this one cannot; None where it could not do so."""
        kind = type(self._root).__name__
        if kind not in ("TCPStore", "FileStore"):  # others are in the memory of a process, or of a class of the user
            return None
        address = self._root.path if kind == "FileStore" else self._root.host
        port = getattr(self._root, "port", 0)
        given = [os.getpid(), _BEAT, _STAND_IN * _SILENCE, self._beats(self._rank), kind, address, port, *sys.path]
        program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("stand_in.py")), *map(str, given)]
        # It imports torch, which must not find the GPUs of the rank.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        try:
            return subprocess.Popen(
                program, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
            )
        except OSError as error:
            logger.warning(f"gpuload: distributed=True: no process can be started that beats for this one: {error}")
            return None

    def _beats(self, rank: int) -> str:
        """The key under which the beats of a rank are counted."""
        return f"{self._name}/beats/{rank}"

    def _talk(self, stand_in: subprocess.Popen[bytes] | None) -> None:
        """Beats, sends and asks what the thread of the load wants, until the load ends.

        Args:
            stand_in: hears each beat.
        """
        store, now = self._store, time.monotonic()
        beats = dict.fromkeys(range(self._count) if self._rank == 0 else [0], (0, now))
        beaten, announced, pause = now - _BEAT, 0, _BEAT
        while True:
            if time.monotonic() - beaten >= _BEAT:
                beaten = time.monotonic()
                self._root.add(self._beats(self._rank), 1)
                if stand_in is not None and stand_in.stdin is not None:
                    with suppress(OSError):  # it has been killed
                        os.write(stand_in.stdin.fileno(), b".")
                self._watch(beats)
            with self._answers:
                wanted, reached, asked, own, ended = self._wanted, self._reached, self._asked, self._own, self._ended
            if own is not None:
                store.set("failed", f"rank {self._rank}: {own}")
                self._know()
            if ended:
                self._leave(f"seen/{reached}" if own is None and self._failed is None else "informed")
                return
            if announced < wanted:  # this rank has come to its next meeting
                announced, pause = wanted, 0.002
                store.add(f"meetings/{wanted}", 1)
            if reached < wanted and store.add(f"meetings/{wanted}", 0) == self._count:
                store.add(f"seen/{wanted}", 1)
                self._tell(reached=wanted)
            if asked:
                self._tell(missing=[rank for rank in range(self._count) if not self._root.add(self._beats(rank), 0)])
            self._answered = time.monotonic()
            pause = min(1.5 * pause, 0.25 if reached < wanted else _BEAT)
            with self._answers:
                news = (wanted, asked, own, ended)
                self._answers.wait_for(lambda: (self._wanted, self._asked, self._own, self._ended) != news, pause)  # noqa: B023

    def _watch(self, beats: dict[int, tuple[int, float]]) -> None:
        """Looks for ranks that have failed or died.

        Args:
            beats: rank → how often it has beaten, and when that was last seen to change.
        """
        if self._store.check(["failed"]):
            self._tell(self._store.get("failed").decode(errors="replace"))
            self._know()
        now = time.monotonic()
        for rank, (before, since) in beats.items():
            count = self._root.add(self._beats(rank), 0)
            if count != before:
                beats[rank] = count, now
            elif 0 < count < _LEFT and now - since > _SILENCE:
                why = (
                    f"rank {rank}: no sign of life for {now - since:.0f} s: its process was killed, or its machine "
                    "cannot be reached: look at its log"
                )
                self._store.set("failed", why)
                self._tell(why)
                self._know()

    def _know(self) -> None:
        """Counts this rank among those that know of a failure, once."""
        if not self._informed:
            self._informed = True
            self._store.add("informed", 1)

    def _leave(self, counted: str) -> None:
        """Waits for a moment until all ranks have seen what this one has: the store may be in this process, which may
        end after the load.

        Args:
            counted: the key under which ranks are counted that have.
        """
        began = time.monotonic()
        while self._store.add(counted, 0) < self._count and time.monotonic() - began < _FAREWELL * _BEAT:
            time.sleep(0.01)
        self._root.add(self._beats(self._rank), _LEFT)

    def _tell(self, failed: str | None = None, reached: int | None = None, missing: list[int] | None = None) -> None:
        """Passes what the store has answered to the thread of the load."""
        with self._answers:
            if failed is not None and self._failed is None and self._own is None:
                self._failed = failed
            if reached is not None:
                self._reached = reached
            if missing is not None:
                self._missing, self._asked = missing, False
            self._answers.notify_all()


def _end(stand_in: subprocess.Popen[bytes]) -> None:
    """Ends the process that beats for this one."""
    if stand_in.stdin is not None:
        stand_in.stdin.close()
    try:
        stand_in.wait(_BEAT)
    except subprocess.TimeoutExpired:  # it imports torch, or a fork of this process has the other end
        stand_in.kill()
        stand_in.wait()


def patience() -> float:
    """The seconds for which ranks wait for others to begin the same load.

    Raises:
        OptionError: the environment variable is not such a number.
    """
    given = os.environ.get("GPULOAD_RANKS_TIMEOUT", "")
    try:
        seconds = float(given or _PATIENCE)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise OptionError(f"GPULOAD_RANKS_TIMEOUT={given!r}: expected a number of seconds > 0")
    return seconds
