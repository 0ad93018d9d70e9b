"""The reference: the tokenizer object that the user passed. Its output is correct by definition, whatever its file
says.

Every fast path is verified against these few calls, and falls back to them for what it does not support.
"""

import copy
import hashlib
import inspect
import json
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Self

from gpuload.core.backends import snapshot, stored_pad_token, with_own_settings
from gpuload.core.errors import TokenizerError
from gpuload.core.lazy import imported
from gpuload.core.memory import garbage_collection_paused, room_to_encode
from gpuload.core.options import is_template, template_source
from gpuload.reference.control_tokens import FIRST_VERSION
from gpuload.reference.hub import hub_problem, is_closed, is_path
from gpuload.reference.made_columns import MadeColumns
from gpuload.reference.own_rendering import OWN_ENCODING, renders_its_own_way
from gpuload.reference.template_call import TemplateCall, describe_error, first_line
from gpuload.reference.vocabulary import check_vocabulary, is_id
from gpuload.reference.volatile import Clock

Prompt = str | list[dict[str, Any]]


class Reference:
    """The two calls that define every token: render a prompt, encode the text.

    Args:
        tokenizer: a path of a directory or a tokenizer.json, a hub id, a transformers tokenizer (fast or slow) or a
            `tokenizers.Tokenizer`.
        chat_template: "default", a template's name or text, the path of a `.jinja` file, or None for plain strings.
        template_kwargs: further arguments of `apply_chat_template` (`tools`, `enable_thinking`, ...).
        pad_token_id: the padding token, instead of the tokenizer's own.
        trust_remote_code: as `AutoTokenizer.from_pretrained` takes it, for a tokenizer given by name.

    Attributes:
        tokenizer: the transformers tokenizer.
        calling: the same with settings of its own, for calls that make ids: see `with_own_settings`.
        name: its path or hub id, or the name of its class.
        by_name: whether it was given by its path or hub id.
        uses_template: whether prompts are rendered.
        call: how prompts are rendered: template, tools and other constants.
        made: columns that are made together with ids, of images.
        sample_share: of the seconds for which a sample of rows is compared, see `pipeline/verify.py`.

    Raises:
        OptionError: the file of the chat template cannot be read.
        TokenizerError: the tokenizer cannot be loaded, has no vocabulary, or not the chat template that is asked for.
    """

    made: MadeColumns | None = None
    sample_share = 1.0

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | os.PathLike[str] | None = "default",
        template_kwargs: Mapping[str, Any] | None = None,
        pad_token_id: int | None = None,
        trust_remote_code: bool = False,
    ):
        if multiprocessing.parent_process() is not None:
            # A forked process inherits the locks of its parent's threads but not the threads: with this variable set to
            # true, tokenizers would wait for them forever.
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.by_name = isinstance(tokenizer, str | os.PathLike)
        self.tokenizer = _load(tokenizer, trust_remote_code)
        check_vocabulary(self.tokenizer)
        self.name = getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__
        self.uses_template, kwargs = chat_template is not None, dict(template_kwargs or {})
        template = None if chat_template in (None, "default") else self._template(chat_template)
        tools = kwargs.pop("tools", None)
        generation_prompt = bool(kwargs.pop("add_generation_prompt", True))
        self.calling = with_own_settings(self.tokenizer)
        self.call = TemplateCall(self.tokenizer, template, tools, kwargs, generation_prompt, calling=self.calling)
        if self.uses_template:
            self._check_arguments()
            if not renders_its_own_way(self.tokenizer):
                self._check_template()
        self._pad_token_id = pad_token_id

    def _template(self, given: str | os.PathLike[str], option: str = "chat_template") -> str:
        """The name or text of a template that an option gives by name, as text or as a file."""
        text = template_source(given)
        named = self.tokenizer.chat_template if isinstance(self.tokenizer.chat_template, Mapping) else {}
        if text in named or is_template(text):
            return text
        names = ", ".join(map(repr, {"default": None, **named}))
        raise TokenizerError(
            f"{option}={text!r:.80}: tokenizer {self.name} has no template of this name, and text without {{{{ or "
            f"{{% is not a template: pass one of {names}, the text of a template, or the path of a .jinja file"
        )

    def _check_arguments(self) -> None:
        if not self.call.sanitizes:
            return
        # An argument that `apply_chat_template` does not know is only a variable of the template, without any effect.
        if "sanitize_control_tokens" not in inspect.signature(type(self.tokenizer).apply_chat_template).parameters:
            import transformers

            raise TokenizerError(
                "apply_chat_template_kwargs.sanitize_control_tokens is not supported by apply_chat_template of "
                f"{type(self.tokenizer).__name__} in transformers {transformers.__version__}: remove it, or use a "
                f"tokenizer of transformers {FIRST_VERSION} or later"
            )

    def _check_template(self) -> None:
        try:
            wrong = self.call.syntax_error()
        except Exception as error:
            raise TokenizerError(
                f"tokenizer {self.name} has no usable chat template ({first_line(error):.120}): pass the text "
                "of one as chat_template=..., or chat_template=None if the prompts are plain strings"
            ) from error
        if wrong is not None:
            if self.call.template is not None and is_template(self.call.template):
                raise TokenizerError(f"chat_template=...: {wrong}: correct the template")
            raise TokenizerError(f"chat template of {self.name}, {wrong}: correct the template")

    @cached_property
    def template_text(self) -> str:
        """The source of the chat template; empty if none is used, or a class renders prompts in its own way."""
        return "" if not self.uses_template or renders_its_own_way(self.tokenizer) else self.call.text()

    @property
    def pad_token_id(self) -> int:
        """The padding token: the one given, or else the tokenizer's own, or else its `eos_token_id`.

        Raises:
            TokenizerError: there is none of them, or the one given is no id of this tokenizer.
        """
        if self._pad_token_id is not None:
            if not is_id(self._pad_token_id, self.tokenizer):
                raise TokenizerError(
                    f"pad_token_id={self._pad_token_id}: tokenizer {self.name} has ids from 0 to "
                    f"{len(self.tokenizer) - 1}: pass one of them"
                )
            return self._pad_token_id
        for token_id in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token_id is not None:
                return int(token_id)
        raise TokenizerError(
            f"tokenizer {self.name} has neither a pad token nor an eos token: set tokenizer.pad_token, or pass "
            "pad_token_id=..."
        )

    @property
    def backend(self) -> Any | None:
        """The `tokenizers.Tokenizer` inside; None for a slow tokenizer."""
        return getattr(self.tokenizer, "backend_tokenizer", None)

    @cached_property
    def _snapshot(self) -> Callable[[], bytes]:
        return snapshot(self.backend)

    @cached_property
    def _model(self) -> bytes:
        return self._snapshot()

    @cached_property
    def model_json(self) -> str:
        """The backend as the text of a tokenizer.json: several megabytes, made once."""
        return self._model.decode()

    @property
    def encodes_rendered_text(self) -> bool:
        """Whether the ids of a prompt are the ids of its rendered text. Some arguments change that, and so may a class
        that overrides `apply_chat_template`."""
        return not renders_its_own_way(self.tokenizer) and not any(map(self.call.kwargs.get, OWN_ENCODING))

    @property
    def sanitizes(self) -> bool:
        """Whether control tokens in messages are encoded as plain text. Then rendered texts have marks, see
        `control_tokens.py`."""
        return self.uses_template and self.call.sanitizes

    def render(self, prompt: Prompt) -> str:
        """The text of one prompt. A plain string is one user message, or itself without a chat template.

        Raises:
            Exception: whatever the template raises for a conversation that it rejects.
        """
        return self.call.render(self.call.marked(messages_of(prompt))) if self.uses_template else _plain(prompt)

    def ids(self, prompt: Prompt) -> list[int]:
        """The token ids of one prompt, rendered and encoded in one call: correct by definition."""
        return self.call.ids(messages_of(prompt)) if self.uses_template else self.encode(_plain(prompt))

    def at(self, instant: Any) -> Self:
        """The same tokenizer, whose template sees another time of day, see `TemplateCall`."""
        other = copy.copy(self)
        other.call = replace(self.call, instant=instant)
        return other

    def clock_stopped(self) -> AbstractContextManager[Clock | None]:
        """Makes the template see the same time for all rows, see `TemplateCall.clock_stopped`."""
        return self.call.clock_stopped()

    def problem(self, prompt: Any) -> str | None:
        """Why nothing can be made of a prompt, whatever the template; None if it may."""
        return problem(prompt)

    @property
    def keeps_nulls(self) -> bool:
        """Whether the load has an option that removes nulls from messages, which is not set."""
        return False

    def remedy(self, prompt: Any) -> str:
        """What would make the template accept a row that it rejects, as the end of a reason; empty if nothing is
        known."""
        return ""

    def compared(self, prompt: Prompt, found: list[int]) -> tuple[list[int], list[int]]:
        """The ids of one prompt, and those that a fast path has found, as they are to be compared."""
        return self.ids(prompt), found

    def compared_in_part(
        self, prompt: Prompt, found: list[int], below: Callable[[int], int]
    ) -> tuple[list[int], list[int]]:
        """As `compared`, of one row of a sample: some of it may be enough. `below(n)` is a random number below n."""
        return self.compared(prompt, found)

    def is_unreadable(self, error: Exception) -> bool:
        """Whether an error of `compared` is one of files that the ids do not depend on: it says nothing about them."""
        return False

    @property
    def answers(self) -> Any:
        """Finds the parts of a rendered conversation that have loss (`template.answers.Answers`); None: nobody asks."""
        return None

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without adding special tokens."""
        with room_to_encode(len(text)):
            return list(self.calling(text, add_special_tokens=False)["input_ids"])

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for several texts in one call."""
        return [list(ids) for ids in self.calling(list(texts), add_special_tokens=False)["input_ids"]]

    def special_texts(self) -> list[str]:
        """The texts of all added tokens (`<|im_start|>` ...)."""
        return [str(token) for token in self.tokenizer.get_added_vocab()]

    def fingerprint(self) -> str:
        """Identifies the tokenizer: model, added tokens, template and its constants."""
        return self.fingerprint_later()()

    def fingerprint_later(self) -> Callable[[], str]:
        """What makes the fingerprint of the tokenizer as it is now: a tenth of a second, if nobody has asked before."""
        _ = self._model_digest if self.backend is None else self._snapshot
        return partial(_fingerprint, lambda: self._model_digest, self.settings(), self.variant)

    def settings(self) -> str:
        """What identifies the tokenizer apart from its backend."""
        call, kind = self.call, type(self.tokenizer)
        rest = [kind.__module__, kind.__qualname__, self.tokenizer.chat_template, self.uses_template]
        rest += [self.tokenizer.special_tokens_map]  # variables of the template, which the backend may not know
        rest += [call.template, call.tools, call.kwargs, call.add_generation_prompt]
        if self.sanitizes:
            rest += [call.control.texts]
        return repr(rest)

    @property
    def variant(self) -> str:
        """What else decides the ids, in words: the end of the fingerprint."""
        return ""

    @cached_property
    def _model_digest(self) -> bytes:
        slow = self.backend is None
        return _digest_of(json.dumps(sorted(self.tokenizer.get_vocab().items())).encode() if slow else self._model)


