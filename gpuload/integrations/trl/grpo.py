"""prompts(): a dataset for TRL's `GRPOTrainer` and the other trainers that generate, without overlong prompts."""

from typing import Any

from gpuload.core.errors import DataError, GpuloadError
from gpuload.export import features_of
from gpuload.integrations.core import are_messages
from gpuload.kinds.load import load


def prompts(files: Any, tokenizer: Any, max_prompt_length: int, **options: Any) -> Any:
    """Load prompts for a trainer that generates, and drop those that are too long.

    `GRPOTrainer` of TRL 1.16 neither drops nor truncates long prompts.

    Examples:
        >>> from gpuload.demo_data import demo_files
        >>> from gpuload.integrations.trl import prompts
        >>> file, tokenizer = demo_files()
        >>> prompts(file, tokenizer, 80, max_samples=100).column_names
        ['prompt', 'data_source', 'ability', 'reward_model', 'extra_info']

    Args:
        files: As for `gpuload.load`.
        tokenizer: As for `gpuload.load`.
        max_prompt_length: Maximum length of a prompt in tokens, with the generation prompt.
        **options: Further options of `gpuload.load`. `apply_chat_template_kwargs` should be the `chat_template_kwargs`
            of `GRPOConfig`, with `tools` if the trainer has some.

    Returns:
        A `datasets.Dataset` of the rows that were kept, in their order, over the Arrow columns of the load: `prompt`,
        a list of messages, and the other columns of the files.

    Raises:
        DataError: Prompts are not messages with text, or a column has a type that `datasets` does not have.
        GpuloadError: The package `datasets` is not installed; or as for `gpuload.load`.
    """
    try:
        import datasets
        from datasets.fingerprint import Hasher
        from datasets.table import InMemoryTable
    except ImportError as error:
        raise GpuloadError("prompts for TRL need the package datasets: pip install 'gpuload[trl]'") from error
    fixed = {"max_prompt_length": max_prompt_length, "filter_overlong_prompts": True, "return_raw_chat": True}
    loaded = load(files, tokenizer, **{**options, **fixed})
    table = loaded.columns
    if not are_messages(table.schema.field("raw_prompt").type):
        raise DataError(
            f"column {loaded.options.prompt_key!r} has no messages with text: TRL renders and encodes other prompts in "
            "its own way, so pass lists of messages whose content is text"
        )
    if "prompt" in table.column_names:
        raise DataError(f"column 'prompt' exists next to prompt_key={loaded.options.prompt_key!r}: rename one of them")
    names = ["prompt" if name == "raw_prompt" else name for name in table.column_names]
    table = table.rename_columns(names)
    table = table.select(["prompt", *(name for name in names if name != "prompt")])
    table = table.cast(features_of(table.schema, datasets).arrow_schema)
    return datasets.Dataset(InMemoryTable(table), fingerprint=Hasher.hash(loaded.fingerprint))
