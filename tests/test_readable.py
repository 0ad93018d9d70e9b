"""What people read of datasets, batches, loaders and reports, in Python and in notebooks."""

import json
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import gpuload
from gpuload.core.errors import DataError, GpuloadError, OptionError

HOSTILE = '<script>alert("x")</script>\u202e'


@pytest.fixture(scope="module")
def prompts(gsm8k: str, qwen_folder: str) -> Any:
    return gpuload.load(gsm8k, qwen_folder, max_samples=40, progress=False)


@pytest.fixture(scope="module")
def pairs(qwen_folder: str) -> pa.Table:
    names = ("prompt", "chosen", "rejected")
    return pa.table({name: [f"{name} {k}" * (k + 1) for k in range(6)] for name in names})


@pytest.mark.parametrize("objective", ["dpo", "rm", "kto"])
def test_selected_pairs_are_the_pairs(pairs: pa.Table, qwen_folder: str, objective: Any) -> None:
    whole = gpuload.load_pairs(pairs, qwen_folder, objective=objective, progress=False)
    rows = [4, 0, -1, 2]
    some = whole.select(rows)
    own = ("KL_completion_ids",)  # of a neighbour
    for row, other in zip(rows, some, strict=False):
        assert {k: v for k, v in other.items() if k not in own} == {k: v for k, v in whole[row].items() if k not in own}
        assert some.decode(rows.index(row)) == whole.decode(row)
    assert some.lengths.tolist() == whole.lengths[rows].tolist()
    assert some.batch([0, 1], padding="max_length")["input_ids"].equal(
        torch.cat(
            [whole.batch([r], padding="max_length")["input_ids"][k::2] for k in (0, 1) for r in rows[:2]]
            if objective != "kto"
            else [whole.batch([r], padding="max_length")["input_ids"] for r in rows[:2]]
        )
    )


def test_selected_prompts_are_the_prompts(prompts: Any) -> None:
    first = prompts.fingerprint
    some = prompts.select(slice(30, None, 3))
    again = some.select([1, 0])
    assert [again[k]["raw_prompt_ids"] for k in (0, 1)] == [prompts[k]["raw_prompt_ids"] for k in (33, 30)]
    assert [again[k]["extra_info"] for k in (0, 1)] == [prompts[k]["extra_info"] for k in (33, 30)]
    assert again.origins.tolist() == prompts.origins[[33, 30]].tolist()
    assert again.tokens.to_lists() == [prompts[k]["raw_prompt_ids"] for k in (33, 30)]
    assert again.fingerprint != first
    assert prompts.fingerprint == first
    state = some.loader(2).state_dict()
    with pytest.raises(gpuload.GpuloadError, match="other data"):
        prompts.loader(2).load_state_dict(state)
    with pytest.raises(IndexError):
        prompts.select([40])


def test_selected_chats_keep_loss_and_weights(qwen_folder: str) -> None:
    def row(k: int) -> list[dict[str, Any]]:
        answers = [{"role": "assistant", "content": f"{n}", "weight": n / 2} for n in range(3)]
        return [message for answer in answers for message in ({"role": "user", "content": f"{k}"}, answer)]

    chats = gpuload.load_chats(pa.table({"messages": [row(k) for k in range(4)]}), qwen_folder, progress=False)
    some = chats.select(np.array([3, 1]))
    assert some[:] == chats[[3, 1]]
    assert some.column_names == some.to_arrow().schema.names == ["input_ids", "labels", "loss_weight"]
    packed = next(iter(some.loader(1, packing="bfd", pack_length=4096)))
    assert int((packed["labels"] >= 0).sum()) > 0


def test_tokens_and_texts(prompts: Any, qwen: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert prompts.decode(-1) == qwen.decode(prompts[-1]["raw_prompt_ids"])
    prompts.show(np.int64(3))
    first, second, *lines = capsys.readouterr().out.splitlines()
    assert first.endswith("gsm8k.parquet row 3")
    assert second == f"prompt: {len(prompts[3]['raw_prompt_ids'])} tokens"
    assert "".join(lines).count("][") + len(lines) == len(prompts[3]["raw_prompt_ids"])
    assert max(map(len, lines)) <= 80
    frame = prompts.to_pandas()
    assert list(frame.columns) == prompts.column_names
    assert frame["raw_prompt_ids"][3].tolist() == prompts[3]["raw_prompt_ids"]
    for call in (prompts.decode, prompts.show):
        with pytest.raises(IndexError):
            call(40)
    elsewhere = pickle.loads(pickle.dumps(prompts))
    assert elsewhere[3]["raw_prompt_ids"] == prompts[3]["raw_prompt_ids"]
    assert "openai/gsm8k" in elsewhere._repr_html_()
    with pytest.raises(GpuloadError, match="decode: a copy, or a dataset in another process"):
        elsewhere.decode(0)


def test_columns_that_pandas_does_not_have(qwen_folder: str) -> None:
    ids = pa.ListArray.from_arrays([0, 1], pa.array([bytes(16)], pa.uuid()))
    prompts = gpuload.load(pa.table({"prompt": ["a"], "ids": ids}), qwen_folder, progress=False)
    with pytest.raises(DataError, match=r"column 'ids' of type list<.*uuid>> cannot be converted to pandas \(Not impl"):
        prompts.to_pandas()
    assert prompts.to_arrow().read_all()["ids"].to_pylist() == prompts.take(["ids"])["ids"]


def test_notebooks_show_no_markup_of_the_data(qwen_folder: str) -> None:
    table = pa.table({"prompt": [HOSTILE, "b"], HOSTILE: [[HOSTILE], None]})
    prompts = gpuload.load(table, qwen_folder, progress=False)
    batch = prompts.batch([0, 1])
    before = batch._repr_html_()
    assert "not read yet" in before
    assert batch[HOSTILE][0] == [HOSTILE]
    for html in (prompts._repr_html_(), before, batch._repr_html_(), prompts.report._repr_html_()):
        assert "<script" not in html
        assert "\u202e" not in html
        assert html.count("<table>") == html.count("</table>") == 1
    assert "&lt;script&gt;" in prompts._repr_html_()
    assert "(2, 1024) int64" in before


def test_batches_move_to_a_device(prompts: Any) -> None:
    batch = prompts.batch([0, 1])
    moved = batch.to("meta")
    assert moved["input_ids"].device.type == "meta"
    assert batch["input_ids"].device.type == "cpu"
    assert moved["data_source"].tolist() == ["openai/gsm8k"] * 2
    assert type(pickle.loads(pickle.dumps(batch))) is type(batch)


def test_reports_are_tables_and_data(prompts: Any) -> None:
    assert repr(prompts.report) == str(prompts.report)
    about = json.loads(json.dumps(prompts.report.to_dict()))
    assert (about["rows_kept"], about["check"]["mismatches"]) == (40, [])
    html = prompts.report._repr_html_()
    for name in ("tokens", "engine", "verified"):
        assert f">{name}</td>" in html


def test_loaders_say_what_they_yield(prompts: Any) -> None:
    text = repr(prompts.loader(16, padding="longest", shuffle=True, seed=7))
    assert text.startswith("PromptLoader(3 batches, batch_size=16, shuffle=True, seed=7, ")
    assert text.endswith("padding='longest')")


@pytest.mark.parametrize("load", [gpuload.load, gpuload.load_chats, gpuload.load_pairs])
def test_options_of_loaders_are_named(load: Any, gsm8k: str) -> None:
    with pytest.raises(OptionError, match=r"batch_size is an option of batches.*\.loader\(batch_size=\.\.\.\)"):
        load(gsm8k, "nowhere", batch_size=8)
