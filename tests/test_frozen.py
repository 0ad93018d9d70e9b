"""What users get does not change when the code does: digests of rows, batches, reports and saved states.

`frozen.json` has them as they were before the package was divided into rooms. A change that is meant is recorded with
`GPULOAD_FREEZE=1 python -m pytest tests/test_frozen.py`, and said in CHANGELOG.md.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tiers import core

import gpuload
from gpuload.demo_data import demo_files

FILE = Path(__file__).with_name("frozen.json")
TOKENIZER = demo_files()[1]
WORDS = ["Hi", "é 你 👋🏽", "<|im_end|>", " a\n", "cafe\u0301", "x" * 40, "1 + 2 = 3", ""]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def conversations() -> list[list[dict[str, str]]]:
    made = []
    for k, word in enumerate(WORDS):
        turns = [user(word), assistant(WORDS[k - 1]), user(word * 2), assistant(WORDS[k - 3] + "!")]
        made.append(([{"role": "system", "content": "Be brief."}] if k % 3 == 0 else []) + turns[: 2 + 2 * (k % 2)])
    return [*made, [user("no answer")]]


def sharegpt(chat: list[dict[str, str]]) -> list[dict[str, str]]:
    names = {"user": "human", "assistant": "gpt"}
    return [{"from": names.get(turn["role"], turn["role"]), "value": turn["content"]} for turn in chat]


CHATS = conversations()
PROMPTS = [chat[:-1] for chat in CHATS[:-1]]
DATA: dict[str, list[dict[str, Any]]] = {
    "prompts": [{"prompt": prompt, "extra_info": {"index": k}, "n": k} for k, prompt in enumerate(PROMPTS)],
    "plain prompts": [{"prompt": word, "n": k} for k, word in enumerate(WORDS)],
    "messages": [{"messages": chat, "n": k} for k, chat in enumerate(CHATS)],
    "sharegpt": [{"conversations": sharegpt(chat), "n": k} for k, chat in enumerate(CHATS)],
    "completions": [{"prompt": prompt, "completion": chat[-1:]} for prompt, chat in zip(PROMPTS, CHATS, strict=False)],
    "plain completions": [{"prompt": word, "completion": WORDS[k - 1] + "."} for k, word in enumerate(WORDS)],
    "alpaca": [
        {"instruction": word + "?", "input": WORDS[k - 1], "output": WORDS[k - 2] + ".", "system": "s" * (k % 2)}
        for k, word in enumerate(WORDS)
    ],
    "text": [{"text": word + " end", "n": k} for k, word in enumerate(WORDS)],
    "pairs": [
        {"prompt": prompt, "chosen": chat[-1:], "rejected": [assistant(WORDS[k - 5])], "n": k}
        for k, (prompt, chat) in enumerate(zip(PROMPTS, CHATS, strict=False))
    ],
    "implicit pairs": [
        {"chosen": chat, "rejected": [*chat[:-1], assistant("No" * k)], "margin": k / 2}
        for k, chat in enumerate(CHATS[:-1])
    ],
    "plain pairs": [
        {"prompt": word, "chosen": WORDS[k - 1] + "a", "rejected": WORDS[k - 2] + "b"} for k, word in enumerate(WORDS)
    ],
    "labels": [
        {"prompt": prompt, "completion": chat[-1:], "label": k % 2 == 0}
        for k, (prompt, chat) in enumerate(zip(PROMPTS, CHATS, strict=False))
    ],
}  # fmt: skip

MORE: list[dict[str, Any]] = [{}, {"max_length": 40}, {"max_length": 30, "overlong": "keep_start"}]
MORE += [{"max_length": 30, "overlong": "keep_end"}, {"max_samples": 5, "shuffle": True, "seed": 3}]
PROMPT_OPTIONS: list[dict[str, Any]] = [{}, {"max_prompt_length": 40}, {"max_samples": 5, "shuffle": True, "seed": 3}]
PROMPT_OPTIONS += [{"max_prompt_length": 30, "filter_overlong_prompts": False, "truncation": "middle"}]
PROMPT_OPTIONS += [{"return_raw_chat": True, "return_full_prompt": True}]
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *(("load", "prompts", options) for options in PROMPT_OPTIONS),
    *(("load", "plain prompts", options | {"chat_template": None}) for options in PROMPT_OPTIONS[:3]),
    *(("load_chats", name, options) for name in ("messages", "completions", "plain completions") for options in MORE),
    *(("load_chats", name, {}) for name in ("sharegpt", "alpaca", "text")),
    *(("load_chats", "messages", {"loss_on": loss}) for loss in ("last", "all")),
    *(("load_chats", "completions", {"loss_on": loss}) for loss in ("assistant", "all")),
    *(("load_pairs", "pairs", options) for options in MORE),
    *(("load_pairs", "pairs", options | {"objective": "kto", "kl_batch_size": 3}) for options in MORE),
    *(("load_pairs", "implicit pairs", {"objective": objective}) for objective in ("dpo", "rm", "kto")),
    *(("load_pairs", "plain pairs", {"objective": objective}) for objective in ("dpo", "rm", "kto")),
    ("load_pairs", "labels", {}),
]  # fmt: skip


def name_of(case: tuple[str, str, dict[str, Any]]) -> str:
    load, data, options = case
    return f"{load} {data} {json.dumps(options)}" if options else f"{load} {data}"


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(plain(value), ensure_ascii=True).encode()).hexdigest()[:12]


def plain(value: Any) -> Any:
    """Tensors, arrays and mappings as lists."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return [str(value.dtype), list(value.shape), value.tolist()]
    if hasattr(value, "keys"):
        return [[key, plain(value[key])] for key in value]
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def digests_of(load: str, data: str, options: dict[str, Any]) -> dict[str, str]:
    table = pa.Table.from_pylist(DATA[data])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        rows = getattr(gpuload, load)(table, TOKENIZER, progress=False, device="cpu", **options)
    loader = rows.loader(batch_size=2, shuffle=True, seed=7)
    batches = iter(loader)
    first = next(batches)
    state = loader.state_dict()
    made = {
        "ids": digest([rows.tokens.values, rows.tokens.offsets]),
        "rows": digest(rows[:]),
        "columns": digest(rows.columns.to_pydict()),
        "batches": digest([first, *batches]),
        "origins": digest(rows.origins),
        "report": digest([rows.report.rows_read, rows.report.rows_kept, rows.report.overlong, rows.report.rejected]),
        "state": digest(state),
    }
    if load != "load":
        made["arrow"] = digest(rows.to_arrow().read_all().to_pydict())
    if load == "load_chats":
        made["marks"] = digest(rows.loss_mask.values)
        made["packs"] = digest(list(rows.loader(batch_size=1, packing="bfd", pack_length=64)))
    if load == "load_pairs":
        made["marks"] = digest(rows.parts.values)
    return made


NAMED = {name_of(case): case for case in CASES}


@pytest.mark.parametrize("name", core(NAMED, *list(NAMED)[::3]))
def test_what_users_get_is_as_it_was(name: str) -> None:
    found = digests_of(*NAMED[name])
    if os.environ.get("GPULOAD_FREEZE"):
        known = json.loads(FILE.read_text()) if FILE.exists() else {}
        FILE.write_text(json.dumps(known | {name: found}, indent=1, ensure_ascii=False) + "\n")
    assert json.loads(FILE.read_text())[name] == found


def test_every_digest_belongs_to_a_case() -> None:
    assert set(json.loads(FILE.read_text())) == set(NAMED)
