"""PackLoader: batches by a plan, of packs or of rows chosen by their lengths.

The plan of an epoch is a pure function of lengths, seed and epoch (`gpuload.packing`), so the state is that of a
`PromptLoader`: the epoch, and how many packs of its plan all ranks together have had.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpuload.errors import OptionError, ResumeError
from gpuload.fingerprint import Fingerprint, difference
from gpuload.loader import checked_state, position_of
from gpuload.packing import Plan, share

_VERSION = 2
_DIVISION = ("batch_size", "world_size")


class PackLoader:
    """An iterable over the batches of one epoch. Each `iter()` starts the next epoch. Made by `ChatDataset.loader`.

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
        plan: epoch → its packs.
        make: plan, numbers of packs → a batch.
        fingerprint: of the data.
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

    def __init__(
        self,
        plan: Callable[[int], Plan],
        make: Callable[[Plan, Any], Any],
        fingerprint: Callable[[], Fingerprint],
        batch_size: int,
        settings: Mapping[str, Any],
        *,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ):
        self._plan, self._make, self._fingerprint, self._rank = plan, make, fingerprint, rank
        self._settings = {"batch_size": batch_size, "world_size": world_size, "drop_last": drop_last, **settings}
        self.epoch = 0
        self._position = 0  # packs of this epoch's plan that all ranks have had so far
        self._resuming = False
        self._planned: tuple[int, Plan] | None = None
        if not len(self):
            raise OptionError(f"drop_last leaves no batch: world_size={world_size}, batch_size={batch_size}")

    def __len__(self) -> int:
        """Number of batches of the current epoch, the same on every rank."""
        return len(self._shares(0))

    def plan(self) -> Plan:
        """Return the plan of the current epoch."""
        if self._planned is None or self._planned[0] != self.epoch:
            self._planned = self.epoch, self._plan(self.epoch)
        return self._planned[1]

    def __iter__(self) -> Iterator[Any]:
        if self._position and not self._resuming:  # an epoch left by `break` is not continued
            self.epoch, self._position = self.epoch + 1, 0
        self._resuming = False
        plan = self.plan()
        step = self._settings["batch_size"] * self._settings["world_size"]
        for packs in self._shares(self._position):
            batch = self._make(plan, packs)
            self._position = min(self._position + step, len(plan))
            yield batch
        self.epoch, self._position = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Start the next `iter()` at the beginning of the given epoch.

        Args:
            epoch: Number of the epoch, from 0.

        Raises:
            OptionError: It is not such a number.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise OptionError(f"epoch={epoch!r}: expected an integer of at least 0")
        self.epoch, self._position, self._resuming = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this loader, for `load_state_dict`: a dict of plain data, the same on every rank."""
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "position": self._position,
            "settings": dict(self._settings),
            "fingerprint": self._fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume: the next `iter()` continues with the packs that followed when `state` was saved.

        `world_size` and `batch_size` may differ from those of the saved loader.

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
        differs = difference(fingerprint, self._fingerprint())
        if differs:
            raise ResumeError(f"the state was saved for other data: {differs}")
        self.epoch = int(state["epoch"])
        self._position, self._resuming = position_of(state, len(self.plan())), True

    def _shares(self, position: int) -> list[Any]:
        names = ("batch_size", "world_size", "drop_last")
        batch_size, world_size, drop_last = (self._settings[name] for name in names)
        return share(
            len(self.plan()),
            batch_size,
            position=position,
            rank=self._rank,
            world_size=world_size,
            drop_last=drop_last,
        )
