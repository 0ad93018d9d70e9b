"""The tokenizer of a load for SFT: what it makes of a conversation, of a prompt with its completion, and of a text.

A completion begins where its ids first differ from those of the prompt alone.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from gpuload.core.arrays import common_prefix
from gpuload.core.errors import OptionError, TokenizerError
from gpuload.core.marks import IDS, LOSS, loss_bits
from gpuload.core.options import LossOn
from gpuload.kinds.chats.malformed import problem_in
from gpuload.kinds.training_reference import TrainingReference, messages_in, own_arguments, own_problem
from gpuload.reference.mask_rules import mask_rules
from gpuload.reference.reference import problem
from gpuload.template.answers import Answers, has_blocks
from gpuload.template.loss_marks import mark_problem
from gpuload.template.marks import UnknownAnswersError


class ChatReference(TrainingReference):
    """As `TrainingReference`; ids with loss have a bit (`gpuload.core.marks`).

    Args:
        loss_on: which tokens have loss: those of all answers ("assistant"), of the last one ("last"), of those that
            messages say ("marked"), of the completion or "all".
        weights: of the loss, other than 0 and 1, that messages may have.

    Raises:
        OptionError: as for `Reference`; or control tokens are to be sanitized.
        TokenizerError: as for `Reference`; or the tokenizer encodes conversations in its own way.
    """

    def __init__(self, tokenizer: Any, loss_on: LossOn, weights: Sequence[float] = (), **settings: Any):
        super().__init__(tokenizer, **settings)
        self.loss_on, self.weights = loss_on, weights
        if self.sanitizes:
            raise OptionError(
                "apply_chat_template_kwargs.sanitize_control_tokens is not supported by load_chats, because "
                "transformers makes no loss masks with it: remove it"
            )
        if not self.encodes_rendered_text:
            raise TokenizerError(
                f"{type(self.tokenizer).__name__} renders and encodes in its own way, so which of its tokens have loss "
                "is unknown: use a tokenizer with the methods of PreTrainedTokenizerBase"
            )

    @cached_property
    def answers(self) -> Answers | None:
        if self.loss_on not in ("assistant", "last", "marked"):
            return None
        return Answers(self.call, self.loss_on, self.weights)

    def problem(self, prompt: Any) -> str | None:
        if reason := problem_in(prompt):
            return reason
        if isinstance(prompt, dict) and "prompt" in prompt:
            parts = prompt["prompt"], prompt["completion"]
            if None not in parts and not any(all(isinstance(part, kind) for part in parts) for kind in (str, list)):
                return "prompt and completion are neither both text nor both messages"
        elif self.uses_template and isinstance(messages_in(prompt), str):
            return "the row is text, in a column of messages"
        messages = messages_in(prompt)
        if reason := problem(messages) or own_problem(prompt):
            return reason
        return mark_problem(messages) if self.loss_on == "marked" and isinstance(messages, list) else None

    def texts(self, row: Any) -> list[str]:
        """The texts of a row of messages as they are encoded: all of it, and the prompt alone if there is one."""
        texts = [self.render(row)]
        if isinstance(row, dict) and "prompt" in row:
            texts.append(self.call_with(own_arguments(row), prompt_only=True).render(row["prompt"]))
        return texts

    def render(self, prompt: Any) -> str:
        """The text of one row: all of it, as it is encoded."""
        messages = messages_in(prompt)
        if isinstance(messages, str):
            return self.with_eos(messages)
        return self.call_with(own_arguments(prompt)).render(messages)

    def ids(self, prompt: Any) -> list[int]:
        """The ids of one row: messages, a text, {"prompt", "completion"}, or {"messages"}; dicts may have arguments of
        their own."""
        return self._ids(prompt, self.answers)

    def _ids(self, prompt: Any, answers: Answers | None) -> list[int]:
        if isinstance(prompt, str):
            return [token | int(LOSS) for token in self.with_special_tokens(self.with_eos(prompt))]
        if isinstance(prompt, dict) and "prompt" in prompt:
            return self._completion(prompt["prompt"], prompt["completion"], own_arguments(prompt), answers)
        return self._messages(messages_in(prompt), own_arguments(prompt), answers)

    def compared(self, prompt: Any, found: list[int]) -> tuple[list[int], list[int]]:
        """As in `Reference`. Where only the compiled template knows the answers, their loss is not compared."""
        try:
            return self.ids(prompt), found
        except UnknownAnswersError:
            expected, found = ([token & int(IDS) for token in ids] for ids in (self._ids(prompt, None), found))
            return expected, found

    def _completion(self, prompt: Any, completion: Any, own: Mapping[str, Any], answers: Answers | None) -> list[int]:
        if isinstance(prompt, str):
            alone = self.with_special_tokens(prompt)
            ids = self.with_special_tokens(prompt + self.with_eos(completion))
            bits = [int(LOSS)] * len(ids)
        else:
            alone = self.call_with(own, prompt_only=True).ids(prompt)
            marked = self._messages(prompt + completion, own, answers)
            ids = [token & int(IDS) for token in marked]
            bits = [int(LOSS) if answers is None else token & ~int(IDS) for token in marked]
        first = 0 if self.loss_on == "all" else common_prefix(alone, ids)
        return [token | bits[k] if k >= first else token for k, token in enumerate(ids)]

    def _messages(self, messages: list[dict[str, Any]], own: Mapping[str, Any], answers: Answers | None) -> list[int]:
        """As transformers computes `return_assistant_tokens_mask` from the answers' places in the text; without blocks,
        as versions before 5.24 do, but the tokens of answers of which the first or last character has no token are
        those with one of their characters.
        """
        call = self.call_with(own)
        text = call.render(messages)
        encoded = self.calling(text, add_special_tokens=False)
        ids = list(encoded["input_ids"])
        if answers is None:
            return [token | int(LOSS) for token in ids] if self.loss_on == "all" else ids
        spans = answers.with_call(call).of_text(messages, text)
        blocks = has_blocks(call.text())
        if blocks and mask_rules().overlapping:
            ahead = list(spans)
            for at, (low, high) in enumerate(encoded.encodings[0].offsets):
                while ahead and ahead[0][1] <= low:
                    del ahead[0]
                if ahead and ahead[0][0] < high:
                    ids[at] |= int(loss_bits(*ahead[0][2:] or [0]))
            return ids
        places = [(encoded.char_to_token(start), encoded.char_to_token(max(end - 1, 0))) for start, end, *_ in spans]
        if any(None in place for place in places) and not blocks:
            for at, (low, high) in enumerate(encoded.encodings[0].offsets):
                some = [span for span in spans if max(low, span[0]) < min(high, span[1])]
                ids[at] |= int(loss_bits(*some[0][2:] or [0])) if some else 0
            return ids
        for (first, last), (_, end, *number) in zip(places, spans, strict=True):
            if first is None:
                break
            if not end:  # an empty block at the start of the text, at which transformers fails, marks nothing
                continue
            for at in range(first, last + 1 if last else len(ids)):
                ids[at] |= 0 if ids[at] & int(LOSS) else int(loss_bits(*number or [0]))
        return ids

    @property
    def variant(self) -> str:
        weights = f", weights {', '.join(map(str, self.weights))}" if self.weights else ""
        return f"{super().variant} loss on {self.loss_on}{weights}"
