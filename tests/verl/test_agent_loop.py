"""Agent loops that reuse prompt ids, in verl's own worker, with a server that needs no model."""

import asyncio
import importlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("verl.experimental")

from conftest import user
from hydra import compose, initialize_config_module
from same import gpuload_dataset
from transformers import AutoTokenizer
from verl.experimental.agent_loop import agent_loop as verl_loops
from verl.experimental.agent_loop import single_turn_agent_loop, tool_agent_loop  # noqa: F401  registers the loops
from verl.protocol import DataProto
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.tensordict_utils import get_tensordict
from verl.workers.rollout.replica import TokenOutput

from gpuload.integrations.verl import agent_loop, reuse

CONFIG = str(Path(agent_loop.__file__).with_name("agent_loop.yaml"))
REUSES = agent_loop.unsupported_loop_reason(verl_loops.AgentLoopBase) is None
needs_reuse = pytest.mark.skipif(not REUSES, reason="the loops of this version of verl are used unchanged")
# verl 0.9.0 has two ways to build the first prompt, other versions one.
HAS_BOTH_WAYS = REUSES and hasattr(verl_loops.AgentLoopBase, "apply_chat_template")
WAYS = [[], ["data.continuous_token.enable=true"]] if HAS_BOTH_WAYS else [[]]
SAMPLES = 8
TOOLS = """
from verl.tools.function_tool import function_tool

@function_tool
def look_up(word: str) -> str:
    '''Looks a word up.

    Args:
        word: the word.
    '''
    return word
"""


class Server:
    """Answers every prompt with the same two tokens, and records the prompts."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def generate(self, *, prompt_ids: list[int], **rest: Any) -> TokenOutput:
        self.prompts.append(prompt_ids)
        return TokenOutput(token_ids=[9707, 151645], log_probs=[-0.5, -0.25])


@cache
def compose_config(*overrides: str) -> Any:
    """verl's configuration with overrides from a command line."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


@pytest.fixture(scope="module")
def model(qwen_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a model without weights: a configuration and the shipped tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    shutil.copytree(qwen_folder, directory, dirs_exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}))
    return str(directory)


@pytest.fixture(scope="module")
def tools_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of tools. One for all tests: verl rejects a tool of the same name from another file."""
    path = tmp_path_factory.mktemp("tools") / "tools.py"
    path.write_text(TOOLS)
    return str(path)


@pytest.fixture(autouse=True)
def _isolated_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_loops, "_agent_loop_registry", dict(verl_loops._agent_loop_registry))
    monkeypatch.setattr(agent_loop, "_logged_reasons", set())


def modules_that_tokenize() -> list[Any]:
    """verl's modules that have rendered prompts in some version, as far as this one has them."""
    found = [verl_loops]
    with suppress(ImportError):  # before verl 0.9
        found.append(importlib.import_module("verl.utils.tokenizer.continuous_token"))
    return [module for module in found if hasattr(module, "apply_chat_template")]


def make_worker(config: Any, server: Server) -> Any:
    if hasattr(verl_loops, "AsyncLLMServerManager"):  # verl 0.7

        class Worker(verl_loops.AgentLoopWorker):  # type: ignore[misc]
            server_manager = server

        return Worker(config, [], None)
    return verl_loops.AgentLoopWorker(config, server)


