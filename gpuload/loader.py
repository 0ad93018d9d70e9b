"""PromptLoader: batches in a reproducible order, with a state that can be saved in the middle of an epoch.

The order of an epoch is a pure function of seed, epoch and number of rows. The state is therefore two numbers (epoch
and batch), with the settings and the fingerprint of the data that they refer to.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, get_args

import numpy as np

from gpuload.errors import OptionError, ResumeError
from gpuload.fingerprint import Fingerprint, difference
from gpuload.options import Padding

_VERSION = 1


class Data(Protocol):
    """The part of `PromptDataset` that a loader uses."""

    @property
    def fingerprint(self) -> Fingerprint: ...

    def __len__(self) -> int: ...

    def batch(self, rows: np.ndarray[Any, Any], padding: Padding) -> dict[str, Any]: ...

    def ahead(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]: ...


class PromptLoader:
    """An iterable over the batches of one epoch. Each `iter()` starts the next epoch.

    Made by `PromptDataset.loader`. A batch is a dict; see `PromptDataset.batch`.

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
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
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
        self._batch = 0  # batches of this epoch yielded so far
        self._resuming = False
        if len(self) == 0:
            raise OptionError(
                f"drop_last leaves no batch: {len(dataset)} rows, world_size={world_size}, batch_size={batch_size}"
            )

    def __len__(self) -> int:
        """Number of batches per epoch, the same on every rank."""
        rows, size = self._rows_per_rank(), self._settings["batch_size"]
        return rows // size if self._settings["drop_last"] else -(-rows // size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._batch and not self._resuming:  # an epoch left by `break` is not continued
            self.epoch, self._batch = self.epoch + 1, 0
        self._resuming = False
        order = self._order(self.epoch)
        size = self._settings["batch_size"]
        parts = (order[k * size : (k + 1) * size] for k in range(self._batch, len(self)))
        for batch in self._dataset.ahead(self._dataset.batch(rows, self._padding) for rows in parts):
            self._batch += 1
            yield batch
        self.epoch, self._batch = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Start the next `iter()` at the beginning of the given epoch.

        Args:
            epoch: Number of the epoch, from 0.
        """
        self.epoch, self._batch, self._resuming = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this loader, for `load_state_dict`.

        Returns:
            A dict of plain data (picklable, JSON-serializable): `version`, `epoch`, `batch` (the number of batches
            yielded in this epoch), `settings`, and `fingerprint` of the data. It is the same on every rank.
        """
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "batch": self._batch,
            "settings": dict(self._settings),
            "fingerprint": self._dataset.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume: the next `iter()` continues with the batch that followed when `state` was saved.

        Args:
            state: The result of `state_dict`.

        Raises:
            ResumeError: The state was saved with other data or other settings. The message names the differences.
        """
        if state.get("version") != _VERSION:
            raise ResumeError(
                f"the loader state has version {state.get('version')!r}, this gpuload supports version {_VERSION}"
            )
        changed = [
            f"{name} was {state['settings'].get(name)!r}, is {value!r}"
            for name, value in self._settings.items()
            if state["settings"].get(name) != value
        ]
        if changed:
            raise ResumeError(f"the state was saved by a loader with other settings: {'; '.join(changed)}")
        differs = difference(state["fingerprint"], self._dataset.fingerprint)
        if differs:
            raise ResumeError(f"the state was saved for other data: {differs}")
        self.epoch, self._batch, self._resuming = int(state["epoch"]), int(state["batch"]), True

    def _rows_per_rank(self) -> int:
        rows, ranks = len(self._dataset), self._settings["world_size"]
        return rows // ranks if self._settings["drop_last"] else -(-rows // ranks)

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        """This rank's rows of an epoch, in order."""
        rows = len(self._dataset)
        order = np.arange(rows)
        if self._settings["shuffle"]:
            order = np.random.default_rng([self._settings["seed"], epoch]).permutation(rows)
        needed = self._rows_per_rank() * self._settings["world_size"]
        return np.resize(order, needed)[self._rank :: self._settings["world_size"]]