def _fingerprint(model: Callable[[], bytes], rest: str, variant: str) -> str:
    return hashlib.blake2b(model() + rest.encode(errors="backslashreplace"), digest_size=12).hexdigest() + variant


def _digest_of(model: bytes) -> bytes:
    # An object of `tokenizers` 1.0 begins with the padding and truncation of the last call, which identify nothing.
    return hashlib.blake2b(model.partition(b'"added_tokens":')[2] or model, digest_size=12).digest()


_PLAIN = (str, list, dict, bool, int, float)
"""What a content may be. Of other values, such as bytes and times, templates print the type only."""


def problem(prompt: Any) -> str | None:
    """Why no template can render a prompt: nulls, empty lists, values that are not messages. None if it may."""
    if prompt is None:
        return "prompt is null"
    if isinstance(prompt, str):
        return None
    if not isinstance(prompt, list):
        return f"prompt is neither a string nor a list of messages, but of type {type(prompt).__name__}"
    if not prompt:
        return "prompt is an empty list"
    for number, message in enumerate(prompt):
        if type(message) is dict and type(message.get("content")) is type(message.get("role")) is str:
            continue  # nearly all: nothing else has to be looked at
        if not isinstance(message, Mapping):
            return f"message {number} is {'null' if message is None else f'not an object: {message!r:.40}'}"
        role = message.get("role")
        if role is not None and not isinstance(role, str):
            return f"role of message {number} is of type {type(role).__name__}, not text"
        content = message.get("content")
        if content is not None and not isinstance(content, _PLAIN):
            return f"content of message {number} is of type {type(content).__name__}, not text"
        for place, part in enumerate(content if isinstance(content, list) else []):
            if isinstance(part, Mapping) and part.get("type") == "text" and part.get("text") is None:
                fields = ", ".join(str(name) for name, value in part.items() if value is not None)
                return f"part {place} of the content of message {number} has no text, but the fields {fields}"
        if content is None and not message.get("tool_calls"):
            return f"content of message {number} is {'null' if 'content' in message else 'missing'}"
    return None


