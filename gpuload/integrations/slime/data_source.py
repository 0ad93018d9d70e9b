"""DataSource: slime's data source, over prompts that were prepared by columns."""

import copy
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from slime.rollout.data_source import RolloutDataSourceWithBuffer

from gpuload.core.errors import DataError
from gpuload.core.options import Options
from gpuload.integrations.core import LOAD_OPTIONS, imported, log_fallback, settings_under, unless_unsupported
from gpuload.integrations.slime.contract import NAMES, contract_problem
from gpuload.reference.vocabulary import file_of

logger = logging.getLogger(__name__)

_CONFIGURATIONS = (
    "tokenizer_config.json", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "config.json",
)  # fmt: skip
_CLASSES = {"AutoTokenizer", "AutoProcessor", "AutoImageProcessor", "AutoFeatureExtractor", "AutoVideoProcessor"}


class DataSource(RolloutDataSourceWithBuffer):  # type: ignore[misc]
    """slime's `RolloutDataSourceWithBuffer`, of which only `dataset` is replaced.

    Samples, their order and checkpoints are slime's. In addition, samples of texts have `tokens`, which slime's
    rollouts use instead of tokenizing the prompt. Data that gpuload does not support is prepared by slime itself, and
    the log gives the reason. So is data for a checkpoint with code of its own for its tokenizer or processor, unless
    `trust_remote_code` is set.

    Args:
        args: slime's arguments. `gpuload`, if it is there, has options of `gpuload.load`. `trust_remote_code`, an
            argument of Megatron, is False if it is not there.

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
    own = "slime's own dataset"
    found, problem = imported(NAMES)
    problem = problem or contract_problem(found["Dataset"], found["Sample"])
    if problem is not None:
        log_fallback(logger, own, problem)
        return None
    from gpuload.integrations.slime.preparation import prepare

    opened = unless_unsupported(lambda: _opened(args, found), logger, own)
    if opened is None:
        return None
    tokenizer, processor = opened
    dataset = unless_unsupported(lambda: prepare(args, tokenizer, processor, settings), logger, own)
    if dataset is not None and args.dump_details is not None:
        tokenizer.save_pretrained(Path(args.dump_details) / "tokenizer")
        if processor:
            processor.save_pretrained(Path(args.dump_details) / "processor")
    return dataset


def _opened(args: Any, stock: Mapping[str, Any]) -> tuple[Any, Any]:
    """The tokenizer and the processor, or None, of the checkpoint, by slime's functions.

    slime runs the code of a checkpoint without being asked to. The data source runs it if that is asked for: without, a
    `DataError` if they may be others than slime's.
    """
    checkpoint, trusted = args.hf_checkpoint, bool(getattr(args, "trust_remote_code", False))
    try:
        tokenizer = stock["load_tokenizer"](checkpoint, trust_remote_code=trusted)
    except ValueError as error:
        if trusted:
            raise
        raise _untrusted(checkpoint) from error
    processor = stock["load_processor"](checkpoint, trust_remote_code=trusted)
    file = None if trusted else _file_with_code(checkpoint)
    if file is not None:  # transformers may have taken a class of its own instead, or no processor
        raise _untrusted(file)
    return tokenizer, processor


def _untrusted(name: Any) -> DataError:
    return DataError(
        f"{name} may need code of its own for the tokenizer or the processor: set --trust-remote-code, or "
        "trust_remote_code in --custom-config-path, if gpuload may run it"
    )


def _file_with_code(checkpoint: str) -> Path | None:
    """A configuration of a checkpoint, which was opened before, with classes of its own for a tokenizer or a
    processor."""
    for name in _CONFIGURATIONS:
        file = file_of(checkpoint, name)
        with suppress(OSError, ValueError):
            given = json.loads(file.read_text(encoding="utf-8")) if file is not None else {}
            classes = given.get("auto_map") or {}
            # The configuration of a tokenizer may have a list of its two classes.
            if not isinstance(classes, dict) or _CLASSES & classes.keys():
                return file
    return None
