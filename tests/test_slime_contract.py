"""What the integration with slime relies on, with a stand-in for slime that has only the names it uses."""

import importlib
import json
import random
import shutil
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import slime_cases
from cache_cases import flip_a_bit
from slime_cases import arguments, generate_rollout, rows, stand_in, without_integration, write

from gpuload.cache.token_store import DiskTokens
from gpuload.core.arrays import Ragged
from gpuload.core.errors import OptionError
from gpuload.core.marks import LOSS
from gpuload.integrations.known_code import digest
from gpuload.integrations.messages import cache as message_cache
from gpuload.integrations.slime.contract import SAMPLE_FIELDS, contract_problem


@pytest.fixture
def integration(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The integration, with the stand-in for slime."""
    for name in without_integration():
        monkeypatch.delitem(sys.modules, name)
    for name, module in stand_in(qwen).items():
        monkeypatch.setitem(sys.modules, name, module)
    generator = slime_cases.MultiTurnLossMaskGenerator
    used = [slime_cases.Dataset.__init__, generator.__init__, generator.get_loss_mask, generator.get_response_lengths]
    known = {f"stand-in:{each.__qualname__}": {str(digest(each)): "0.3.1"} for each in (*used, generate_rollout)}
    monkeypatch.setattr(importlib.import_module("gpuload.integrations.slime.contract"), "KNOWN", known)
    found = importlib.import_module("gpuload.integrations.slime")
    yield found
    for name in without_integration():
        del sys.modules[name]


def test_the_contract() -> None:
    assert contract_problem(slime_cases.Dataset, slime_cases.Sample) is None


def test_a_change_of_slime_is_noticed() -> None:
    def dataset(path, tokenizer, packed): ...  # type: ignore[no-untyped-def]

    problem = contract_problem(dataset, slime_cases.Sample)
    assert problem == "slime's Dataset has the parameters path, tokenizer, packed"
    smaller = make_dataclass("Sample", [name for name in SAMPLE_FIELDS if name != "tokens"])
    assert contract_problem(slime_cases.Dataset, smaller) == "slime's Sample has no tokens"


def test_samples_epochs_and_ownership(integration: ModuleType, qwen: Any, tmp_path: Path) -> None:
    given = rows()
    path = write(tmp_path / "a.parquet", given)
    args = arguments(path, "qwen", label_key="label", rollout_max_prompt_len=120, rollout_shuffle=True)
    source = integration.DataSource(args)
    expected = slime_cases.Dataset(
        path, qwen, None, 120, prompt_key="prompt", label_key="label", apply_chat_template=True
    ).samples
    for sample in expected:
        sample.tokens = qwen.encode(sample.prompt, add_special_tokens=False)
    assert 0 < len(expected) < len(given)
    assert list(source.dataset.origin_samples) == expected
    order = list(range(len(expected)))
    random.seed(42)
    random.shuffle(order)
    groups = source.get_samples(len(expected))
    assert [group[0] for group in groups] == [expected[row] for row in order]
    groups[0][0].tokens.append(1)
    groups[0][0].metadata["level"] = "changed"
    assert groups[0][1] == expected[order[0]]
    assert source.dataset.samples[0] == expected[order[0]]
    order = list(range(len(expected)))
    random.seed(42 + 1)
    random.shuffle(order)
    assert [group[0] for group in source.get_samples(5)] == [expected[row] for row in order[:5]]
    assert source.epoch_id == 1


def test_the_list_of_samples(integration: ModuleType, tmp_path: Path) -> None:
    samples = integration.DataSource(arguments(write(tmp_path / "a.parquet", rows()), "qwen")).dataset.samples
    everything = samples[:]
    assert isinstance(everything, list)
    assert len(samples) == len(everything) == 40
    assert samples[3:9:2] == everything[3:9:2]
    assert samples[-1] == everything[-1]
    assert list(samples) == everything
    with pytest.raises(IndexError):
        samples[40]
    with pytest.raises(TypeError):
        samples[[1, 2]]


def test_without_prompts_there_is_no_dataset(integration: ModuleType) -> None:
    assert integration.DataSource(arguments(None, "qwen")).dataset is None


def test_options_of_gpuload(integration: ModuleType, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", rows())
    assert len(integration.DataSource(arguments(path, "qwen", gpuload={"verify": "full"})).dataset) == 40
    with pytest.raises(OptionError, match=r"unknown key gpuload.devise: did you mean device\?"):
        integration.DataSource(arguments(path, "qwen", gpuload={"devise": "cpu"}))
    with pytest.raises(OptionError, match="device='x'"):
        integration.DataSource(arguments(path, "qwen", gpuload={"device": "x"}))


def test_a_store_on_disk(integration: ModuleType, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", rows())
    for limit in (None, 60):
        given = arguments(path, "qwen", rollout_max_prompt_len=limit)
        expected = integration.DataSource(given).dataset
        given.gpuload = {"store": "disk"}
        found = integration.DataSource(given).dataset
        assert isinstance(found._columns.tokens, DiskTokens)
        assert found.samples[:] == expected.samples[:]


def test_another_slime_makes_its_own_dataset(
    integration: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(sys.modules["slime.utils.data"], "_parse_generalized_path")
    assert integration.DataSource(arguments(write(tmp_path / "a.parquet", rows()), "qwen")).dataset == "slime's"
    assert caplog.messages == [
        "gpuload: falls back to slime's own dataset: slime.utils.data has no _parse_generalized_path"
    ]


def test_a_module_that_has_moved(
    integration: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = "slime.utils.processing_utils"
    monkeypatch.setitem(sys.modules, module, None)
    assert integration.DataSource(arguments(write(tmp_path / "a.parquet", rows()), "qwen")).dataset == "slime's"
    why = f"{module} cannot be imported (import of {module} halted; None in sys.modules)"
    assert caplog.messages == [f"gpuload: falls back to slime's own dataset: {why}"]


def own_dataset(monkeypatch: pytest.MonkeyPatch, changed: int | None) -> None:
    """slime's class is one that is not known. The sample of a row may differ."""

    class Dataset(slime_cases.Dataset):
        def __init__(self, *given: Any, **named: Any):
            super().__init__(*given, **named)
            for sample in self.samples:
                if sample.label == str(changed):
                    sample.label = changed

    monkeypatch.setattr(sys.modules["slime.utils.data"], "Dataset", Dataset)
    contract = importlib.import_module("gpuload.integrations.slime.contract")
    monkeypatch.setattr(contract, "DATASET_PARAMETERS", ("given", "named"))
    Dataset.__init__.__qualname__ = "Dataset.__init__"


def test_samples_that_differ_from_slimes(
    integration: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own_dataset(monkeypatch, changed=7)
    preparation = importlib.import_module("gpuload.integrations.slime.preparation")
    monkeypatch.setattr(preparation, "change", lambda *given: None)
    path = write(tmp_path / "a.parquet", rows())
    assert integration.DataSource(arguments(path, "qwen", label_key="label")).dataset == "slime's"
    assert caplog.messages == [
        f"gpuload: falls back to slime's own dataset: {path}: samples of 16 rows differ from slime's"
    ]


def test_code_that_is_not_known_is_compared(
    integration: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = rows(300)
    given[211]["prompt"].append({"role": "tool", "content": "x"})
    path = write(tmp_path / "a.parquet", given)
    args = arguments(path, "qwen", label_key="label", rollout_max_prompt_len=120)
    own_dataset(monkeypatch, changed=None)
    assert len(integration.DataSource(args).dataset) > 200
    assert caplog.messages == ["gpuload: slime: Dataset.__init__ has changed; 64 rows prepared by both are equal: used"]
    caplog.clear()
    own_dataset(monkeypatch, changed=211)
    monkeypatch.delitem(sys.modules, "gpuload.integrations.slime.preparation")
    assert integration.DataSource(args).dataset == "slime's"
    why = f"{path}: slime: Dataset.__init__ has changed, and samples of 64 rows differ from slime's"
    assert caplog.messages == [f"gpuload: falls back to slime's own dataset: {why}"]


@pytest.mark.parametrize("given", [{}, {"trust_remote_code": False}, {"trust_remote_code": True}])
def test_code_of_a_checkpoint_the_trainers_setting(
    given: dict[str, bool], integration: ModuleType, qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    source = sys.modules["slime.utils.processing_utils"]
    for name, opened in (("load_tokenizer", qwen), ("load_processor", None)):
        monkeypatch.setattr(
            source, name, lambda _, trust_remote_code, opened=opened: asked.append(trust_remote_code) or opened
        )
    path = write(tmp_path / "a.parquet", rows())
    assert len(integration.DataSource(arguments(path, "qwen", **given)).dataset) == 40
    assert asked == [given.get("trust_remote_code", False)] * 2


@pytest.mark.parametrize(
    ("file", "classes"),
    [
        ("tokenizer_config.json", {"AutoTokenizer": [None, "own.Own"]}),
        ("tokenizer_config.json", [None, "own.Own"]),
        ("processor_config.json", {"AutoProcessor": "own.Own"}),
    ],
)
def test_code_of_a_checkpoint_is_not_run(
    file: str, classes: Any, integration: ModuleType, qwen_folder: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """transformers then takes its own class, whose tokens may be others than slime's."""
    from transformers import AutoTokenizer

    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(qwen_folder, checkpoint)
    (checkpoint / "own.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')")
    config = checkpoint / file
    before = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps(before | {"auto_map": classes}))
    source = sys.modules["slime.utils.processing_utils"]
    monkeypatch.setattr(source, "load_tokenizer", AutoTokenizer.from_pretrained)
    path = write(tmp_path / "a.parquet", rows())
    assert integration.DataSource(arguments(path, str(checkpoint))).dataset == "slime's"
    assert not (tmp_path / "run").exists()
    assert caplog.messages[-1].startswith("gpuload: falls back to slime's own dataset: ")
    assert "set --trust-remote-code" in caplog.messages[-1]
    # Code of the model is no reason to fall back.
    config.write_text(json.dumps(before | {"auto_map": {"AutoModel": "own.Own"}}))
    assert len(integration.DataSource(arguments(path, str(checkpoint))).dataset) == 40


def conversations(count: int) -> list[dict[str, Any]]:
    given = rows(count)
    for number, row in enumerate(given):
        row["prompt"] += [{"role": "assistant", "content": f"It is {number}."}, row["prompt"][-1]] * (1 + number % 2)
    return given


def sft_arguments(path: Path, given: list[dict[str, Any]]) -> Any:
    return arguments(
        write(path, given), "qwen", apply_chat_template=False, n_samples_per_prompt=1, loss_mask_type="qwen",
        rollout_batch_size=len(given), rollout_function_path="gpuload.integrations.slime.sft_rollout",
    )  # fmt: skip


def test_conversations_for_sft(integration: ModuleType, qwen: Any, tmp_path: Path) -> None:
    given = conversations(12)
    given[5]["prompt"][0]["content"] = None
    args = sft_arguments(tmp_path / "a.parquet", given)
    source = integration.DataSource(args)
    groups = integration.sft_rollout(args, 0, source)
    generator = slime_cases.MultiTurnLossMaskGenerator(qwen, "qwen")
    for number, (sample,) in enumerate(groups):
        assert sample.reward == 0
        if number == 5:
            assert sample.tokens == "by slime"
            continue
        ids, mask = generator.get_loss_mask(given[number]["prompt"])
        length = len(mask) - mask.index(1)
        assert (sample.tokens, sample.loss_mask, sample.response_length) == (ids, mask[-length:], length)


SFT_FALLBACK = "gpuload: falls back to slime's SFT rollout, which tokenizes at each step: "
MASK_CHANGED = "slime: MultiTurnLossMaskGenerator.get_loss_mask has changed"


@pytest.mark.parametrize(
    ("module", "name"),
    [("slime.utils.mask_utils", "MultiTurnLossMaskGenerator"), ("slime.rollout.sft_rollout", "generate_rollout")],
)
def test_modules_for_sft_that_have_moved(
    module: str, name: str, integration: ModuleType, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    args = sft_arguments(tmp_path / "a.parquet", conversations(12))
    monkeypatch.setitem(sys.modules, module, None)
    source = integration.DataSource(args)
    assert [group[0].tokens for group in source.get_samples(12)] == [[]] * 12
    why = f"{module} cannot be imported (import of {module} halted; None in sys.modules)"
    assert caplog.messages == [SFT_FALLBACK + why]
    caplog.clear()
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    integration.DataSource(args)
    assert caplog.messages == [f"{SFT_FALLBACK}{module} has no {name}"]


def own_mask(monkeypatch: pytest.MonkeyPatch, changed: str | None) -> None:
    """slime's mask is made by code that is not known. That of conversations with a message may differ."""
    stock = slime_cases.MultiTurnLossMaskGenerator

    class MultiTurnLossMaskGenerator(stock):  # type: ignore[misc,valid-type]
        def get_loss_mask(self, messages: list[dict[str, Any]], tools: Any = None) -> tuple[list[int], list[int]]:
            ids, mask = super().get_loss_mask(messages, tools)
            return ids, [1] * len(ids) if messages[-2]["content"] == changed else mask

    MultiTurnLossMaskGenerator.get_loss_mask.__qualname__ = "MultiTurnLossMaskGenerator.get_loss_mask"
    monkeypatch.setattr(sys.modules["slime.utils.mask_utils"], "MultiTurnLossMaskGenerator", MultiTurnLossMaskGenerator)

    def rollout(args: Any, rollout_id: int, data_buffer: Any) -> Any:
        generator = MultiTurnLossMaskGenerator(tokenizer, "qwen")
        groups = data_buffer.get_samples(args.rollout_batch_size)
        for (sample,) in groups:
            sample.tokens, mask = generator.get_loss_mask(sample.prompt, sample.metadata.get("tools"))
            (sample.response_length,) = generator.get_response_lengths([mask])
            sample.loss_mask, sample.reward = mask[-sample.response_length :], 0
        return groups

    tokenizer = sys.modules["slime.utils.processing_utils"].load_tokenizer("qwen", trust_remote_code=False)
    monkeypatch.setattr(sys.modules["slime.rollout.sft_rollout"], "generate_rollout", rollout)


def test_masks_of_code_that_is_not_known_are_compared(
    integration: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = conversations(200)
    given[137]["prompt"].insert(0, {"role": "tool", "content": "x"})
    args = sft_arguments(tmp_path / "a.parquet", given)
    own_mask(monkeypatch, changed=None)
    assert all(group[0].tokens for group in integration.DataSource(args).get_samples(200))
    assert caplog.messages == [f"gpuload: {MASK_CHANGED}; 64 rows prepared by both are equal: used"]
    caplog.clear()
    own_mask(monkeypatch, changed="It is 137.")
    assert not any(group[0].tokens for group in integration.DataSource(args).get_samples(200))
    assert caplog.messages == [f"{SFT_FALLBACK}{MASK_CHANGED}, and row 137 of a sample differs from slime's"]


def test_a_rollout_that_has_changed_is_compared(
    integration: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it makes of ids and masks is more than what the generator returns."""
    args = sft_arguments(tmp_path / "a.parquet", conversations(12))

    def rollout(args: Any, rollout_id: int, data_buffer: Any) -> Any:
        raise RuntimeError("new")

    rollout.__qualname__ = "generate_rollout"
    monkeypatch.setattr(sys.modules["slime.rollout.sft_rollout"], "generate_rollout", rollout)
    assert not any(group[0].tokens for group in integration.DataSource(args).get_samples(12))
    why = "slime: generate_rollout has changed, and row 0: slime raises RuntimeError: new"
    assert caplog.messages == [SFT_FALLBACK + why]


@pytest.fixture
def made(integration: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many conversations were tokenized, each time."""
    kind = importlib.import_module("gpuload.integrations.slime.masks").MaskedConversations
    original, counts = kind.rows, []

    def rows(self: Any) -> Any:
        found = original(self)
        counts.append(len(found.ids))
        return found

    monkeypatch.setattr(kind, "rows", rows)
    return counts


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("damage", [False, True])
def test_a_second_start_finds_conversations(
    store: str, damage: bool, integration: ModuleType, made: list[int], tmp_path: Path, warm_cache: Path
) -> None:
    given = conversations(12)
    given[5]["prompt"][0]["content"] = None
    args = sft_arguments(tmp_path / "a.parquet", given)
    args.gpuload = {"store": store}
    first = integration.DataSource(args)
    (entry,) = (warm_cache.parent / "store" if store == "disk" else warm_cache).glob("*.arrow")
    if damage:
        flip_a_bit(entry)
    second = integration.DataSource(args)
    assert made == [12] * (1 + damage)
    assert type(second.dataset._columns.conversations) is (DiskTokens if store == "disk" else Ragged)
    found = [[group[0] for group in source.get_samples(12)] for source in (first, second)]
    assert found[0] == found[1]
    assert [not sample.tokens for sample in found[1]] == [number == 5 for number in range(12)]
    args.gpuload = {"token_cache": False}
    assert [group[0] for group in integration.DataSource(args).get_samples(12)] == found[0]
    assert len(made) == 2 + damage


@pytest.mark.parametrize("other", ["messages", "tools", "template", "code"])
def test_conversations_of_another_kind_are_not_found(
    other: str, integration: ModuleType, made: list[int], qwen: Any, tmp_path: Path, warm_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    given = conversations(12)
    args = sft_arguments(tmp_path / "a.parquet", given)
    integration.DataSource(args)
    if other == "messages":
        given[7]["prompt"][0]["content"] += "."
    elif other == "tools":
        given[7]["metadata"]["tools"] = [{"type": "function", "function": {"name": "f"}}]
    elif other == "template":
        monkeypatch.setattr(qwen, "chat_template", qwen.chat_template + " ")
    else:
        monkeypatch.setattr(message_cache, "digest", lambda function: "another")
    args = sft_arguments(tmp_path / "a.parquet", given)
    samples = integration.DataSource(args).get_samples(12)
    assert made == [12, 12]
    assert all(group[0].tokens for group in samples)
    integration.DataSource(args)
    assert made == [12, 12]


def test_an_entry_that_differs_from_slime_is_made_again(
    integration: ModuleType, made: list[int], tmp_path: Path, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = sft_arguments(tmp_path / "a.parquet", conversations(12))
    expected = [group[0] for group in integration.DataSource(args).get_samples(12)]
    add = message_cache.RowCache.add

    def wrong(self: Any, ids: Ragged, *rest: Any) -> None:
        add(self, Ragged(ids.values ^ LOSS, ids.offsets), *rest)

    for entry in warm_cache.glob("*.arrow"):
        entry.unlink()
    monkeypatch.setattr(message_cache.RowCache, "add", wrong)
    integration.DataSource(args)
    monkeypatch.setattr(message_cache.RowCache, "add", add)
    assert [group[0] for group in integration.DataSource(args).get_samples(12)] == expected
    assert made == [12] * 3
    integration.DataSource(args)
    assert made == [12] * 3
