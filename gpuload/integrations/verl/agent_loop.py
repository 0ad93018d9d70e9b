"""verl's agent loops, reusing the ids that the loader made instead of tokenizing each prompt again for each sample.

Switched on by two settings; `agent_loop.yaml`, beside this file, puts these classes in the place of verl's own under
the names that verl gives them, so that `default_agent_loop` and a column `agent_name` mean what they meant:

    +data.gpuload.reuse_ids=true
    actor_rollout_ref.rollout.agent.agent_loop_config_path=gpuload/integrations/verl/agent_loop.yaml

Only the first prompt of a rollout is concerned. Wherever its ids could differ (see `reuse.py`), and for images, videos,
audio and models whose prompts verl does not make with the chat template, verl's own code makes them.
"""

import logging
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop as VerlSingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop as VerlToolAgentLoop
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

from gpuload.integrations.verl.reuse import IDS, SEAL, prompt_source, seal

logger = logging.getLogger(__name__)

_told: set[str] = set()


class _ReusesIds:
    """What both loops do differently. verl makes an instance for each sample."""

    continuous_token_builder: Any
    _sealed: tuple[Any, str | None] = (None, None)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        self._sealed = kwargs.pop(IDS, None), kwargs.pop(SEAL, None)
        return await super().run(sampling_params, **kwargs)  # type: ignore[misc]

    async def ct_build_initial_tokens(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        audios: Any = None,
        mm_inputs_out: dict[str, Any] | None = None,
    ) -> list[int]:
        """The ids of the first prompt: the row's, where they are what verl would make, else verl's."""
        why_not = "images, videos or audio" if images or videos or audios else self._obstacle(messages, tools)
        if why_not is None:
            ids, _ = self._sealed
            return self._cap_text_prompt_length(ids.tolist() if hasattr(ids, "tolist") else list(ids))  # type: ignore
        if why_not not in _told:
            _told.add(why_not)
            logger.warning("prompts are tokenized once for each sample, not once: %s", why_not)
        return await super().ct_build_initial_tokens(  # type: ignore[misc,no-any-return]
            messages, tools=tools, images=images, videos=videos, audios=audios, mm_inputs_out=mm_inputs_out
        )

    def _obstacle(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str | None:
        """Why the row's ids are not what verl would make, or None."""
        ids, mark = self._sealed
        if ids is None or mark is None:
            return f"rows have no {IDS} and {SEAL}: set +data.gpuload.reuse_ids=true"
        builder = self.continuous_token_builder
        for method in ("build_initial_tokens", "_render_tokens"):
            if getattr(type(builder), method, None) is not getattr(ContinuousTokenBuilder, method):
                return f"{type(builder).__name__} makes prompts in a way of its own"
        source = prompt_source(builder.tokenizer, builder.chat_template_kwargs, tools)
        if source is None:
            return "the loader makes no ids with this tokenizer and these apply_chat_template_kwargs"
        expected = seal(source, messages)
        if mark == expected:
            return None
        if mark.rpartition("/")[0] != source:
            return "the loader had another tokenizer, chat template, apply_chat_template_kwargs, tools or day"
        return "messages were changed after the loader"


class SingleTurnAgentLoop(_ReusesIds, VerlSingleTurnAgentLoop):  # type: ignore[misc]
    """verl's `single_turn_agent`."""


class ToolAgentLoop(_ReusesIds, VerlToolAgentLoop):  # type: ignore[misc]
    """verl's `tool_agent`."""