def messages_of(prompt: Prompt) -> list[dict[str, Any]]:
    """The messages of a prompt: a plain string is one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _plain(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    raise ValueError("chat_template=None expects plain strings, but this prompt is a list of messages")


def _from_file(name: str, trust_remote_code: bool) -> Any:
    """The tokenizer of a tokenizer.json: that of its directory, whose other files have the chat template and the
    special tokens; by itself if it is alone."""
    from transformers import PreTrainedTokenizerFast

    directory, base = os.path.split(name)
    if base == "tokenizer.json" and os.path.isfile(os.path.join(directory, "tokenizer_config.json")):
        return _load(directory or os.curdir, trust_remote_code)
    try:
        return PreTrainedTokenizerFast(tokenizer_file=name)
    except Exception as error:
        raise TokenizerError(
            f"tokenizer {name!r}: not the JSON file of a tokenizer ({type(error).__name__}: {error!s:.200}): pass its "
            "directory, or a tokenizer.json"
        ) from error


@garbage_collection_paused()  # that of transformers' modules and a vocabulary takes a tenth of a second
def _load(tokenizer: Any, trust_remote_code: bool) -> Any:
    if tokenizer is None:
        raise TokenizerError("no tokenizer given: pass a path, a hub id or a tokenizer object as the second argument")
    transformers = imported("transformers")
    if isinstance(tokenizer, str | os.PathLike):
        name = os.path.expanduser(os.fspath(tokenizer))
        if os.path.isfile(name):
            return _from_file(name, trust_remote_code)
        is_local = os.path.isdir(name)
        if (is_local or is_path(name)) and is_closed(name):
            raise TokenizerError(f"tokenizer {name!r}: no permission to read this directory: change its mode or owner")
        if not is_local and is_path(name):
            raise TokenizerError(f"tokenizer {name!r}: no such directory: check the path")
        unreachable = None if is_local else hub_problem()
        more = {"local_files_only": True} if unreachable else {}
        try:
            return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **more)
        except Exception as error:
            if unreachable:
                raise TokenizerError(
                    f"tokenizer {name!r}: not a local directory, it was not downloaded before, and the hub cannot be "
                    f"reached ({unreachable}): check the network, or pass a directory"
                ) from error
            where = "not a local directory, and the download from the hub failed"
            where = "cannot be loaded from this directory" if is_local else where
            raise TokenizerError(f"tokenizer {name!r}: {where} ({describe_error(error):.300})") from error
    if type(tokenizer).__module__.split(".")[0] == "tokenizers":
        return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=stored_pad_token(tokenizer))
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
        raise TokenizerError(
            f"tokenizer has the unsupported type {type(tokenizer).__name__}: pass a path, a hub id, a transformers "
            "tokenizer or a tokenizers.Tokenizer" + (", such as processor.tokenizer" * hasattr(tokenizer, "tokenizer"))
        )
    return tokenizer
