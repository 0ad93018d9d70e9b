"""verl's agent loops, reusing the prompt ids of the loader instead of tokenizing each prompt once per sample.

Two settings switch them on. `agent_loop.yaml`, in this directory, registers these classes under the names of verl's
loops, so that `default_agent_loop` and a column `agent_name` keep their meaning:

    +data.gpuload.reuse_ids=true
    actor_rollout_ref.rollout.agent.agent_loop_config_path=$(python -m gpuload.integrations.verl)

Only the first prompt of a rollout is affected. The ids are reused only if a digest of tokenizer, template, template
arguments, tools and messages matches (see `reuse.py`). Those of a prompt with images are made by verl for the first of
its samples in each process (see `image_ids.py`). In all other cases, and for videos, audio, processors with prompts of
text and prompt builders that override verl's rendering, the loops fall back to verl's own code.

verl 0.9.1 and later build the first prompt with `ct_build_initial_tokens`, verl 0.9.0 by default with
`apply_chat_template`, which later ones do not have; their arguments for images, videos and audio differ too. Arguments
that do not concern text are passed on as they come. The loops of earlier versions are used unchanged, and so are those
whose code is not known: the log says so when they are imported.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop as VerlSingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop as VerlToolAgentLoop

from gpuload.integrations.core import imported, release_of
from gpuload.integrations.known_code import change
from gpuload.integrations.verl.contract import KNOWN
from gpuload.integrations.verl.image_ids import key_of, made_once, problem
from gpuload.integrations.verl.reuse import DIGEST_KEY, IDS_KEY, prompt_digest, source_digest, source_of

logger = logging.getLogger(__name__)

_NOT_REUSED = "gpuload: prompt ids are not reused, every sample's prompt is tokenized: %s"
_logged_reasons: set[str] = set()


_BUILDER = {"verl.utils.tokenizer.continuous_token": ("ContinuousTokenBuilder",)}


def unsupported_loop_reason(loop: type) -> str | None:
    """Return why the ids of the first prompt cannot be replaced in verl's base class of agent loops, or None if they
    can."""
    release = release_of("verl", "verl")
    for name, parameters in (
        ("_cap_text_prompt_length", {"prompt_ids"}),
        ("ct_build_initial_tokens", {"messages", "tools"}),
    ):
        method = getattr(loop, name, None)
        if method is None:
            return f"the agent loops of {release} have no {name}, which reuse needs: verl 0.9 has it"
        if missing := sorted(parameters - inspect.signature(method).parameters.keys()):
            return f"{name} of {release} takes no {missing[0]}: use another version of verl"
    found, missing_name = imported(_BUILDER)
    if missing_name:
        return missing_name
    makers = [getattr(loop, name) for name in ("ct_build_initial_tokens", "apply_chat_template") if hasattr(loop, name)]
    return change(release, KNOWN, *makers, found["ContinuousTokenBuilder"].build_initial_tokens)


_UNSUPPORTED_LOOP = unsupported_loop_reason(AgentLoopBase)
if _UNSUPPORTED_LOOP is not None:  # at the start of a run, not at its first prompt
    logger.warning(_NOT_REUSED, _UNSUPPORTED_LOOP)


class _ReuseIdsMixin:
    """Overrides shared by both loops. verl makes one instance for each sample."""

    continuous_token_builder: Any
    tokenizer: Any
    processor: Any
    apply_chat_template_kwargs: Mapping[str, Any]
    loop: asyncio.AbstractEventLoop
    rollout_config: Any
    _row_ids: Any = None
    _row_digest: str | None = None

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        self._row_ids, self._row_digest = kwargs.pop(IDS_KEY, None), kwargs.pop(DIGEST_KEY, None)
        return await super().run(sampling_params, **kwargs)  # type: ignore[misc]

    async def ct_build_initial_tokens(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **media: Any
    ) -> list[int]:
        """Return the ids of the first prompt: those of the row if the digests match, else as verl builds them."""
        builder = self.continuous_token_builder
        if media.get("images") and not media.get("videos") and not media.get("audios"):
            make = partial(super().ct_build_initial_tokens, messages, tools=tools, **media)  # type: ignore[misc]
            return await self._once_for_images(messages, tools, media["images"], make)
        reason = _overridden_rendering(builder)
        ids = self._reused_ids(messages, tools, media, builder.tokenizer, builder.chat_template_kwargs, reason)
        if ids is None:
            ids = await super().ct_build_initial_tokens(messages, tools=tools, **media)  # type: ignore[misc]
        return ids

    async def apply_chat_template(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **rest: Any
    ) -> list[int]:
        """The same where verl builds prompts without continuous tokens. Also called for messages of later turns."""
        ids = None
        if not rest.get("remove_system_prompt"):
            reason = None if self.processor is None else "prompts are rendered by a processor"
            ids = self._reused_ids(messages, tools, rest, self.tokenizer, self.apply_chat_template_kwargs, reason)
        if ids is None:
            ids = await super().apply_chat_template(messages, tools=tools, **rest)  # type: ignore[misc]
        return ids

    async def _once_for_images(
        self, messages: list[dict[str, Any]], tools: Any, images: list[Any], make: Callable[[], Awaitable[list[int]]]
    ) -> list[int]:
        """The ids of a prompt with images, which another sample of it may have made."""
        builder = self.continuous_token_builder
        kind: Any = type(builder)
        reason: Any = _UNSUPPORTED_LOOP or problem(kind)
        if reason is None:
            key = await self.loop.run_in_executor(None, key_of, builder, messages, tools, images)
            if isinstance(key, tuple):
                return await made_once((*key, self.rollout_config.prompt_length), make)
            reason = key
        _log(reason)
        return await make()

    def _reused_ids(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        media: Mapping[str, Any],
        tokenizer: Any,
        kwargs: Mapping[str, Any],
        reason: str | None,
    ) -> list[int] | None:
        """The row's ids, or None if verl must tokenize the prompt: for `reason`, or for one that is found here."""
        if reason is None and any(media.get(name) for name in ("images", "videos", "audios")):
            reason = "images, videos or audio"
        reason = _UNSUPPORTED_LOOP or reason or self._other_ids_reason(messages, tools, tokenizer, kwargs)
        if reason is None:
            ids = self._row_ids
            return self._cap_text_prompt_length(ids.tolist() if hasattr(ids, "tolist") else list(ids))  # type: ignore
        _log(reason)
        return None

    def _other_ids_reason(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        tokenizer: Any,
        kwargs: Mapping[str, Any],
    ) -> str | None:
        """Why the row's ids may differ from verl's, or None if they are the same."""
        if self._row_ids is None or self._row_digest is None:
            return f"rows have no {IDS_KEY} and {DIGEST_KEY}: set +data.gpuload.reuse_ids=true"
        source = source_digest(tokenizer, kwargs, tools)
        if source is None:
            return "reuse does not support this tokenizer or these apply_chat_template_kwargs"
        if self._row_digest == prompt_digest(source, messages):
            return None
        if source_of(self._row_digest) != source:
            return "the loader used another tokenizer, chat template, apply_chat_template_kwargs, tools or date"
        return "messages were changed after loading"


def _log(reason: str) -> None:
    if reason not in _logged_reasons:
        _logged_reasons.add(reason)
        logger.warning(_NOT_REUSED, reason)


def _overridden_rendering(builder: Any) -> str | None:
    """Why a prompt builder may build other ids than the chat template, or None."""
    stock = imported(_BUILDER)[0]["ContinuousTokenBuilder"]  # since verl 0.9.0, as its callers
    for method in ("build_initial_tokens", "_render_tokens"):
        if getattr(type(builder), method, None) is not getattr(stock, method):
            return f"{type(builder).__name__} overrides {method}"
    return None


class SingleTurnAgentLoop(_ReuseIdsMixin, VerlSingleTurnAgentLoop):  # type: ignore[misc]
    """verl's `single_turn_agent`."""


class ToolAgentLoop(_ReuseIdsMixin, VerlToolAgentLoop):  # type: ignore[misc]
    """verl's `tool_agent`."""
