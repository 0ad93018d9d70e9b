"""All tables of a compiled tokenizer, and the functions that build them.

What the tables mean, step by step, is written down as a plain-Python encoder in `tests/simulator/encoder.py`; the
kernels of the device engine do the same.
"""

from dataclasses import dataclass

from gpuload.tokenizer.fallback import FallbackTables, fallback_tables
from gpuload.tokenizer.merges import MergeTables, merge_tables
from gpuload.tokenizer.regex import UnsupportedRegexError
from gpuload.tokenizer.spec import BpeSpec, bpe_spec
from gpuload.tokenizer.splitter import Splitter, compile_splitter


@dataclass(frozen=True)
class CompiledTokenizer:
    """A tokenizer as tables."""

    spec: BpeSpec  # what the tables were built from
    splitter: Splitter  # the pre-tokenizer
    tables: MergeTables | FallbackTables  # vocabulary and merges


def compile_tokenizer(model_json: str) -> CompiledTokenizer | str:
    """Compile a tokenizer.

    Args:
        model_json: the result of `tokenizers.Tokenizer.to_str()`.

    Returns:
        The tables, or one sentence why the tokenizer is not supported.
    """
    spec = bpe_spec(model_json)
    if isinstance(spec, str):
        return spec
    try:
        return compile_spec(spec)
    except UnsupportedRegexError as error:
        return f"the split regex is not supported: {error}"


def compile_spec(spec: BpeSpec) -> CompiledTokenizer:
    """Build all tables of a tokenizer.

    Raises:
        UnsupportedRegexError: a split regex contains an unsupported construct.
    """
    tables = fallback_tables(spec) if spec.fallback else merge_tables(spec)
    return CompiledTokenizer(spec, compile_splitter(spec.stages), tables)