@pytest.fixture(params=WAYS, ids=lambda way: "-".join(way) or "default")
def rollout(request: Any, model: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[DataProto, Server, int]]:
    """rollout(rows, *overrides, reuse=True) → verl's output, the server, number of calls that tokenized a prompt."""

    def run(rows: list[dict[str, Any]], *overrides: str, reuse: bool = True) -> tuple[DataProto, Server, int]:
        settings = [
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.calculate_log_probs=true",
            "actor_rollout_ref.rollout.prompt_length=256",
            "actor_rollout_ref.rollout.response_length=16",
            *request.param,
        ]
        if reuse:
            settings.append(f"actor_rollout_ref.rollout.agent.agent_loop_config_path={CONFIG}")
        config = compose_config(*settings, *overrides)
        calls = 0
        modules = modules_that_tokenize()
        original = modules[0].apply_chat_template

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return original(*args, **kwargs)

        for module in modules:
            monkeypatch.setattr(module, "apply_chat_template", counted)
        server = Server()
        worker = make_worker(config, server)
        batch = {key: np.fromiter((row[key] for row in rows), object, len(rows)) for key in rows[0]}
        data = DataProto.from_dict({"dummy_tensor": torch.zeros(len(rows), 1)}, non_tensors=batch)
        answer = asyncio.run(worker.generate_sequences(data.repeat(SAMPLES, interleave=True)))
        for module in modules:
            monkeypatch.setattr(module, "apply_chat_template", original)
        return answer, server, calls

    return run


def rows_of(file: str, tokenizer: Any, count: int, **data: Any) -> list[dict[str, Any]]:
    """Rows of gpuload's dataset, with ids and digests."""
    dataset = gpuload_dataset(file, tokenizer, max_samples=count, gpuload={"reuse_ids": True, "device": "cpu"}, **data)
    rows = [dict(row) for row in dataset.__getitems__(range(len(dataset)))]
    assert len(rows) == count
    assert all(row[reuse.IDS_KEY] and row[reuse.DIGEST_KEY] for row in rows)
    return [{key: value for key, value in row.items() if key != "dummy_tensor"} for row in rows]


def without_ids(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in (reuse.IDS_KEY, reuse.DIGEST_KEY)} for row in rows]


def assert_same_output(one: DataProto, other: DataProto) -> None:
    assert set(one.batch.keys()) == set(other.batch.keys())
    for key in one.batch.keys():  # noqa: SIM118  a TensorDict
        assert torch.equal(one.batch[key], other.batch[key]), key


@needs_reuse
def test_reused_ids_give_the_same_rollout(gsm8k: str, model: str, rollout: Any) -> None:
    rows = rows_of(gsm8k, AutoTokenizer.from_pretrained(model), 4)
    expected, verl_server, verl_calls = rollout(without_ids(rows), reuse=False)
    answer, server, calls = rollout(rows)
    assert sorted(server.prompts) == sorted(verl_server.prompts)
    assert_same_output(answer, expected)
    assert verl_calls == 4 * SAMPLES
    assert calls == 0


@needs_reuse
@pytest.mark.parametrize("limit", [16, 4096])
def test_prompts_over_the_rollout_length_are_truncated_as_in_verl(
    gsm8k: str, model: str, rollout: Any, limit: int
) -> None:
    rows = rows_of(gsm8k, AutoTokenizer.from_pretrained(model), 2)
    setting = f"actor_rollout_ref.rollout.prompt_length={limit}"
    expected, _, _ = rollout(without_ids(rows), setting, reuse=False)
    answer, server, calls = rollout(rows, setting)
    assert_same_output(answer, expected)
    assert calls == 0
    assert max(map(len, server.prompts)) <= limit


@needs_reuse
def test_rows_without_ids_fall_back(gsm8k: str, model: str, rollout: Any, caplog: Any) -> None:
    rows = rows_of(gsm8k, AutoTokenizer.from_pretrained(model), 2)
    expected, _, _ = rollout(without_ids(rows), reuse=False)
    answer, _, calls = rollout(without_ids(rows))
    assert_same_output(answer, expected)
    assert calls == 2 * SAMPLES
    assert "reuse_ids=true" in caplog.text


