"""Loaders: batches in a reproducible order, with a state that can be saved in the middle of an epoch.

An epoch is a list of rows (`PromptLoader`) or of packs (`PackLoader`): a pure function of the data, the seed and the
number of the epoch. All ranks together go through it from the beginning to the end. The state is therefore two numbers
(the epoch, and how many rows or packs of it have been yielded), with the settings and the fingerprint of the data that
they refer to. Any number of ranks can continue from there.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol, get_args

import numpy as np

from gpuload.core.errors import OptionError, ResumeError
from gpuload.core.options import Padding, check_choice
from gpuload.core.words import counted
from gpuload.dataset.fingerprint import Fingerprint, difference
from gpuload.packing import Plan, share
from gpuload.packing.plan import check_counts, check_flags, check_ranks, count_batches, is_count

_VERSION = 2
_PROGRESS = {1: "batch", _VERSION: "position"}  # version of a state → what it counts
_SHARES = ("batch_size", "world_size", "drop_last")
_DIVISION = ("batch_size", "world_size")  # settings that divide an order among batches and ranks, and do not change it


class _NotSet:
    def __repr__(self) -> str:
        return "not set"


_NOT_SET = _NotSet()


class Data(Protocol):
    """The part of `PromptDataset` that a loader uses."""

    @property
    def fingerprint(self) -> Fingerprint: ...

    def __len__(self) -> int: ...

    def batch(self, rows: np.ndarray[Any, Any], padding: Padding) -> MutableMapping[str, Any]: ...

    def ahead(self, batches: Iterator[Any]) -> Iterator[Any]: ...


class Loader(ABC):
    """An iterable over the batches of one epoch; each `iter()` starts the next epoch.

    What decides the batches are the settings: `batch_size` (of each rank), `world_size`, `drop_last`, and others.

    Attributes:
        epoch: Number of the current epoch, or of the one that the next `iter()` starts.

    Raises:
        OptionError: A value is invalid, or `drop_last` leaves no batch.
    """

    _unit = "rows"

    def __init__(self, dataset: Data, settings: dict[str, Any], rank: int):
        check_ranks(settings["batch_size"], rank, settings["world_size"])
        whole = {name: int(settings[name]) for name in _DIVISION}
        self._dataset, self._settings, self._rank = dataset, settings | whole, rank
        self.epoch = 0
        self._position = 0  # rows or packs of this epoch that all ranks have yielded so far
        self._resuming = False
        self._running: object = None  # the last `iter()`, until the next one or another place to begin at is set
        if len(self) == 0:
            if not len(dataset):
                raise OptionError("there is no batch: the dataset has no rows")
            raise OptionError(
                f"drop_last leaves no batch: {len(dataset)} rows, world_size={settings['world_size']}, "
                f"batch_size={settings['batch_size']}"
            )

    @abstractmethod
    def _total(self, epoch: int) -> int:
        """Number of rows or packs of an epoch."""

    @abstractmethod
    def _batches(self, parts: Iterator[np.ndarray[Any, Any]]) -> Iterator[Any]:
        """The batches of the current epoch that have these rows or packs of it."""

    def __len__(self) -> int:
        """Number of batches of the current epoch, the same on every rank."""
        batch_size, world_size, drop_last = (self._settings[name] for name in _SHARES)
        return count_batches(self._total(self.epoch), batch_size, world_size, drop_last)

    def __repr__(self) -> str:
        settings = {**self._settings, "rank": self._rank, "epoch": self.epoch}
        shown = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return f"{type(self).__name__}({counted(len(self), 'batches')}, {shown})"

    def __iter__(self) -> Iterator[Any]:
        if self._position and not self._resuming:  # an epoch left by `break` is not continued
            self.epoch, self._position = self.epoch + 1, 0
        self._resuming = False
        self._running = running = object()
        total, settings = self._total(self.epoch), {name: self._settings[name] for name in _SHARES}
        step = settings["batch_size"] * settings["world_size"]
        parts = share(total, position=self._position, rank=self._rank, **settings)
        for batch in self._dataset.ahead(self._batches(parts)):
            if self._running is running:  # one that goes on after another has begun does not move that one's place
                self._position = min(self._position + step, total)
            yield batch
            del batch  # of pixels, hundreds of megabytes: not kept while the consumer waits for the next one
        if self._running is running:
            self.epoch, self._position = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Start the next `iter()` at the beginning of the given epoch.

        Examples:
            >>> loader = prompts.loader(batch_size=50)
            >>> loader.set_epoch(3)
            >>> loader.epoch
            3

        Args:
            epoch: Number of the epoch, from 0.

        Raises:
            OptionError: It is not such a number.
        """
        check_counts(epoch=(epoch, 0))
        self.epoch, self._position, self._resuming, self._running = int(epoch), 0, False, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this loader, for `load_state_dict`.

        Examples:
            >>> state = prompts.loader(batch_size=50).state_dict()
            >>> state["epoch"], state["position"]
            (0, 0)

        Returns:
            A dict of plain data (picklable, JSON-serializable): `version`, `epoch`, `position` (how many rows or packs
            of the epoch all ranks together have yielded), `settings`, and `fingerprint` of the data. It is the same on
            every rank.
        """
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "position": self._position,
            "settings": dict(self._settings),
            "fingerprint": self._dataset.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume: the next `iter()` continues with what followed when `state` was saved.

        Examples:
            >>> loader = prompts.loader(batch_size=50)
            >>> loader.load_state_dict(prompts.loader(batch_size=50).state_dict())

        `world_size` and `batch_size` may differ from those of the saved loader. All ranks together then yield exactly
        the rest of the epoch, divided among the new ranks and batches from its first row or pack on.

        Args:
            state: The result of `state_dict`.

        Raises:
            ResumeError: The state is damaged, or was saved with other data or other settings. The message names the
                differences.
        """
        settings, fingerprint = _checked_state(state)
        changed = [
            f"{name} was {settings.get(name, _NOT_SET)!r}, is {self._settings.get(name, _NOT_SET)!r}"
            for name in dict.fromkeys([*self._settings, *settings])  # those of packs are not those of rows
            if settings.get(name, _NOT_SET) != self._settings.get(name, _NOT_SET) and name not in _DIVISION
        ]
        if changed:
            raise ResumeError(
                f"the state was saved by a loader with other settings: {'; '.join(changed)}. Make the loader with "
                "those, or begin an epoch with set_epoch()"
            )
        differs = difference(fingerprint, self._dataset.fingerprint)
        if differs:
            raise ResumeError(
                f"the state was saved for other data: {differs}. Load what was loaded then, or begin an epoch with "
                "set_epoch()"
            )
        epoch = int(state["epoch"])
        position = _position_of(state, self._total(epoch), self._unit)
        self.epoch, self._position, self._resuming, self._running = epoch, position, True, None


