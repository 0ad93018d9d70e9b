"""`gpuload prepare`: fills the token cache before the run that needs it."""

import json
from collections.abc import Sequence
from typing import Any

from gpuload.cache.store import clear, folder_of
from gpuload.errors import GpuloadError, OptionError
from gpuload.load import load
from gpuload.options import Options

_NO_LIMIT = 2**31 - 1


def prepare_files(files: Sequence[str], tokenizer: Any, template_kwargs: str = "{}", **options: Any) -> None:
    """Makes the tokens of files, unless they are in the cache already, and says where they lie.

    Args:
        template_kwargs: `apply_chat_template_kwargs` as JSON: entries of other constants are other entries.
        **options: of `load`.

    Raises:
        GpuloadError: not all files could be kept; with the reasons.
    """
    try:
        kwargs = json.loads(template_kwargs)
    except ValueError as error:
        raise OptionError(f"--template-kwargs {template_kwargs!r}: not valid JSON: {error}") from error
    prompts = load(
        list(files),
        tokenizer,
        max_prompt_length=_NO_LIMIT,
        filter_overlong_prompts=False,
        apply_chat_template_kwargs=kwargs,
        **options,
    )
    report = prompts.report
    print(report)
    kept = {*report.from_cache, *report.into_cache}
    if missing := [name for name in report.files if name not in kept]:
        reasons = [note for note in report.notes if "not kept" in note]
        raise GpuloadError(f"{len(missing)} of {len(report.files)} files are not in the cache: {'; '.join(reasons)}")


def clear_cache(**options: Any) -> None:
    """Removes all entries.

    Args:
        **options: of `load`: `cache_dir`.
    """
    folder = folder_of(Options.parse(options))
    entries, nbytes = clear(folder)
    print(f"{folder}: {entries:,} entries removed, {nbytes / 1e6:,.1f} MB")
