"""SFTDataset compared with verl's own class: real conversations and real templates."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiers import SHARED, shared, shared_files

pytest.importorskip("verl.utils.dataset")

from jinja2 import TemplateError
from sft_cases import CONVERSATIONS, LONG, compare, raising_rows
from transformers import AutoTokenizer
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from gpuload.integrations.verl import SFTDataset

REAL_FILES = {
    "zh_multiturn.parquet": "prompt",
    "sgd_multiturn.parquet": "prompt",
    "bfcl_tools.parquet": "prompt",
    "wild/3nesdeniz*test.parquet": "messages",
}


@shared
@pytest.mark.parametrize("name", ["deepseek-v3", "llama3.1-instruct", "olmo2-dolma2", "qwen2.5-instruct", "qwen3"])
def test_real_conversations(name: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    for pattern, key in REAL_FILES.items():
        table = pq.read_table(shared_files(pattern)[0], columns=[key])
        spread = np.linspace(0, len(table) - 1, 12).astype(int)
        # Some files hold prompts: add an answer, so that there is a loss.
        conversations = [
            [*messages, {"role": "assistant", "content": messages[0]["content"][::-1]}]
            if messages[-1]["role"] == "user"
            else messages
            for messages in table.column(key).take(pa.array(spread)).to_pylist()
        ]
        file = str(tmp_path / "conversations.parquet")
        pq.write_table(pa.table({"messages": conversations}), file)
        dataset = compare(file, tokenizer, {**LONG, "ignore_input_ids_mismatch": True})
        # transformers 4 has it for tokenizers without a class of their own.
        assert (dataset.report is None) == ("token_type_ids" in tokenizer.model_input_names)
        assert not raising_rows(dataset)


@shared
@pytest.mark.parametrize("name", ["gemma3", "mistral-nemo"])
def test_templates_that_verl_does_not_support(name: str, write: Any) -> None:
    """These require alternating roles, but verl renders two user messages in a row."""
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    file = write({"messages": CONVERSATIONS[:1]})
    for kind in (MultiTurnSFTDataset, SFTDataset):
        with pytest.raises(TemplateError, match="must alternate"):
            kind([file], tokenizer, LONG)