class PromptLoader(Loader):
    """An iterable over the batches of one epoch. Each `iter()` starts the next epoch.

    Made by `PromptDataset.loader`. A batch is a mapping; see `PromptDataset.batch`.

    Examples:
        >>> import gpuload
        >>> from gpuload.demo_data import demo_files
        >>> file, tokenizer = demo_files()
        >>> prompts = gpuload.load(file, tokenizer, max_samples=100)
        >>> loader = prompts.loader(batch_size=32, shuffle=True, seed=0)
        >>> loader  # doctest: +ELLIPSIS
        PromptLoader(4 batches, batch_size=32, shuffle=True, seed=0, ..., padding='max_length')
        >>> [tuple(batch["input_ids"].shape) for batch in loader]
        [(32, 1024), (32, 1024), (32, 1024), (4, 1024)]

        The state can be saved in the middle of an epoch:

        >>> batches = iter(loader)
        >>> _, state = next(batches), loader.state_dict()
        >>> expected = next(batches)["input_ids"]
        >>> resumed = prompts.loader(batch_size=32, shuffle=True, seed=0)
        >>> resumed.load_state_dict(state)
        >>> bool((next(iter(resumed))["input_ids"] == expected).all())
        True

    Args:
        dataset: The prompts.
        batch_size: Rows per batch, on each rank.
        shuffle: Use a new order in every epoch, instead of the order of the dataset.
        seed: Seed of the order. It must be the same on all ranks.
        rank: This process's rank. Rank `r` takes the rows `r`, `r + world_size`, ... of the epoch's order.
        world_size: Number of ranks. All ranks get the same number of batches, of the same sizes. If the number of rows
            is not divisible, the last rows are dropped with `drop_last`; otherwise the first rows of the epoch's order
            are repeated at its end.
        drop_last: Drop the last batch if it is incomplete.
        padding: Width of a batch: `"max_length"` for `max_prompt_length`, `"longest"` for the longest row of the batch.

    Attributes:
        epoch: Number of the current epoch, or of the one that the next `iter()` starts.

    Raises:
        OptionError: A value is invalid, or `drop_last` leaves no batch.
    """

    def __init__(
        self,
        dataset: Data,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        padding: Padding = "max_length",
    ):
        check_counts(seed=(seed, 0))
        check_flags(shuffle=shuffle, drop_last=drop_last)
        check_choice("padding", padding, get_args(Padding))
        self._padding: Padding = padding
        settings = {
            "batch_size": batch_size,
            "shuffle": bool(shuffle),
            "seed": int(seed),
            "world_size": world_size,
            "drop_last": bool(drop_last),
        }
        super().__init__(dataset, settings, rank)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, padding={self._padding!r})"

    def _total(self, epoch: int) -> int:
        return len(self._dataset)

    def _batches(self, parts: Iterator[np.ndarray[Any, Any]]) -> Iterator[MutableMapping[str, Any]]:
        order = np.arange(len(self._dataset))
        if self._settings["shuffle"]:
            order = np.random.default_rng([self._settings["seed"], self.epoch]).permutation(len(order))
        return (self._dataset.batch(order[part], self._padding) for part in parts)