@needs_reuse
def test_other_template_arguments_fall_back(gsm8k: str, model: str, rollout: Any, caplog: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    settings = "++data.apply_chat_template_kwargs={add_vision_id: true}"
    rows = rows_of(gsm8k, tokenizer, 2)
    _, _, calls = rollout(rows, settings)
    assert calls == 2 * SAMPLES
    assert "apply_chat_template_kwargs" in caplog.text
    rows = rows_of(gsm8k, tokenizer, 2, apply_chat_template_kwargs={"add_vision_id": True})
    _, _, calls = rollout(rows, settings)
    assert calls == 0


@needs_reuse
def test_other_template_falls_back(gsm8k: str, model: str, rollout: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = tokenizer.chat_template.replace("You are", "You were")
    rows = rows_of(gsm8k, tokenizer, 2)
    expected, _, _ = rollout(without_ids(rows), reuse=False)
    answer, _, calls = rollout(rows)
    assert calls == 2 * SAMPLES
    assert_same_output(answer, expected)


@needs_reuse
def test_changed_messages_fall_back(gsm8k: str, model: str, rollout: Any, caplog: Any) -> None:
    rows = rows_of(gsm8k, AutoTokenizer.from_pretrained(model), 2)
    rows[1]["raw_prompt"] = [{"role": "system", "content": "Be brief."}, *rows[1]["raw_prompt"]]
    expected, _, _ = rollout(without_ids(rows), reuse=False)
    answer, _, calls = rollout(rows)
    assert calls == SAMPLES
    assert_same_output(answer, expected)
    assert "messages were changed" in caplog.text


@needs_reuse
def test_other_tools_fall_back(gsm8k: str, model: str, rollout: Any, tools_file: str) -> None:
    settings = [
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tools_file}",
    ]
    tokenizer = AutoTokenizer.from_pretrained(model)
    with_tools = rows_of(gsm8k, tokenizer, 2, function_tool_path=tools_file)
    without = rows_of(gsm8k, tokenizer, 2)
    assert len(with_tools[0][reuse.IDS_KEY]) > len(without[0][reuse.IDS_KEY])
    expected, _, _ = rollout(without_ids(without), *settings, reuse=False)
    for rows, calls_expected in ((with_tools, 0), (without, 2 * SAMPLES)):
        answer, _, calls = rollout(rows, *settings)
        assert_same_output(answer, expected)
        assert calls == calls_expected
    # A loop without tools cannot reuse ids of prompts rendered with tools.
    assert rollout(with_tools)[2] == 2 * SAMPLES


@needs_reuse
def test_builder_that_overrides_rendering_falls_back(
    gsm8k: str, model: str, rollout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.utils.tokenizer import continuous_token

    class CustomBuilder(continuous_token.QwenContinuousTokenBuilder):  # type: ignore[misc,name-defined]
        def build_initial_tokens(self, messages: Any, **rest: Any) -> list[int]:
            return [1, 2, 3]

    rows = rows_of(gsm8k, AutoTokenizer.from_pretrained(model), 1)
    monkeypatch.setattr(
        verl_loops, "create_continuous_token_builder", lambda tokenizer, **rest: CustomBuilder(tokenizer)
    )
    _, server, _ = rollout(rows, *WAYS[-1])
    assert server.prompts == [[1, 2, 3]] * SAMPLES


@pytest.mark.skipif(REUSES, reason="this version of verl allows reuse")
def test_loops_of_older_versions_are_used_unchanged(gsm8k: str, model: str, rollout: Any, caplog: Any) -> None:
    rows = rows_of(gsm8k, AutoTokenizer.from_pretrained(model), 2)
    expected, _, _ = rollout(without_ids(rows), reuse=False)
    answer, _, calls = rollout(rows)
    assert_same_output(answer, expected)
    assert calls == 2 * SAMPLES
    assert "which reuse needs: verl 0.9 has it" in caplog.text


class FewerParameters:
    """A loop whose methods take less than those of verl 0.9.1."""

    processor = None

    def _cap_text_prompt_length(self, prompt_ids: list[int]) -> list[int]:
        return prompt_ids

    async def ct_build_initial_tokens(self, messages: Any, tools: Any = None) -> list[int]:
        return [1]

    async def apply_chat_template(
        self, messages: Any, tools: Any = None, remove_system_prompt: bool = False
    ) -> list[int]:
        return [2]


def test_parent_with_fewer_parameters(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loop(agent_loop._ReuseIdsMixin, FewerParameters):
        tokenizer = qwen
        apply_chat_template_kwargs = MappingProxyType({})
        continuous_token_builder = SimpleNamespace(tokenizer=qwen, chat_template_kwargs={})

    monkeypatch.setattr(agent_loop, "_UNSUPPORTED_LOOP", None)
    monkeypatch.setattr(agent_loop, "_overridden_rendering", lambda builder: None)
    loop, messages = Loop(), user("hi")
    assert asyncio.run(loop.ct_build_initial_tokens(messages, tools=None)) == [1]
    assert asyncio.run(loop.apply_chat_template(messages)) == [2]
    source = reuse.source_digest(qwen, {})
    assert source is not None
    loop._row_ids, loop._row_digest = [7, 8], reuse.prompt_digest(source, messages)
    assert asyncio.run(loop.ct_build_initial_tokens(messages, tools=None)) == [7, 8]
    assert asyncio.run(loop.apply_chat_template(messages)) == [7, 8]
    assert asyncio.run(loop.apply_chat_template(messages, remove_system_prompt=True)) == [2]


def test_parent_whose_signature_is_not_supported() -> None:
    class NoTools(FewerParameters):
        async def ct_build_initial_tokens(self, messages: Any) -> list[int]:  # type: ignore[override]
            return [1]

    assert "takes no tools" in str(agent_loop.unsupported_loop_reason(NoTools))
    assert "have no _cap_text_prompt_length" in str(agent_loop.unsupported_loop_reason(object))


@pytest.mark.parametrize("gone", ["ct_build_initial_tokens", "_cap_text_prompt_length"])
def test_a_hook_that_is_gone_is_said_at_import(monkeypatch: pytest.MonkeyPatch, caplog: Any, gone: str) -> None:
    """And the loops are still there, with verl's own prompts."""
    if not hasattr(verl_loops.AgentLoopBase, gone):
        pytest.skip("this version of verl never had it")
    monkeypatch.delattr(verl_loops.AgentLoopBase, gone)
    spec = importlib.util.spec_from_file_location("imported_again", agent_loop.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    why = f"the agent loops of verl {version('verl')} have no {gone}, which reuse needs: verl 0.9 has it"
    assert caplog.messages == [f"gpuload: prompt ids are not reused, every sample's prompt is tokenized: {why}"]
    assert why == module._UNSUPPORTED_LOOP
    assert issubclass(module.SingleTurnAgentLoop, single_turn_agent_loop.SingleTurnAgentLoop)


def test_apply_chat_template_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent loops of verl after 0.9.0 have no such method."""
    if not REUSES:
        pytest.skip("this version of verl has no reuse")
    monkeypatch.delattr(verl_loops.AgentLoopBase, "apply_chat_template", raising=False)
    assert agent_loop.unsupported_loop_reason(verl_loops.AgentLoopBase) is None


def test_code_that_is_not_known_builds_its_own_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    if not REUSES:
        pytest.skip("this version of verl has no reuse")
    base = verl_loops.AgentLoopBase

    async def changed(self: Any, messages: Any, tools: Any = None, **media: Any) -> Any:
        return [1]

    changed.__qualname__ = "AgentLoopBase.ct_build_initial_tokens"
    monkeypatch.setattr(base, "ct_build_initial_tokens", changed)
    reason = f"verl {version('verl')}: AgentLoopBase.ct_build_initial_tokens has changed"
    assert agent_loop.unsupported_loop_reason(base) == reason
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "verl.utils.tokenizer.continuous_token", None)
    assert "continuous_token cannot be imported" in str(agent_loop.unsupported_loop_reason(base))


def test_source_digest_depends_on_everything_that_determines_ids(qwen: Any, qwen_folder: str) -> None:
    source = reuse.source_digest(qwen, {})
    assert source == reuse.source_digest(AutoTokenizer.from_pretrained(qwen_folder), {})
    qwen(["a", "b c d"], padding=True)  # changes the padding settings of the backend
    assert source == reuse.source_digest(AutoTokenizer.from_pretrained(qwen_folder), {})
    assert reuse.source_digest(qwen, {"tools": []}) is None
    assert reuse.source_digest(qwen, {"padding": True}) is None
    other = AutoTokenizer.from_pretrained(qwen_folder)
    sources = {source, reuse.source_digest(other, {"x": 1}), reuse.source_digest(other, {}, [{"a": 1}])}
    sources.add(reuse.source_digest(other, {"chat_template": "{{ messages }}"}))
    other.add_tokens(["<new>"])
    sources.add(reuse.source_digest(other, {}))
    other.eos_token = "<new>"
    sources.add(reuse.source_digest(other, {"y": 1}))
    assert len(sources) == 6


def test_source_digest_includes_the_date_if_the_template_prints_it(
    qwen_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datetime

    class Tomorrow(datetime.date):
        @classmethod
        def today(cls) -> Any:
            return cls(2030, 1, 2)

    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    without_date = reuse.source_digest(tokenizer, {})
    tokenizer.chat_template = "{{ strftime_now('%d') }}" + tokenizer.chat_template
    today = reuse.source_digest(tokenizer, {})
    monkeypatch.setattr(datetime, "date", Tomorrow)
    assert reuse.source_digest(tokenizer, {}) != today
    tokenizer.chat_template = tokenizer.chat_template.removeprefix("{{ strftime_now('%d') }}")
    assert reuse.source_digest(tokenizer, {}) == without_date


def test_batch_with_a_prompt_without_ids(write: Any, model: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    rejects = "{{ raise_exception('no') if messages[0].content == 'bad' else '' }}"
    tokenizer.chat_template = rejects + tokenizer.chat_template
    file = write([[{"role": "user", "content": text}] for text in ("good", "bad", "fine")])
    dataset = gpuload_dataset(
        file, tokenizer, filter_overlong_prompts=False, gpuload={"reuse_ids": True, "device": "cpu"}
    )
    batch = collate_fn(dataset.__getitems__([0, 1, 2]))
    assert {len(values) for values in batch.values()} == {3}
    assert [digest is None for digest in batch[reuse.DIGEST_KEY]] == [ids is None for ids in batch[reuse.IDS_KEY]]
    assert [ids is None for ids in batch[reuse.IDS_KEY]] == [False, True, False]


@needs_reuse
def test_digests_match_after_a_tensordict(gsm8k: str, model: str) -> None:
    """verl's V1 trainers pass rows to the loops as a TensorDict."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = rows_of(gsm8k, tokenizer, 3)
    batch = dict(get_tensordict({"dummy": torch.zeros(3, 1)} | collate_fn(rows)).items())
    source = reuse.source_digest(tokenizer, {})
    assert source is not None
    for number, row in enumerate(rows):
        messages, ids, digest = (batch[key][number].data for key in ("raw_prompt", reuse.IDS_KEY, reuse.DIGEST_KEY))
        assert list(ids) == row[reuse.IDS_KEY]
        assert digest == reuse.prompt_digest(source, messages)


@needs_reuse
def test_columns_with_the_names_of_our_keys_are_not_reused(gsm8k: str, model: str, rollout: Any) -> None:
    messages = pq.read_table(gsm8k).column("prompt")[0].as_py()
    rows = [
        {
            "raw_prompt": messages,
            "data_source": "x",
            "index": 0,
            reuse.IDS_KEY: [1, 2],
            reuse.DIGEST_KEY: "not a digest",
        }
    ]
    expected, _, _ = rollout(without_ids(rows), reuse=False)
    answer, _, calls = rollout(rows)
    assert calls == SAMPLES
    assert_same_output(answer, expected)
