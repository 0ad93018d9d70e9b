"""`PromptLoader`: batches in a reproducible order, with a state that can be saved in the middle of an epoch.

The order of an epoch is a pure function of (seed, epoch, number of rows). The state is therefore two numbers and the
fingerprint of the data.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, get_args

import numpy as np

from gpuload.errors import OptionError, ResumeError
from gpuload.fingerprint import Fingerprint, difference
from gpuload.options import Padding

_VERSION = 1


class Data(Protocol):
    """What a loader needs of a dataset."""

    @property
    def fingerprint(self) -> Fingerprint: ...

    def __len__(self) -> int: ...

    def batch(self, rows: np.ndarray[Any, Any], padding: Padding) -> dict[str, Any]: ...

    def ahead(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]: ...


class PromptLoader:
    """Iterates over the batches of one epoch; the next `iter()` starts the next epoch.

    Made by `PromptDataset.loader`.

    Args:
        dataset: the rows.
        batch_size: rows per batch and rank.
        shuffle: a new order every epoch; otherwise the order of the dataset.
        seed: of the order; the same on all ranks.
        rank, world_size: rank r takes the rows r, r + world_size, ... of the epoch's order. All ranks get the same
            number of batches of the same sizes: if the rows do not divide evenly, the last few are dropped with
            `drop_last`, and otherwise filled up with rows from the start of the epoch's order.
        drop_last: drop a last batch that is not full.
        padding: "max_length", or "longest": as wide as the longest row of the batch.

    Attributes:
        epoch: the epoch that the next `iter()` yields, or that is in progress.

    Raises:
        OptionError: an invalid setting, or no full batch with `drop_last`.

    Example:
        >>> import gpuload
        >>> from gpuload.demo_data import demo_files
        >>> prompts = gpuload.load(*demo_files(), max_prompt_length=512, max_samples=8)
        >>> loader = prompts.loader(batch_size=4, shuffle=True, seed=0)
        >>> [tuple(batch["input_ids"].shape) for batch in loader]
        [(4, 512), (4, 512)]
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
        self._batch = 0  # batches of this epoch that were yielded
        self._resuming = False
        if len(self) == 0:
            raise OptionError(
                f"drop_last leaves no batch: {len(dataset)} rows, world_size={world_size}, batch_size={batch_size}"
            )

    def __len__(self) -> int:
        """Batches per epoch, the same on every rank."""
        rows, size = self._rows_per_rank(), self._settings["batch_size"]
        return rows // size if self._settings["drop_last"] else -(-rows // size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._batch and not self._resuming:  # an epoch that was left early is not resumed by itself
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
        """Makes the next `iter()` start at the beginning of an epoch."""
        self.epoch, self._batch, self._resuming = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """The position and the settings of this loader, as plain data. The same on every rank."""
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "batch": self._batch,
            "settings": dict(self._settings),
            "fingerprint": self._dataset.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next `iter()` continue where `state` was saved, with the identical next batch.

        Args:
            state: from `state_dict`.

        Raises:
            ResumeError: the state is for other data or other settings; the message names what differs.
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
