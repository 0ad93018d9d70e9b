"""load_chats(): data for SFT, without and with images."""

from typing import Any, Unpack

from gpuload.core.keywords import LoadChatsKeywords, takes
from gpuload.core.options import Options
from gpuload.kinds.chats.dataset import ChatDataset
from gpuload.kinds.chats.load import ChatKind
from gpuload.kinds.images.options import ImageOptions, check_no_processor, is_processor
from gpuload.kinds.training_options import TrainingDefaults
from gpuload.pipeline.run import load_given


@takes(LoadChatsKeywords, Options, TrainingDefaults, ChatKind, ImageOptions)
def load_chats(files: Any, tokenizer: Any = None, /, **options: Unpack[LoadChatsKeywords]) -> ChatDataset:
    """Loads data for SFT as exact tokens, with a loss mask.

    The ids of a conversation are those of `tokenizer.apply_chat_template(messages)`. For a template with
    `{% generation %}` blocks the mask is that of `return_assistant_tokens_mask=True`; for other templates it has the
    answers of assistants, see `gpuload.template.answers`. What stands for images in the ids is never learned.

    Examples:
        >>> import gpuload, pyarrow as pa
        >>> from gpuload.demo_data import demo_files
        >>> messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
        >>> chats = gpuload.load_chats(pa.table({"messages": [messages]}), demo_files()[1])
        >>> chats
        ChatDataset(1 row, 37 tokens, 4 with loss)

    Args:
        files: as for `load`.
        tokenizer: as for `load`; for conversations with images, a processor of transformers.
        **options: see `LoadChatsKeywords`.

    Returns:
        The rows that were kept, with tokens, loss mask and all other columns.

    Raises:
        OptionError: an unknown option or an invalid value.
        SourceError: a file that cannot be found, downloaded or read.
        DataError: a file with another format, or no rows left.
        TokenizerError: as for `load`; or it is unknown where an answer begins in what the template renders.
        DeviceError: the device is not available, or has too little memory.
        HostMemoryError: the host has too little memory.
        StoreError: the store on disk cannot be written.
        MismatchError: with `strict=True`, a token or its loss differs from the tokenizer's.
    """
    given = options.get("tokenizer") if tokenizer is None else tokenizer
    if is_processor(given):
        from gpuload.kinds.images.chats import ImageChatKind  # only for processors

        return load_given(ImageChatKind, files, tokenizer, options)
    check_no_processor(options, ())
    return load_given(ChatKind, files, tokenizer, options)
