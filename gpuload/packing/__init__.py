"""Which tokens of which rows go into each batch of an epoch, computed from their lengths alone.

    plan = pack(lengths, 4096, "bfd", shuffle=True, seed=0, epoch=3)        # packs of at most 4,096 tokens
    plan = batch_rows(lengths, max_tokens=32768, shuffle=True)              # whole rows, by token budget
    for numbers in share(len(plan), 8, rank=rank, world_size=world_size):   # this rank's batches, of 8 packs each
        pieces = plan.take(numbers)                                         # which tokens of which rows these are

Nothing here knows of files, tokenizers or tokens.
"""

from gpuload.packing.packs import pack
from gpuload.packing.plan import Plan, share
from gpuload.packing.row_batches import batch_rows

__all__ = ["Plan", "batch_rows", "pack", "share"]
