"""The sources of a load: files that are found, downloaded and opened, or a frame."""

from typing import Any

from gpuload.core.errors import DataError
from gpuload.core.options import Options
from gpuload.sources.fetch import resolve
from gpuload.sources.frames import is_frame, open_frame
from gpuload.sources.read import Source, check_column_names, check_prompts, open_file


def open_sources(files: Any, options: Options) -> list[Source]:
    """Opens files or a frame, and checks the prompt column of each."""
    sources = open_all(files, options)
    for source in sources:
        if source.num_rows:
            check_prompts(source, options.prompt_key)
    return sources


def open_all(files: Any, options: Options) -> list[Source]:
    """Opens files or a frame, unless they are a list of `Source`; a `DataError` if there are no rows, or if two columns
    have one name."""
    if isinstance(files, list) and all(isinstance(each, Source) for each in files) and files:
        sources = files
    elif is_frame(files):
        sources = [open_frame(files, type(files).__name__)]
    else:
        found = resolve(files, options.cache_dir, options.remote_timeout, read_in_place=options.store == "disk")
        sources = [open_file(file) for file in found]
    if not any(source.num_rows for source in sources):
        raise DataError(f"{', '.join(source.name for source in sources)}: no rows")
    for source in sources:
        if source.num_rows:
            check_column_names(source)
    return sources
