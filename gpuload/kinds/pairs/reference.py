"""The tokenizer of a load of preference data: what it makes of a pair, and of a prompt with one completion.

As TRL prepares them: the prompt is rendered and encoded alone, with a generation prompt, and with each completion. A
completion begins where its ids first differ from those of the prompt; those of a pair begin at the same place.
"""

from typing import Any

from gpuload.core.arrays import common_prefix
from gpuload.core.marks import CHOSEN, LOSS, REJECTED
from gpuload.core.options import Objective
from gpuload.kinds.chats.malformed import problem_in
from gpuload.kinds.training_reference import TrainingReference, answers_in, own_arguments, own_problem
from gpuload.reference.reference import problem


class PairReference(TrainingReference):
    """As `TrainingReference`; ids have the bits (`gpuload.core.marks`) of an objective."""

    def __init__(self, tokenizer: Any, objective: Objective, **settings: Any):
        super().__init__(tokenizer, **settings)
        self.objective = objective

    @property
    def prompts_alone(self) -> bool:
        return self.objective != "rm"

    def problem(self, prompt: Any) -> str | None:
        if reason := problem_in(prompt):
            return reason
        parts = [prompt[name] for name in ("prompt", *answers_in(prompt))]
        if all(isinstance(part, str) for part in parts):
            return None
        if any(isinstance(part, str) for part in parts):
            return "prompt and completions are not all messages"
        return next(filter(None, map(problem, parts)), None) or own_problem(prompt)

    def texts(self, row: Any) -> list[str]:
        """The texts of one row as they are encoded: the prompt with each completion, then the prompt alone if the
        objective has prompts."""
        prompt, completions = row["prompt"], [row[name] for name in answers_in(row)]
        alone = self.prompts_alone
        if isinstance(prompt, str):
            return [prompt + self.with_eos(each) for each in completions] + [prompt] * alone
        call = self.call_with(own_arguments(row))
        whole = [call.render(call.marked(prompt + each)) for each in completions]
        if alone:
            call = self.call_with(own_arguments(row), prompt_only=True)
            whole.append(call.render(call.marked(prompt)))
        return whole

    def render(self, prompt: Any) -> str:
        """The text of one row: the prompt with the first completion."""
        return self.texts(prompt)[0]

    def ids(self, prompt: Any) -> list[int]:
        """The ids of one row: {"prompt", "chosen", "rejected"} or {"prompt", "completion"}, maybe with arguments of its
        own."""
        whole, alone = self.encoded(prompt)
        if alone is None:
            return _paired(whole, common_prefix(*whole))
        begins = [common_prefix(alone, ids) for ids in whole]
        shared = min(begins)
        if self.objective == "dpo":
            begins = [shared, shared]
        marked = [_with_bit(ids, int(LOSS), begin) for ids, begin in zip(whole, begins, strict=True)]
        return marked[0] if len(marked) == 1 else _paired(marked, shared)

    def encoded(self, prompt: Any) -> tuple[list[list[int]], list[int] | None]:
        """The ids of a row's prompt with each of its completions; and of the prompt alone, if the objective has any."""
        start, completions = prompt["prompt"], [prompt[name] for name in answers_in(prompt)]
        if isinstance(start, str):
            encode = self.tokenizer
            whole = [list(encode(start + self.with_eos(each))["input_ids"]) for each in completions]
            return whole, list(encode(start)["input_ids"]) if self.prompts_alone else None
        call = self.call_with(own_arguments(prompt))
        whole = [call.ids(start + each) for each in completions]
        alone = self.call_with(own_arguments(prompt), prompt_only=True)
        return whole, alone.ids(start) if self.prompts_alone else None

    @property
    def variant(self) -> str:
        return f"{super().variant} for {self.objective}"


def _with_bit(ids: list[int], bit: int, begin: int) -> list[int]:
    return ids[:begin] + [token | bit for token in ids[begin:]]


def _paired(sequences: list[list[int]], shared: int) -> list[int]:
    chosen, rejected = sequences
    return _with_bit(chosen, int(CHOSEN), shared) + _with_bit(rejected[shared:], int(REJECTED), 0)
