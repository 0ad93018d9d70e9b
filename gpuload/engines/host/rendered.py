"""What rendering gives, whichever way it went."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.arrays import Ragged


@dataclass
class Rendered:
    """A column of prompts as text.

    Attributes:
        text: (n,) large_string; null where a row was rejected.
        rejected: row → why.
        compiled_rows: how many rows went through the compiled template.
        reference_rows: how many transformers rendered, one by one.
        reasons: why rows took the reference, and how many each.
        ids: n rows of token ids, where rendering and encoding were one step.
    """

    text: pa.LargeStringArray
    rejected: dict[int, str] = field(default_factory=dict)
    compiled_rows: int = 0
    reference_rows: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    ids: Ragged | None = None

    @property
    def nbytes(self) -> int:
        """Of the texts, without Arrow's offsets."""
        return int(pc.sum(pc.binary_length(self.text)).as_py() or 0)

    @property
    def sizes(self) -> np.ndarray[Any, Any]:
        """(n,) bytes of each text, -1 for a row that was rejected."""
        return np.asarray(pc.fill_null(pc.binary_length(self.text), -1))

    @property
    def wide(self) -> np.ndarray[Any, Any]:
        """(n,) bool, true for a text that is not all ASCII."""
        characters = np.asarray(pc.fill_null(pc.utf8_length(self.text), -1))
        return np.asarray(self.sizes != characters)
