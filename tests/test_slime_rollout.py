"""slime's own rollouts over the data source: which ids are sent, and how often anything is tokenized."""

import asyncio
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
from slime_cases import arguments, rows, write
from tiers import SHARED, shared
from tokenizers.processors import ByteLevel
from transformers import AutoTokenizer

REPOSITORY = os.environ.get("SLIME_REPO", "")
if not REPOSITORY:
    pytest.skip("needs a checkout of slime: SLIME_REPO=<folder> make trainers-test", allow_module_level=True)
sys.path.insert(0, REPOSITORY)
sys.modules.setdefault("ray", ModuleType("ray"))

from slime.rollout import sft_rollout as slime_sft  # noqa: E402
from slime.rollout import sglang_rollout  # noqa: E402
from slime.rollout.data_source import RolloutDataSourceWithBuffer  # noqa: E402
from slime.utils import processing_utils  # noqa: E402
from slime.utils.mask_utils import MultiTurnLossMaskGenerator  # noqa: E402

from gpuload.integrations.known_code import change  # noqa: E402
from gpuload.integrations.slime import DataSource, preparation, sft_rollout  # noqa: E402


class Counted:
    """A tokenizer whose calls are counted."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("encode", "apply_chat_template"):
            self.calls.append(name)
        return getattr(self.tokenizer, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls.append("__call__")
        return self.tokenizer(*given, **named)


# -- generation --------------------------------------------------------------------------------------------------------


def generated(
    args: Any, source: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[Any], list[str]]:
    """Two steps of slime's rollout with an endpoint that answers with three tokens.

    Returns:
        The samples, the ids that were sent, and the calls of the tokenizer.
    """
    counted, sent = Counted(tokenizer), []

    async def post(url: str, payload: dict[str, Any], headers: Any = None) -> dict[str, Any]:
        sent.append(list(payload["input_ids"]))
        meta = {"output_token_logprobs": [(-0.5, 7), (-0.25, 8), (-1.0, 9)], "finish_reason": {"type": "stop"}}
        return {"text": "abc", "meta_info": {**meta, "weight_version": "0"}}

    async def reward(args: Any, sample: Any) -> float:
        return float(len(sample.tokens))

    async def nothing(args: Any, rollout_id: int) -> list[Any]:
        return []

    monkeypatch.setattr(sglang_rollout, "load_tokenizer", lambda *given, **named: counted)
    monkeypatch.setattr(sglang_rollout, "load_processor", lambda *given, **named: None)
    monkeypatch.setattr(sglang_rollout, "get_rollout_num_engines", lambda args: 1)
    monkeypatch.setattr(sglang_rollout, "post", post)
    monkeypatch.setattr(sglang_rollout, "async_rm", reward)
    monkeypatch.setattr(sglang_rollout, "abort", nothing)
    monkeypatch.setattr(type(sglang_rollout.GenerateState), "_instances", {}, raising=False)
    samples = []
    for step in range(2):
        output, _ = asyncio.run(sglang_rollout.generate_rollout_async(args, step, source.get_samples))
        samples += [sample for group in output.samples for sample in group]
    return samples, sent, counted.calls


def test_prompts_are_not_tokenized_in_a_rollout(
    tmp_path: Path, qwen_folder: str, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(
        write(tmp_path / "a.parquet", rows()), qwen_folder, label_key="label", n_samples_per_prompt=4,
        rollout_batch_size=8, over_sampling_batch_size=8, rollout_shuffle=True, rollout_max_prompt_len=100,
        rollout_temperature=1.0, rollout_top_p=1.0, rollout_top_k=-1, rollout_max_response_len=16, rollout_stop=None,
        rollout_stop_token_ids=None, rollout_skip_special_tokens=False, sglang_server_concurrency=8, sglang_dp_size=1,
        sglang_router_ip="localhost", sglang_router_port=1, ci_test=True, use_rollout_routing_replay=False,
        partial_rollout=False, mask_offpolicy_in_partial_rollout=False, group_rm=False,
        custom_generate_function_path=None, dynamic_sampling_filter_path=None, rollout_sample_filter_path=None,
        rollout_all_samples_process_path=None, rollout_sample_hook_path=None, reward_key=None,
    )  # fmt: skip
    found = {}
    for kind in (RolloutDataSourceWithBuffer, DataSource):
        found[kind] = generated(args, kind(args), qwen, monkeypatch)
    theirs, ours = found[RolloutDataSourceWithBuffer], found[DataSource]
    count = 2 * 8 * 4
    assert len(theirs[0]) == len(ours[0]) == count
    assert theirs[2] == ["encode"] * count
    assert ours[2] == []
    assert sorted(ours[1]) == sorted(theirs[1])
    for sample in (*theirs[0], *ours[0]):
        sample.session_id = None
        for name in ("trace", "_trace"):
            vars(sample).pop(name, None)
    in_order = [sorted((sample.index, sample.tokens, sample.loss_mask, sample.reward) for sample in samples)
                for samples in (theirs[0], ours[0])]  # fmt: skip
    assert in_order[0] == in_order[1]


# -- SFT ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _without_state() -> Iterator[None]:
    """slime keeps its tokenizer and its mask generator in globals."""
    yield
    slime_sft.TOKENIZER = slime_sft.PROCESSOR = slime_sft.MASK_GENERATOR = None


TEMPLATE = """{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(params=["qwen", "qwen3"])
def model(request: pytest.FixtureRequest, qwen_folder: str, tmp_path: Path) -> dict[str, str]:
    """A tokenizer and its loss mask. With qwen3, slime supports only templates without a system prompt of their own."""
    if request.param == "qwen":
        return {"folder": qwen_folder, "loss_mask_type": "qwen"}
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    return {"folder": str(tmp_path / "model"), "loss_mask_type": "qwen3"}


def conversations(count: int = 30, tool_calls: bool = False) -> list[dict[str, Any]]:
    chosen = random.Random(3)
    made = []
    for row in rows(count):
        messages = [*row["prompt"], {"role": "assistant", "content": "It is 21."}]
        if chosen.random() < 0.5:
            messages += [{"role": "tool", "content": f"{number}"} for number in range(chosen.randrange(3))]
            messages += [{"role": "user", "content": " And 東京? "}, {"role": "assistant", "content": "\n\nYes. 🙂 "}]
        if chosen.random() < 0.2:
            messages.append({"role": "assistant", "content": ""})
        made.append({**row, "prompt": messages})
    return made


def check_sft(path: str, folder: str, learned: bool = True, **changed: Any) -> list[str]:
    """Compares all steps of an epoch with slime's rollout. Returns the calls of the tokenizer in ours."""
    args = arguments(
        path, folder, apply_chat_template=False, n_samples_per_prompt=1, rollout_batch_size=7, rollout_shuffle=True,
        rollout_function_path="gpuload.integrations.slime.sft_rollout", **{"loss_mask_type": "qwen"} | changed,
    )  # fmt: skip
    theirs, ours = RolloutDataSourceWithBuffer(args), DataSource(args)
    steps = range(len(theirs) // 7 + 1)
    expected = [slime_sft.generate_rollout(args, step, theirs) for step in steps]
    counted = Counted(slime_sft.TOKENIZER)
    slime_sft.MASK_GENERATOR.tokenizer = counted
    assert repr([sft_rollout(args, step, ours) for step in steps]) == repr(expected)
    assert any(sum(group[0].loss_mask) for groups in expected for group in groups) == learned
    return counted.calls


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_sft(kind: str, model: dict[str, str], tmp_path: Path) -> None:
    path = write(tmp_path / f"a.{kind}", conversations())
    assert check_sft(path, **model) == []


def test_sft_of_prompts_that_became_texts(model: dict[str, str], tmp_path: Path) -> None:
    args = arguments(
        write(tmp_path / "a.jsonl", conversations()), model["folder"], apply_chat_template=True, n_samples_per_prompt=1,
        rollout_batch_size=2, rollout_function_path="gpuload.integrations.slime.sft_rollout", loss_mask_type="qwen",
    )  # fmt: skip
    raised = []
    for rollout, source in ((slime_sft.generate_rollout, RolloutDataSourceWithBuffer), (sft_rollout, DataSource)):
        with pytest.raises(TypeError) as error:
            rollout(args, 0, source(args))
        raised.append(str(error.value))
    assert raised[0] == raised[1]


def test_masks_of_code_that_is_not_known(
    model: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    generator = MultiTurnLossMaskGenerator
    methods = generator.__init__, generator.get_loss_mask, generator.get_response_lengths
    assert change("slime", preparation.KNOWN, *methods, slime_sft.generate_rollout) is None
    known = {place: seen for place, seen in preparation.KNOWN.items() if place.startswith("slime.utils.data")}
    monkeypatch.setattr(preparation, "KNOWN", known)
    assert check_sft(write(tmp_path / "a.parquet", conversations()), **model) == []
    (line,) = [message for message in caplog.messages if "has changed" in message]
    assert line.endswith("MultiTurnLossMaskGenerator.__init__ has changed; 30 rows prepared by both are equal: used")


@pytest.mark.parametrize("masks", [(1, 0, None), ("1", "0", None)], ids=["numbers", "texts"])
def test_sft_with_tools_and_step_masks(model: dict[str, str], tmp_path: Path, masks: tuple[Any, ...]) -> None:
    given = conversations()
    for number, row in enumerate(given):
        name = "add" if number % 2 else "subtract"
        row["tools"] = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]
        for place, message in enumerate(row["prompt"]):
            message["step_loss_mask"] = masks[(number + place) % 3]
    path = write(tmp_path / "a.parquet", given)
    assert check_sft(path, **model, learned=masks[0] == 1, tool_key="tools") == []


def thoughts(count: int = 40) -> list[dict[str, Any]]:
    """Conversations with what the masks of whole conversations look for, in answers and elsewhere."""
    texts = [
        "<think>\n\n</think>\n\nIt is 21.",
        "\nÄ<|im_end|>",
        "",
        "東京 🙂\n\n",
        "<think>",
        "<|im_start|>assistant\nx",
    ]
    made = conversations(count)
    for number, row in enumerate(made):
        for place, message in enumerate(row["prompt"]):
            if message["role"] == "assistant" or (number + place) % 5 == 0:
                message["content"] = texts[(number + place) % len(texts)]
            message["step_loss_mask"] = [1, 1, 0, None][(number + 2 * place) % 4]
    return made


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("kind", ["qwen3_5", "distill_qwen", "qwen"])
def test_sft_of_whole_conversations(kind: str, template: str | None, tmp_path: Path, qwen_folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    tokenizer.chat_template = template or tokenizer.chat_template
    if kind == "qwen":
        tokenizer.add_tokens(["<｜Assistant｜>"])
    tokenizer.save_pretrained(tmp_path / "model")
    path = write(tmp_path / "a.parquet", thoughts())
    assert check_sft(path, str(tmp_path / "model"), loss_mask_type=kind) == []


@pytest.mark.parametrize("place", ["column", "metadata"])
@pytest.mark.parametrize("kind", ["qwen", "qwen3_5", "distill_qwen"])
def test_sft_of_rows_with_their_own_tools(kind: str, place: str, tmp_path: Path, qwen_folder: str) -> None:
    given = conversations(40)
    for number, row in enumerate(given):
        tools = [{"type": "function", "function": {"name": "fgf"[number % 3], "parameters": {"type": "object"}}}]
        if place == "column":
            row["tools"] = tools
        elif number % 2:
            row["metadata"]["tools"] = tools
    path = write(tmp_path / "a.parquet", given)
    key = "tools" if place == "column" else None
    assert check_sft(path, qwen_folder, loss_mask_type=kind, tool_key=key) == []


@pytest.mark.parametrize("kind", ["qwen", "qwen3_5", "distill_qwen"])
def test_sft_of_single_rows_that_differ(
    kind: str, tmp_path: Path, qwen_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One row with tools and one that cannot be rendered: only the second one is slime's."""
    given = conversations(40)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    given[3]["metadata"]["tools"] = [tool]
    given[7]["prompt"] = [{"role": "user", "content": None}]
    args = arguments(
        write(tmp_path / "a.parquet", given), qwen_folder, apply_chat_template=False, n_samples_per_prompt=1,
        loss_mask_type=kind, rollout_function_path="gpuload.integrations.slime.sft_rollout",
    )  # fmt: skip
    samples = DataSource(args).get_samples(40)
    assert "gpuload: 1 of 40 conversations are tokenized by slime, at each step" in caplog.messages
    generator = MultiTurnLossMaskGenerator(AutoTokenizer.from_pretrained(qwen_folder), kind)
    for number, (sample,) in enumerate(samples):
        if number == 7:
            assert sample.tokens == []
            continue
        ids, mask = generator.get_loss_mask(sample.prompt, sample.metadata.get("tools"))
        assert sample.tokens == ids
        assert sample.loss_mask == mask[-sample.response_length :]


def rows_by_slime(given: Any, folder: str, kind: str, tmp_path: Path) -> list[int]:
    """The conversations that have no ids before slime's rollout makes them."""
    args = arguments(
        write(tmp_path / "a.parquet", given), folder, apply_chat_template=False, n_samples_per_prompt=1,
        loss_mask_type=kind, rollout_function_path="gpuload.integrations.slime.sft_rollout",
    )  # fmt: skip
    return [row for row, (sample,) in enumerate(DataSource(args).get_samples(len(given))) if not sample.tokens]


def saved(qwen_folder: str, folder: Path, template: str | None = None, trims: bool = False) -> str:
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    tokenizer.chat_template = template or tokenizer.chat_template
    if trims:
        tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["qwen", "qwen3_5"])
def test_sft_with_tools_that_are_no_list_of_objects(kind: str, tmp_path: Path, qwen_folder: str) -> None:
    given = conversations(20)
    for number, row in enumerate(given):
        row["metadata"] = {"tools": ["f"] if number % 4 == 1 else None}
    assert rows_by_slime(given, qwen_folder, kind, tmp_path) == [1, 5, 9, 13, 17]


def test_sft_of_turns_that_are_shorter_than_a_generation_prompt(tmp_path: Path, qwen_folder: str) -> None:
    empty = TEMPLATE.replace("{% for message in messages %}", "{% for message in messages if message.content %}")
    given = [row for row in conversations(40) if all(message["content"] for message in row["prompt"])]
    given[3]["prompt"].append({"role": "assistant", "content": ""})
    assert rows_by_slime(given, saved(qwen_folder, tmp_path / "model", empty), "qwen", tmp_path) == [3]


def test_sft_with_offsets_that_are_trimmed(tmp_path: Path, qwen_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    given = conversations(12)
    folder = saved(qwen_folder, tmp_path / "model", trims=True)
    assert rows_by_slime(given, folder, "qwen3_5", tmp_path) == list(range(12))
    start = "gpuload: falls back to slime's SFT rollout, which tokenizes at each step: "
    why = "the tokenizer trims white space from offsets, which decide about slime's loss mask"
    assert f"{start}{why}" in caplog.messages
    assert rows_by_slime(given, folder, "distill_qwen", tmp_path) == []


@pytest.mark.parametrize("kind", ["qwen3_5", "distill_qwen"])
def test_sft_with_a_tokenizer_that_changes_how_texts_are_encoded(
    kind: str, tmp_path: Path, qwen_folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = processing_utils.load_tokenizer

    def loaded(*given: Any, **named: Any) -> Any:
        tokenizer = load(*given, **named)

        class Own(type(tokenizer)):  # type: ignore[misc]
            def apply_chat_template(self, conversation: Any, *given: Any, **named: Any) -> Any:
                return super().apply_chat_template(conversation, *given, **named)

        tokenizer.__class__ = Own
        return tokenizer

    monkeypatch.setattr(processing_utils, "load_tokenizer", loaded)
    assert rows_by_slime(conversations(12), qwen_folder, kind, tmp_path) == list(range(12))
    start = "gpuload: falls back to slime's SFT rollout, which tokenizes at each step: "
    assert f"{start}the tokenizer class changes how texts are encoded" in caplog.messages


def test_sft_of_rows_without_markers(tmp_path: Path, qwen_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.parquet", conversations(16))
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    args = arguments(
        path, str(tmp_path / "model"), apply_chat_template=False, n_samples_per_prompt=1, loss_mask_type="qwen3_5",
        rollout_function_path="gpuload.integrations.slime.sft_rollout",
    )  # fmt: skip
    DataSource(args)
    assert "gpuload: 16 of 16 conversations are tokenized by slime, at each step" in caplog.messages


def test_sft_that_falls_back(tmp_path: Path, qwen_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    given = conversations(16)
    given[3]["prompt"][-1]["step_loss_mask"] = 0
    assert check_sft(write(tmp_path / "a.jsonl", given), qwen_folder)
    start = "gpuload: falls back to slime's SFT rollout, which tokenizes at each step: "
    assert f"{start}column 'prompt' is not messages with text" in caplog.messages


@shared
@pytest.mark.parametrize(("tokenizer", "loss_mask_type"), [("qwen3", "qwen3"), ("qwen2.5-instruct", "qwen")])
@pytest.mark.parametrize("name", ["zh_multiturn", "sgd_multiturn"])
def test_sft_of_real_conversations(name: str, tokenizer: str, loss_mask_type: str, tmp_path: Path) -> None:
    path = str(tmp_path / "some.parquet")
    pq.write_table(pq.read_table(SHARED / "datasets" / f"{name}.parquet").slice(0, 60), path)
    folder = str(SHARED / "tokenizers" / tokenizer)
    assert check_sft(path, folder, loss_mask_type=loss_mask_type, metadata_key="none") == []
