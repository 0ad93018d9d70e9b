"""verl's agent loops, reusing the prompt ids of the loader instead of tokenizing each prompt once per sample.

Two settings switch them on. `agent_loop.yaml`, in this directory, registers these classes under the names of verl's
loops, so that `default_agent_loop` and a column `agent_name` keep their meaning:

    +data.gpuload.reuse_ids=true
    actor_rollout_ref.rollout.agent.agent_loop_config_path=gpuload/integrations/verl/agent_loop.yaml

Only the first prompt of a rollout is affected. The ids are reused only if a digest of tokenizer, template, template
arguments, tools and messages matches (see `reuse.py`). In all other cases, and for images, videos, audio and prompt
builders that override verl's rendering, the loops fall back to verl's own code.
"""

import logging
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop as VerlSingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop as VerlToolAgentLoop
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

from gpuload.integrations.verl.reuse import DIGEST_KEY, IDS_KEY, prompt_digest, source_digest, source_of

logger = logging.getLogger(__name__)

_logged_reasons: set[str] = set()


class _ReuseIdsMixin:
    """Overrides shared by both loops. verl makes one instance for each sample."""

    continuous_token_builder: Any
    _row_ids: Any = None
    _row_digest: str | None = None

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        self._row_ids, self._row_digest = kwargs.pop(IDS_KEY, None), kwargs.pop(DIGEST_KEY, None)
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
        """Return the ids of the first prompt: those of the row if the digests match, else as verl builds them."""
        has_media = images or videos or audios
        reason = "images, videos or audio" if has_media else self._not_reusable_reason(messages, tools)
        if reason is None:
            ids = self._row_ids
            return self._cap_text_prompt_length(ids.tolist() if hasattr(ids, "tolist") else list(ids))  # type: ignore
        if reason not in _logged_reasons:
            _logged_reasons.add(reason)
            logger.warning("gpuload: prompt ids are not reused, every sample's prompt is tokenized: %s", reason)
        return await super().ct_build_initial_tokens(  # type: ignore[misc,no-any-return]
            messages, tools=tools, images=images, videos=videos, audios=audios, mm_inputs_out=mm_inputs_out
        )

    def _not_reusable_reason(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str | None:
        """Why the row's ids may differ from verl's, or None if they are the same."""
        if self._row_ids is None or self._row_digest is None:
            return f"rows have no {IDS_KEY} and {DIGEST_KEY}: set +data.gpuload.reuse_ids=true"
        builder = self.continuous_token_builder
        for method in ("build_initial_tokens", "_render_tokens"):
            if getattr(type(builder), method, None) is not getattr(ContinuousTokenBuilder, method):
                return f"{type(builder).__name__} overrides {method}"
        source = source_digest(builder.tokenizer, builder.chat_template_kwargs, tools)
        if source is None:
            return "reuse does not support this tokenizer or these apply_chat_template_kwargs"
        if self._row_digest == prompt_digest(source, messages):
            return None
        if source_of(self._row_digest) != source:
            return "the loader used another tokenizer, chat template, apply_chat_template_kwargs, tools or date"
        return "messages were changed after loading"


class SingleTurnAgentLoop(_ReuseIdsMixin, VerlSingleTurnAgentLoop):  # type: ignore[misc]
    """verl's `single_turn_agent`."""


class ToolAgentLoop(_ReuseIdsMixin, VerlToolAgentLoop):  # type: ignore[misc]
    """verl's `tool_agent`."""
