"""DataSource: slime's data source, over prompts that were prepared by columns."""

import copy
import importlib
import logging
from pathlib import Path
from typing import Any

from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.processing_utils import load_processor, load_tokenizer

from gpuload.integrations.core import LOAD_OPTIONS, log_fallback, settings_under, unless_unsupported
from gpuload.integrations.slime.contract import MODULES, contract_problem
from gpuload.options import Options

logger = logging.getLogger(__name__)


class DataSource(RolloutDataSourceWithBuffer):  # type: ignore[misc]
    """slime's `RolloutDataSourceWithBuffer`, of which only `dataset` is replaced.

    Samples, their order and checkpoints are slime's. In addition, samples of texts have `tokens`, which slime's
    rollouts use instead of tokenizing the prompt. Data that gpuload does not support is prepared by slime itself, and
    the log gives the reason.

    Args:
        args: slime's arguments. `gpuload`, if it is there, has options of `gpuload.load`.

    Raises:
        OptionError: an unknown key in `args.gpuload`, or an invalid value.
        DeviceError: the device that was asked for is not available.
    """

    def __init__(self, args: Any):
        settings = settings_under("gpuload", getattr(args, "gpuload", None), (*LOAD_OPTIONS, "store"))
        Options.parse(settings)  # invalid values are errors, not reasons to fall back
        dataset = _prepared(args, settings)
        given = args
        if dataset is not None:
            given = copy.copy(args)
            given.prompt_data = None  # slime then makes no dataset
        super().__init__(given)
        self.args = args
        if dataset is not None:
            self.dataset = dataset
            if args.rollout_shuffle:
                dataset.shuffle(self.epoch_id)


def _prepared(args: Any, settings: dict[str, Any]) -> Any:
    """The dataset; None if slime makes it, or if there is none."""
    if not args.rollout_global_dataset or args.prompt_data is None:
        return None
    problem = contract_problem({name: importlib.import_module(name) for name in MODULES})
    if problem is not None:
        log_fallback(logger, "slime's own dataset", problem)
        return None
    from gpuload.integrations.slime.preparation import prepare

    tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
    processor = load_processor(args.hf_checkpoint, trust_remote_code=True)
    own = "slime's own dataset"
    dataset = unless_unsupported(lambda: prepare(args, tokenizer, processor, settings), logger, own)
    if dataset is not None and args.dump_details is not None:
        tokenizer.save_pretrained(Path(args.dump_details) / "tokenizer")
        if processor:
            processor.save_pretrained(Path(args.dump_details) / "processor")
    return dataset