class PackLoader(Loader):
    """An iterable over batches by a plan, of packs or of rows chosen by their lengths. Made by `ChatDataset.loader`.

    Each `iter()` starts the next epoch.

    Examples:
        >>> import gpuload, pyarrow as pa
        >>> from gpuload.demo_data import demo_files
        >>> _, tokenizer = demo_files()
        >>> texts = pa.table({"text": ["one two three"] * 10})
        >>> chats = gpuload.load_chats(texts, tokenizer)
        >>> loader = chats.loader(batch_size=2, packing="bfd", pack_length=8)
        >>> [tuple(batch["input_ids"].shape) for batch in loader]
        [(1, 16), (1, 16), (1, 8)]

    Args:
        dataset: The rows.
        plan: epoch → its packs.
        make: plan, numbers of packs → a batch.
        batch_size: Packs per batch, on each rank.
        settings: What else decides the plan.
        rank: This process's rank.
        world_size: Number of ranks; all of them get the same number of batches.
        drop_last: Drop packs that are not enough for a batch on every rank; otherwise the first packs are repeated.

    Attributes:
        epoch: Number of the current epoch, or of the one that the next `iter()` starts.

    Raises:
        OptionError: A value is invalid, or `drop_last` leaves no batch.
    """

    _unit = "packs"

    def __init__(
        self,
        dataset: Data,
        plan: Callable[[int], Plan],
        make: Callable[[Plan, Any], Any],
        batch_size: int,
        settings: Mapping[str, Any],
        *,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ):
        self._plan, self._make = plan, make
        self._planned: tuple[int, Plan] | None = None
        divided = {"batch_size": batch_size, "world_size": world_size, "drop_last": bool(drop_last)}
        super().__init__(dataset, divided | dict(settings), rank)

    def plan(self) -> Plan:
        """Return the plan of the current epoch.

        Examples:
            >>> len(chats.loader(batch_size=1, packing="bfd").plan())
            1
        """
        return self._plan_of(self.epoch)

    def _plan_of(self, epoch: int) -> Plan:
        if self._planned is None or self._planned[0] != epoch:
            self._planned = epoch, self._plan(epoch)
        return self._planned[1]

    def _total(self, epoch: int) -> int:
        return len(self._plan_of(epoch))

    def _batches(self, parts: Iterator[np.ndarray[Any, Any]]) -> Iterator[Any]:
        plan = self.plan()
        return (self._make(plan, part) for part in parts)


def _checked_state(state: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Settings and fingerprint of a state. A `ResumeError` if it is not the result of `state_dict`, or that of another
    version of gpuload."""
    if not isinstance(state, Mapping):
        raise ResumeError(f"expected the dict that state_dict() returned, not {state!r:.80}: check the checkpoint")
    version = state.get("version")
    if version not in tuple(_PROGRESS):
        raise ResumeError(f"the loader state has version {version!r}, this gpuload supports version {_VERSION}")
    if not is_count(state.get("epoch"), 0):
        raise _damaged(f"epoch={state.get('epoch')!r}")
    settings, fingerprint = state.get("settings"), state.get("fingerprint")
    if not isinstance(settings, Mapping) or not isinstance(fingerprint, Mapping):
        raise _damaged("it has no settings or no fingerprint")
    if not all(is_count(settings.get(name), 0) for name in _DIVISION):
        raise _damaged(f"settings={dict(settings)!r}")
    if unknown := set(state) - {"version", "epoch", _PROGRESS[version], "settings", "fingerprint"}:
        raise _damaged(f"unexpected {', '.join(map(repr, sorted(unknown, key=str)))}")
    return settings, fingerprint


def _position_of(state: Mapping[str, Any], total: int, unit: str) -> int:
    """How many rows or packs (`unit`) of an epoch have been yielded, of `total`. Version 1 counted batches. A
    `ResumeError` if that is not in the epoch."""
    progress = _PROGRESS[state["version"]]
    step = 1 if progress == "position" else math.prod(state["settings"][name] for name in _DIVISION)
    count: Any = state.get(progress)
    # The last batch of an epoch may be incomplete.
    if not is_count(count, 0) or (count > 0 and (count - 1) * step >= total):
        raise _damaged(f"{progress}={count!r} in an epoch of {total:,} {unit}")
    return min(int(count) * step, total)


def _damaged(what: str) -> ResumeError:
    return ResumeError(f"the loader state is damaged: {what}: use another checkpoint, or start an epoch with set_epoch")
