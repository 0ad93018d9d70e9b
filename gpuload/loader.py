"""PromptLoader: batches in a reproducible order, with a state that can be saved in the middle of an epoch.

The order of an epoch is a pure function of seed, epoch and number of rows; all ranks together go through it from the
beginning to the end. The state is therefore two numbers (the epoch, and how many rows of its order have been yielded),
with the settings and the fingerprint of the data that they refer to. Any number of ranks can continue from there.
"""

import math
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Protocol, get_args

import numpy as np

from gpuload.errors import OptionError, ResumeError
from gpuload.fingerprint import Fingerprint, difference
from gpuload.options import Padding

_VERSION = 2
_PROGRESS = {1: "batch", _VERSION: "position"}  # version of a state → what it counts
_DIVISION = ("batch_size", "world_size")  # settings that divide an order among batches and ranks, and do not change it


class Data(Protocol):
    """The part of `PromptDataset` that a loader uses."""

    @property
    def fingerprint(self) -> Fingerprint: ...

    def __len__(self) -> int: ...

    def batch(self, rows: np.ndarray[Any, Any], padding: Padding) -> MutableMapping[str, Any]: ...

    def ahead(self, batches: Iterator[Any]) -> Iterator[Any]: ...


class PromptLoader:
    """An iterable over the batches of one epoch. Each `iter()` starts the next epoch.

    Made by `PromptDataset.loader`. A batch is a mapping; see `PromptDataset.batch`.

    Examples:
        >>> import gpuload
        >>> from gpuload.demo_data import demo_files
        >>> file, tokenizer = demo_files()
        >>> prompts = gpuload.load(file, tokenizer, max_samples=100)
        >>> loader = prompts.loader(batch_size=32, shuffle=True, seed=0)
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
        for name, value, least in (("batch_size", batch_size, 1), ("world_size", world_size, 1), ("seed", seed, 0)):
            if not _is_count(value) or value < least:
                raise OptionError(f"{name}={value!r}: expected an integer of at least {least}")
        if not 0 <= rank < world_size:
            raise OptionError(f"rank={rank}: expected 0 to {world_size - 1} for world_size={world_size}")
        if padding not in get_args(Padding):
            raise OptionError(f"padding={padding!r}: expected one of {', '.join(map(repr, get_args(Padding)))}")
        self._dataset = dataset
        self._settings = {
            "batch_size": int(batch_size),
            "shuffle": bool(shuffle),
            "seed": int(seed),
            "world_size": int(world_size),
            "drop_last": bool(drop_last),
        }
        self._rank = rank
        self._padding: Padding = padding
        self.epoch = 0
        self._position = 0  # rows of this epoch's order that all ranks have yielded so far
        self._resuming = False
        if len(self) == 0:
            raise OptionError(
                f"drop_last leaves no batch: {len(dataset)} rows, world_size={world_size}, batch_size={batch_size}"
            )

    def __len__(self) -> int:
        """Number of batches per epoch, the same on every rank."""
        return self._batches_from(0)

    def __iter__(self) -> Iterator[MutableMapping[str, Any]]:
        if self._position and not self._resuming:  # an epoch left by `break` is not continued
            self.epoch, self._position = self.epoch + 1, 0
        self._resuming = False
        start, rows, size = self._position, len(self._dataset), self._settings["batch_size"]
        order = self._order(start)
        parts = (order[k * size : (k + 1) * size] for k in range(self._batches_from(start)))
        for batch in self._dataset.ahead(self._dataset.batch(part, self._padding) for part in parts):
            self._position = min(self._position + size * self._settings["world_size"], rows)
            yield batch
        self.epoch, self._position = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Start the next `iter()` at the beginning of the given epoch.

        Args:
            epoch: Number of the epoch, from 0.

        Raises:
            OptionError: It is not such a number.
        """
        if not _is_count(epoch):
            raise OptionError(f"epoch={epoch!r}: expected an integer of at least 0")
        self.epoch, self._position, self._resuming = int(epoch), 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this loader, for `load_state_dict`.

        Returns:
            A dict of plain data (picklable, JSON-serializable): `version`, `epoch`, `position` (how many rows of the
            epoch's order all ranks together have yielded), `settings`, and `fingerprint` of the data. It is the same on
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
        """Resume: the next `iter()` continues with the rows that followed when `state` was saved.

        `world_size` and `batch_size` may differ from those of the saved loader. All ranks together then yield exactly
        the rest of the epoch's order, divided among the new ranks and batches from its first row on.

        Args:
            state: The result of `state_dict`.

        Raises:
            ResumeError: The state is damaged, or was saved with other data or other settings. The message names the
                differences.
        """
        settings, fingerprint = checked_state(state)
        changed = [
            f"{name} was {settings.get(name)!r}, is {value!r}"
            for name, value in self._settings.items()
            if settings.get(name) != value and name not in _DIVISION
        ]
        if changed:
            raise ResumeError(f"the state was saved by a loader with other settings: {'; '.join(changed)}")
        differs = difference(fingerprint, self._dataset.fingerprint)
        if differs:
            raise ResumeError(f"the state was saved for other data: {differs}")
        position = position_of(state, len(self._dataset))
        self.epoch, self._position, self._resuming = int(state["epoch"]), position, True

    def _batches_from(self, start: int) -> int:
        """Number of batches of each rank from row `start` of an epoch's order on."""
        rows, size = self._rows_from(start), self._settings["batch_size"]
        return rows // size if self._settings["drop_last"] else -(-rows // size)

    def _rows_from(self, start: int) -> int:
        """Number of rows of each rank from row `start` of an epoch's order on."""
        rows, ranks = len(self._dataset) - start, self._settings["world_size"]
        return rows // ranks if self._settings["drop_last"] else -(-rows // ranks)

    def _order(self, start: int) -> np.ndarray[Any, Any]:
        """This rank's rows of the current epoch, in order, from row `start` of the epoch's order on."""
        rows, ranks = len(self._dataset), self._settings["world_size"]
        order = np.arange(rows)
        if self._settings["shuffle"]:
            order = np.random.default_rng([self._settings["seed"], self.epoch]).permutation(rows)
        end = start + self._rows_from(start) * ranks
        return np.resize(order, end)[start + self._rank :: ranks]


def checked_state(state: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Settings and fingerprint of a state.

    Raises:
        ResumeError: it is not the result of `state_dict`, or that of another version of gpuload.
    """
    if not isinstance(state, Mapping):
        raise ResumeError(f"expected the dict that state_dict() returned, not {state!r:.80}: check the checkpoint")
    version = state.get("version")
    if version not in tuple(_PROGRESS):
        raise ResumeError(f"the loader state has version {version!r}, this gpuload supports version {_VERSION}")
    if not _is_count(state.get("epoch")):
        raise _damaged(f"epoch={state.get('epoch')!r}")
    settings, fingerprint = state.get("settings"), state.get("fingerprint")
    if not isinstance(settings, Mapping) or not isinstance(fingerprint, Mapping):
        raise _damaged("it has no settings or no fingerprint")
    if not all(_is_count(settings.get(name)) for name in _DIVISION):
        raise _damaged(f"settings={dict(settings)!r}")
    if unknown := set(state) - {"version", "epoch", _PROGRESS[version], "settings", "fingerprint"}:
        raise _damaged(f"unexpected {', '.join(map(repr, sorted(unknown, key=str)))}")
    return settings, fingerprint


def position_of(state: Mapping[str, Any], rows: int) -> int:
    """How many rows of an epoch of `rows` rows have been yielded. Version 1 counted batches.

    Raises:
        ResumeError: it is not in the epoch.
    """
    progress = _PROGRESS[state["version"]]
    step = 1 if progress == "position" else math.prod(state["settings"][name] for name in _DIVISION)
    count: Any = state.get(progress)
    # The last batch of an epoch may be incomplete.
    if not _is_count(count) or (count > 0 and (count - 1) * step >= rows):
        raise _damaged(f"{progress}={count!r} in an epoch of {rows:,} rows")
    return min(int(count) * step, rows)


def _damaged(what: str) -> ResumeError:
    return ResumeError(f"the loader state is damaged: {what}: use another checkpoint, or start an epoch with set_epoch")


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)
