"""The shipped demo data: GSM8K's prompts, and Qwen2.5's tokenizer. Sources and licences: SOURCE.md."""

import lzma
import os
import shutil
from importlib import resources
from pathlib import Path

from gpuload.core.errors import StoreError
from gpuload.core.files import cache_root, replacing


def demo_files() -> tuple[str, str]:
    """Paths of the shipped dataset, and of the shipped tokenizer's directory, unpacked once into the cache.

    Raises:
        StoreError: the cache directory cannot be written.

    Examples:
        >>> file, tokenizer = demo_files()
        >>> file.endswith("gsm8k.parquet")
        True
    """
    data = Path(str(resources.files("gpuload.demo_data")))
    directory = cache_root() / "demo" / "qwen2.5"
    wanted = directory / "tokenizer.json"
    if not os.path.exists(wanted):
        tokenizer = lzma.decompress((data / "qwen2.5" / "tokenizer.json.xz").read_bytes())
        try:
            directory.mkdir(parents=True, exist_ok=True)
            shutil.copy(data / "qwen2.5" / "tokenizer_config.json", directory)
            with replacing(wanted) as unpacked:
                unpacked.write_bytes(tokenizer)
        except OSError as error:
            reason = error.strerror or error
            raise StoreError(
                f"{directory}: the demo's tokenizer cannot be written ({reason}): set GPULOAD_CACHE to a directory "
                "that can be"
            ) from error
    return str(data / "gsm8k.parquet"), str(directory)
