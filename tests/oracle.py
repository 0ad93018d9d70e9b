"""The contract, row by row: what verl's first dataset class does with pandas, the template and the tokenizer.

Written from that contract alone, as plainly as can be, to be compared with `gpuload.load` key by key.
"""

from typing import Any

import numpy as np
import pandas as pd
import torch


class RowWise:
    """Reads with pandas, filters and draws one row at a time."""

    def __init__(
        self,
        files: list[str],
        tokenizer: Any,
        *,
        prompt_key: str = "prompt",
        max_prompt_length: int = 1024,
        filter_overlong_prompts: bool = True,
        truncation: str = "error",
        return_raw_chat: bool = False,
        **template: Any,
    ):
        self.tokenizer = tokenizer
        self.prompt_key = prompt_key
        self.limit = max_prompt_length
        self.truncation = truncation
        self.return_raw_chat = return_raw_chat
        self.template = template
        # One frame per file rather than a concatenation: pandas would turn a column that one file lacks into NaN in
        # the others' rows, where the row itself simply has no value.
        frames = [pd.read_parquet(file) for file in files]
        columns = list(dict.fromkeys(name for frame in frames for name in frame.columns))
        self.rows = [
            {name: plain(row.get(name)) for name in columns} for frame in frames for row in frame.to_dict("records")
        ]
        if filter_overlong_prompts:
            self.rows = [row for row in self.rows if len(self.ids(row[prompt_key])) <= max_prompt_length]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = dict(self.rows[number])
        chat = messages(row.pop(self.prompt_key))
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **self.template)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = truncate(ids, self.limit, self.truncation)
        padding = self.tokenizer.pad_token_id
        padding = self.tokenizer.eos_token_id if padding is None else padding
        row["input_ids"] = torch.tensor([padding] * (self.limit - len(ids)) + ids)
        row["attention_mask"] = torch.tensor([0] * (self.limit - len(ids)) + [1] * len(ids))
        row["position_ids"] = torch.clip(torch.cumsum(row["attention_mask"], dim=-1) - 1, min=0)
        row["raw_prompt_ids"] = ids
        if self.return_raw_chat:
            row["raw_prompt"] = chat
        extra = row.get("extra_info") or {}
        index = extra.get("index") if isinstance(extra, dict) else None
        row["index"] = 0 if index is None else index
        return row

    def ids(self, prompt: Any) -> list[int]:
        answer = self.tokenizer.apply_chat_template(
            messages(prompt), add_generation_prompt=True, tokenize=True, return_dict=True, **self.template
        )
        return list(answer["input_ids"])


def truncate(ids: list[int], limit: int, how: str) -> list[int]:
    if len(ids) <= limit:
        return ids
    if how == "left":
        return ids[-limit:]
    if how == "right":
        return ids[:limit]
    if how == "middle":
        return ids[: limit // 2] + ids[-(limit - limit // 2) :]
    raise ValueError(f"{len(ids)} tokens are more than {limit}")


def messages(prompt: Any) -> Any:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def plain(value: Any) -> Any:
    """pandas' and NumPy's values as Python's: arrays as lists, NaN as None."""
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if value is pd.NA or value is pd.NaT or (isinstance(value, float) and np.isnan(value)):
        return None
    if isinstance(value, pd.Timestamp):
        return value.to_pydatetime()
    return value


def assert_same_row(found: dict[str, Any], expected: dict[str, Any], where: Any) -> None:
    """Same keys, values and types."""
    assert found.keys() == expected.keys(), where
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype == torch.int64, (where, key)
            assert torch.equal(found[key], value), (where, key)
        else:
            assert plain(found[key]) == value, (where, key)
            assert value is None or type(plain(found[key])) is type(value) or isinstance(value, float), (where, key)
