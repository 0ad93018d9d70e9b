"""The ids of a prompt with images are made once for all its samples, and are verl's."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl.utils.tokenizer.continuous_token")

from image_cases import BUILDERS, picture
from PIL import Image
from same import VERL
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.utils.tokenizer import continuous_token

from gpuload.integrations.verl import agent_loop, image_ids

pytestmark = pytest.mark.skipif(VERL < (0, 9, 1), reason="builds prompts in another way")


KINDS = (SingleTurnAgentLoop, agent_loop.SingleTurnAgentLoop)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Notes each run of the processor; no ids are known yet."""
    noted, right = [], continuous_token.build_multimodal_processor_inputs
    monkeypatch.setattr(
        continuous_token,
        "build_multimodal_processor_inputs",
        lambda *given, **more: (noted.append(1), right(*given, **more))[1],
    )
    monkeypatch.setattr(image_ids, "_made", {})
    monkeypatch.setattr(agent_loop, "_logged_reasons", set())
    yield noted
    assert not image_ids._making


def messages(text: str, count: int = 1) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image"}] * count + [{"type": "text", "text": text}]}]


def loop_of(processor: Any, kind: Any = agent_loop.SingleTurnAgentLoop, length: int = 10_000, **settings: Any) -> Any:
    """An agent loop, as verl makes one for each sample, with what the first prompt needs."""
    made = kind.__new__(kind)
    made.tokenizer, made.processor = processor.tokenizer, processor
    made.rollout_config, made.loop = SimpleNamespace(prompt_length=length), asyncio.get_running_loop()
    made.continuous_token_builder = continuous_token.QwenVLContinuousTokenBuilder(
        processor.tokenizer, processor, **settings
    )
    return made


def ids_of(samples: list[Any], processor: Any, kind: Any = agent_loop.SingleTurnAgentLoop, **more: Any) -> list[Any]:
    """The ids of samples at the same time: messages and images of each; an error in its place."""

    async def made() -> Any:
        calls = [
            loop_of(processor, kind, **more).ct_build_initial_tokens(given, images=images) for given, images in samples
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    found: list[Any] = asyncio.run(made())
    return found


def test_samples_of_a_prompt_share_its_ids(runs: list[int]) -> None:
    processor = BUILDERS["qwen2_5_vl"]()
    one, other = picture(120, 90), picture(120, 90).transpose(Image.Transpose.ROTATE_180)
    samples = [(messages(text), [image]) for text, image in (("a?", one), ("b?", one), ("a?", other)) for _ in range(4)]
    samples += [(messages("a?", 2), [one, picture(56, 300)])] * 2
    wanted = ids_of(samples, processor, SingleTurnAgentLoop)
    assert len(runs) == len(samples)
    assert len({str(each) for each in wanted}) == 3
    runs.clear()
    assert ids_of(samples, processor) == wanted
    assert len(runs) == 4  # different texts, different pixels
    copied = [(given, [each.copy() for each in images]) for given, images in samples]
    assert ids_of(copied, processor) == wanted
    assert len(runs) == 4
    for other_settings in ({"mm_processor_kwargs": {"max_pixels": 3136 * 2}}, {"chat_template_kwargs": {"x": 1}}):
        runs.clear()
        assert ids_of(samples, processor, **other_settings) == ids_of(
            samples, processor, SingleTurnAgentLoop, **other_settings
        )
        assert len(runs) == len(samples) + (4 if "mm_processor_kwargs" in other_settings else 0)
    runs.clear()
    assert ids_of(samples, BUILDERS["qwen2_5_vl"]()) == wanted
    assert len(runs) == 4


def test_ids_cannot_be_changed_by_another_sample(runs: list[int]) -> None:
    processor, sample = BUILDERS["qwen2_5_vl"](), (messages("a?"), [picture(60, 60)])
    first, second = ids_of([sample, sample], processor)
    first.append(1)
    assert ids_of([sample], processor) == [second]
    assert first != second


def test_errors_are_those_of_verl(runs: list[int]) -> None:
    processor = BUILDERS["qwen2_5_vl"]()
    samples = [(messages("a?"), [picture(300, 300)])] * 2
    wanted, found = (ids_of(samples, processor, kind, length=50) for kind in KINDS)
    assert [(type(each), str(each)) for each in found] == [(type(each), str(each)) for each in wanted]
    assert "exceeding rollout.prompt_length=50" in str(found[0])
    assert len(ids_of(samples[:1], processor)[0]) > 50


def test_what_is_not_known_is_made_by_verl(
    runs: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    processor, sample = BUILDERS["qwen2_5_vl"](), (messages("a?"), [picture(60, 60)])
    gray = (messages("a?"), [picture(60, 60, "L")])
    (wanted,) = ids_of([sample], processor, SingleTurnAgentLoop)
    runs.clear()
    assert ids_of([gray, gray], processor) == [wanted] * 2
    assert len(runs) == 2
    assert "every sample's prompt is tokenized: images that are not RGB" in caplog.text

    class Builder(continuous_token.QwenVLContinuousTokenBuilder):  # type: ignore[misc]
        def render_tokens_with_mm(self, *given: Any, **more: Any) -> Any:
            return super().render_tokens_with_mm(*given, **more)

    monkeypatch.setattr(continuous_token, "QwenVLContinuousTokenBuilder", Builder)
    runs.clear()
    assert ids_of([sample, sample], processor) == [wanted] * 2
    assert len(runs) == 2
    assert "Builder overrides render_tokens_with_mm" in caplog.text
