"""load_pairs(): preference data, without and with images."""

from typing import Any, Unpack

from gpuload.core.keywords import LoadPairsKeywords, takes
from gpuload.core.options import Options
from gpuload.kinds.images.options import ImageOptions, check_no_processor, is_processor
from gpuload.kinds.pairs.dataset import PairDataset
from gpuload.kinds.pairs.load import PairKind
from gpuload.kinds.training_options import TrainingDefaults
from gpuload.pipeline.run import load_given


@takes(LoadPairsKeywords, Options, TrainingDefaults, PairKind, ImageOptions)
def load_pairs(files: Any, tokenizer: Any = None, /, **options: Unpack[LoadPairsKeywords]) -> PairDataset:
    """Loads preference data as exact tokens, as TRL's trainers prepare it for DPO, reward models and KTO.

    The ids of a sequence are those of `tokenizer.apply_chat_template(prompt + completion)`. A completion begins where
    they first differ from those of the prompt with a generation prompt; for DPO, where either sequence first does.

    Examples:
        >>> import gpuload, pyarrow as pa
        >>> from gpuload.demo_data import demo_files
        >>> pairs = pa.table({"prompt": ["1 + 1 ="], "chosen": [" 2"], "rejected": [" 3"]})
        >>> gpuload.load_pairs(pairs, demo_files()[1])[0]
        {'prompt_ids': [16, 488, 220, 16, 284], 'chosen_ids': [220, 17, 151645], 'rejected_ids': [220, 18, 151645]}

    Args:
        files: as for `load`.
        tokenizer: as for `load`; for prompts with images, a processor of transformers.
        **options: see `LoadPairsKeywords`.

    Returns:
        The rows that were kept, with tokens and all other columns.

    Raises:
        OptionError: an unknown option or an invalid value.
        SourceError: a file that cannot be found, downloaded or read.
        DataError: a file with another format, or no rows left.
        TokenizerError: as for `load`; or a text needs an EOS token, and there is none.
        DeviceError: the device is not available, or has too little memory.
        HostMemoryError: the host has too little memory.
        MismatchError: with `strict=True`, a token differs from the tokenizer's.
    """
    given = options.get("tokenizer") if tokenizer is None else tokenizer
    if is_processor(given):
        from gpuload.kinds.images.pairs import ImagePairKind  # only for processors

        return load_given(ImagePairKind, files, tokenizer, options)
    check_no_processor(options, ())
    return load_given(PairKind, files, tokenizer, options)
