"""`DataLoader`: batches of packs for torchtitan's trainer, planned over the whole epoch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import Any

import torch

from gpuload.core.errors import OptionError, ResumeError
from gpuload.engines.host.packs import IGNORED
from gpuload.kinds.load_chats import load_chats
from gpuload.packing.packs import Packing

try:
    from torchtitan.components.data.loader import BaseDataLoader
except ImportError:  # torchtitan 0.3
    from torchtitan.components.dataloader import BaseDataLoader

_STATE = "gpuload"


class TorchtitanLoader(BaseDataLoader):  # type: ignore[misc]
    """A dataloader of torchtitan, over `gpuload.load_chats`.

    A batch is a pair, as the trainer takes it: `input` and `positions`, and labels, all int64. With torchtitan 0.3 they
    are `(local_batch_size, seq_len)`, a pack in each row; later versions take one pack, `(num_tokens_per_batch,)`.
    Labels are those of the next token: -100 where it has no loss, at the end of each row, and for padding. Positions
    begin with 0 in each row of a pack, and in the padding.

    `state_dict` is the same on all ranks, and any number of ranks can continue from it.

    Raises:
        OptionError: A setting is invalid, or the trainer gives no size of a batch.
        GpuloadError: The files cannot be loaded.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        files: list[str] = field(default_factory=list)
        """Parquet or JSON files, globs or URLs, of conversations or texts"""

        tokenizer_name: str = ""
        """Name or directory of the tokenizer; by default the one of the trainer"""

        options: dict[str, Any] = field(default_factory=dict)
        """Further arguments of `gpuload.load_chats`, such as `loss_on`"""

        packing: Packing = "bfd"
        """How rows are packed, see `gpuload.packing.pack`"""

        shuffle: bool = True
        """Another order and other packs in every epoch"""

        seed: int = 42
        """Of the order"""

        infinite: bool = True
        """Begin again after the last batch"""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, tokenizer: Any, **given: Any):
        if not config.files:
            raise OptionError("dataloader.files is empty: name the files to train on")
        if "num_tokens_per_batch" in given:
            longest, self._size, self._packs = given["max_context_length"], given["num_tokens_per_batch"], None
        elif "local_batch_size" in given:
            longest, self._size, self._packs = given["seq_len"], given["seq_len"], given["local_batch_size"]
        else:
            raise OptionError(
                f"this torchtitan gives a dataloader {', '.join(sorted(given))}, and neither num_tokens_per_batch nor "
                "local_batch_size: use torchtitan 0.3.0"
            )
        options = {"max_length": min(longest, self._size)} | config.options
        if options["max_length"] > min(longest, self._size):
            raise OptionError(
                f"dataloader.options: max_length={options['max_length']} is more than the {min(longest, self._size)} "
                "tokens that the trainer takes: leave it out"
            )
        chats = load_chats(config.files, config.tokenizer_name or tokenizer.tokenizer_path, **options)
        self._pad, self._infinite = chats.pad_token_id, config.infinite
        order: dict[str, Any] = {"shuffle": config.shuffle, "seed": config.seed}
        self._loader = chats.loader(
            1, packing=config.packing, pack_length=self._size, rank=dp_rank, world_size=dp_world_size, **order
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        packs = chain.from_iterable(repeat(self._loader)) if self._infinite else iter(self._loader)
        while batch := list(islice(packs, self._packs or 1)):
            ids, labels, positions = zip(*map(self._padded, batch), strict=True)
            joined = torch.cat if self._packs is None else torch.stack
            yield {"input": joined(ids), "positions": joined(positions)}, joined(labels)

    def _padded(self, pack: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids, labels and positions of a pack, each (size,) int64."""
        ids, labels, positions = (pack[name][0].cpu() for name in ("input_ids", "labels", "position_ids"))
        rest = self._size - len(ids)
        return (
            torch.nn.functional.pad(ids, (0, rest), value=self._pad),
            # The first label of each row is ignored: moved by one, that of its last token.
            torch.nn.functional.pad(labels[1:], (0, rest + 1), value=IGNORED),
            torch.cat([positions, torch.arange(rest)]),
        )

    def state_dict(self) -> dict[str, Any]:
        return {_STATE: json.dumps(self._loader.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if not state_dict:  # a checkpoint without one
            return
        if _STATE not in state_dict:
            raise ResumeError(
                "the checkpoint was saved with another dataloader: resume with it, or "
                "begin with the first epoch (checkpoint.exclude_from_loading: dataloader)"
            )
        self._loader.load_state_dict(json.loads(state_dict[_STATE]))
