"""load(): prompts, and prompts with images."""

import warnings
from typing import Any, Unpack

from gpuload.core.keywords import ImageKeywords, takes
from gpuload.core.options import Options
from gpuload.kinds.images.options import ImageOptions, check_no_processor, is_processor
from gpuload.kinds.prompts import PromptDataset, PromptKind
from gpuload.kinds.served.options import ServedOptions
from gpuload.pipeline.run import load_given


@takes(ImageKeywords, Options, ServedOptions, ImageOptions, others="verl_keys")
def load(files: Any, tokenizer: Any = None, /, **options: Unpack[ImageKeywords]) -> PromptDataset:
    """Loads prompts as exact token batches.

    Every row has the tokens that `tokenizer.apply_chat_template(messages, add_generation_prompt=True)` returns for it.

    Args:
        files: a path, glob, directory or URL (s3, gs, hf, hdfs, http, ...) of .parquet, .json or .jsonl files, or a
            list of them; or a frame in memory: `pyarrow.Table`, `pandas.DataFrame`, `datasets.Dataset`,
            `cudf.DataFrame`, or another one with Arrow's C stream, such as `polars.DataFrame`.
        tokenizer: a path, a hub id, a transformers tokenizer or a `tokenizers.Tokenizer`; also as a keyword. For
            prompts with images, a processor of transformers.
        **options: see `ImageKeywords`. Other keys of verl's `data:` section are ignored.

    Returns:
        The rows that were kept, with their tokens and all other columns.

    Raises:
        OptionError: an unknown option or an invalid value.
        SourceError: a file that cannot be found, downloaded or read, or an object that is no frame.
        DataError: no prompt column, or no rows left.
        TokenizerError: a tokenizer that cannot be loaded, or has no chat template or padding token.
        DeviceError: the device is not available, or has too little memory.
        HostMemoryError: the host has too little memory.
        StoreError: the store on disk cannot be written.
        MismatchError: with `strict=True`, a token differs from the tokenizer's.

    Examples:
        >>> import gpuload
        >>> from gpuload.demo_data import demo_files
        >>> prompts = gpuload.load(*demo_files(), max_prompt_length=512, max_samples=8)
        >>> prompts.batch([0, 1])["input_ids"].shape
        torch.Size([2, 512])
    """
    given = options.get("tokenizer") if tokenizer is None else tokenizer
    if is_processor(given):
        from gpuload.kinds.images.load import ImagePromptKind  # only for processors

        return load_given(ImagePromptKind, files, tokenizer, options)
    check_no_processor(options)
    prompts = load_given(PromptKind, files, tokenizer, options)
    key = options.get("image_key")
    if key in prompts.passed_through.names:
        warnings.warn(
            f"gpuload: the images of column {key!r} are in no prompt: pass a processor (AutoProcessor.from_pretrained) "
            "in the place of the tokenizer",
            stacklevel=2,  # the line that calls `load`
        )
    return prompts
