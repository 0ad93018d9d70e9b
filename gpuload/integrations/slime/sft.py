"""sft_rollout: slime's rollout for SFT, with conversations that were tokenized at the start.

--rollout-function-path gpuload.integrations.slime.sft_rollout
--data-source-path gpuload.integrations.slime.DataSource
"""

from types import SimpleNamespace
from typing import Any

from slime.rollout.sft_rollout import generate_rollout


def sft_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[Any]:
    """Returns the samples of a step, with tokens and loss masks.

    Samples that have no loss mask yet are tokenized by slime's own function, which rejects texts.

    Args:
        args: slime's arguments.
        rollout_id: number of the step.
        data_source: `DataSource`, or any other of slime.
        evaluation: not supported, as in slime.

    Returns:
        Groups of one sample each.
    """
    assert not evaluation
    assert args.rollout_global_dataset
    groups: list[Any] = data_source.get_samples(args.rollout_batch_size)
    without = [group for group in groups if group[0].loss_mask is None]
    if without:
        generate_rollout(args, rollout_id, SimpleNamespace(get_samples=lambda count: without))
    for (sample,) in groups:
        sample.reward = 0
    return groups
