"""`gpuload prepare`: fills the token cache before a run."""

import json
from collections.abc import Sequence
from typing import Any

from gpuload.errors import GpuloadError, OptionError
from gpuload.load import load
from gpuload.options import NO_LIMIT


def template_kwargs(text: str) -> Any:
    """The argument `--template-kwargs`: `apply_chat_template_kwargs` as JSON.

    Raises:
        OptionError: it is not valid JSON.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise OptionError(f"--template-kwargs {text!r}: not valid JSON: {error}") from error


def prepare_files(files: Sequence[str], tokenizer: Any, **options: Any) -> None:
    """Tokenizes files, unless their tokens are cached already, and prints the report.

    Args:
        **options: of `load`.

    Raises:
        GpuloadError: some files could not be cached; the message says why.
    """
    prompts = load(
        list(files),
        tokenizer,
        max_prompt_length=NO_LIMIT,
        filter_overlong_prompts=False,
        **options,
    )
    report = prompts.report
    print(report)
    kept = {*report.from_cache, *report.into_cache}
    if missing := [name for name in report.files if name not in kept]:
        reasons = [note for note in report.notes if "not cached" in note]
        raise GpuloadError(f"{len(missing)} of {len(report.files)} files are not in the cache: {'; '.join(reasons)}")
