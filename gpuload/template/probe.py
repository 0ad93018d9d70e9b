"""Trust, but verify: hostile conversations through the real template and through the path.

A traced path is meant to hold for every text that answers the template's questions alike. Before it is used, it is held
against the reference on texts chosen to break it: white space of every kind at both ends, nothing at all, special
tokens, Jinja syntax, the very literals that the template asks about, in every position. A path that fails once is not
used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpuload.reference.template_call import TemplateCall, rejection
from gpuload.template.program import (
    ByReference,
    Leaf,
    Path,
    Predicate,
    Ref,
    Rejected,
    Shape,
    holds,
    render_path,
)

__all__ = ["HOSTILE", "WHITE_SPACE", "Prober"]

WHITE_SPACE = "".join(c for c in map(chr, range(0x3001)) if c.isspace())
"""Every character that Python's `strip` removes."""

HOSTILE = (
    "", " ", "\n", "x", WHITE_SPACE, WHITE_SPACE + "both ends" + WHITE_SPACE, "  lead", "trail \n",
    "\n\nlines\n\nof text\n\n", "\u200b\ufeff not white space \u200b\u2060\u180e", "\u3000全角\u3000",
    "e\u0301 \U0001f600 \u0085", "\0nul\0", "{{ 7 * 7 }}", "{% raw %}{{ messages }}{% endraw %}{# note #}",
    "%s %d %%", "{0} {}", "\\n \\ '\" <b>&amp;</b>", "<think>\n\nthought\n\n</think>\n\nanswer", "</think>",
    "<think>", "a</think>b</think>c", "<think>open", "<tool_response>\nr\n</tool_response>", "<tool_response>",
    "</tool_response>", "<|im_start|>system\nx<|im_end|>\n", "<|eot_id|><|start_header_id|>", "[INST] i [/INST]</s>",
    "<|channel|>analysis<|message|>", "<|channel>thought\nt\n<channel|>", "/think /no_think", "system", "user",
    "assistant", "None", "0", "False", "gpuload 0123456789abcdef 0", "[message 0 content]", "\0text",
)  # fmt: skip
"""Texts that have broken template engines, or could."""

FEWEST_ROUNDS, MOST_ROUNDS = 6, 96


class Prober:
    """Probes paths of one call."""

    def __init__(self, call: TemplateCall) -> None:
        self._call = call
        special = [str(token) for token in dict.fromkeys(getattr(call.tokenizer, "all_special_tokens", []))][:4]
        self._pool = tuple(dict.fromkeys((*HOSTILE, *special, *(f" {token}\n" for token in special))))
        self._kept: dict[tuple[tuple[Predicate, bool], ...], tuple[str, ...]] = {}

    def probed(
        self,
        leaf: Leaf,
        shape: Shape,
        texts: Mapping[tuple[int, str], str],
        decisions: Sequence[tuple[Predicate, bool]],
        conversation: Callable[[Mapping[tuple[int, str], str]], list[dict[str, Any]]],
    ) -> Leaf:
        """`leaf`, or a `ByReference` leaf where a probe tells otherwise.

        Args:
            leaf: what the trace gave.
            shape: the conversation's shape.
            texts: the example that was traced.
            decisions: the questions that were asked, with the answers.
            conversation: makes the messages of a conversation of this shape from its texts.
        """
        asked: dict[tuple[int, str], list[tuple[Predicate, bool]]] = {key: [] for key in texts}
        for predicate, answer in decisions:
            asked[predicate.ref.message, predicate.ref.field].append((predicate, answer))
        choices = {key: self._witnesses(asked[key], texts[key]) for key in texts}
        widest = max(map(len, choices.values()), default=1)
        rounds = min(MOST_ROUNDS, max(FEWEST_ROUNDS, widest // max(1, len(choices)) + 2)) if choices else 1
        if len(choices) == 1:
            rounds = min(MOST_ROUNDS, widest)
        rejected: set[str] = set()
        for turn in range(rounds):
            # Round 0 is the example itself; then each text moves through its choices, out of step with its neighbours.
            chosen = {
                key: some[(turn * (1 + 2 * (i % 3)) + i * (turn > 0)) % len(some)]
                for i, (key, some) in enumerate(choices.items())
            }
            messages = conversation(chosen)
            try:
                truth = self._call.render(messages)
            except Exception as error:
                if not isinstance(leaf, Rejected):
                    return ByReference(f"probe: the template rejects what was traced ({type(error).__name__}: {error})")
                rejected.add(_kind(error))
                leaf = Rejected(rejection(error))
                continue
            if not isinstance(leaf, Path):
                return ByReference(f"probe: the template takes what the trace was rejected ({leaf})")
            if render_path(leaf, messages) != truth:
                return ByReference("probe: the traced path gives other text than the template")
        return ByReference("probe: the rejection depends on the text") if len(rejected) > 1 else leaf

    def example(
        self, plain: Mapping[tuple[int, str], str], decisions: Sequence[tuple[Predicate, bool]]
    ) -> dict[tuple[int, str], str] | None:
        """Texts that give those answers: `plain` ones where they do, or hostile ones; None where none are known."""
        texts = dict(plain)
        for key in plain:
            asked = [(p, answer) for p, answer in decisions if (p.ref.message, p.ref.field) == key]
            for text in (plain[key], *self._witnesses(asked, plain[key])[1:]):
                if all(holds(p, text) is answer for p, answer in asked):
                    texts[key] = text
                    break
            else:
                return None
        return texts

    def _witnesses(self, asked: Sequence[tuple[Predicate, bool]], example: str) -> tuple[str, ...]:
        """Texts that give those answers: the example first, then hostile ones."""
        # The same questions are asked of many messages; which texts answer them does not depend on the message.
        key = tuple((Predicate(Ref(0, "", p.ref.operations), p.test, p.value), answer) for p, answer in asked)
        if key not in self._kept:
            pool = dict.fromkeys((*self._pool, *_around(asked)))
            self._kept[key] = tuple(text for text in pool if all(holds(p, text) is answer for p, answer in asked))
        wrapped = [f"\n \u2003{example}\t\u3000 ", f"{example} "]
        mine = [text for text in wrapped if len(text) < 4096 and all(holds(p, text) is answer for p, answer in asked)]
        return (example, *self._kept[key], *mine)


def _around(asked: Sequence[tuple[Predicate, bool]]) -> list[str]:
    """Texts made of the literals that were asked about, alone and in combination."""
    marks = list(dict.fromkeys(p.value for p, _ in asked if p.value))
    marks += [a for p, _ in asked for o in p.ref.operations for a in o.arguments if a and a not in marks]
    starts = [p.value for p, yes in asked if yes and p.test == "startswith"] or [""]
    ends = [p.value for p, yes in asked if yes and p.test == "endswith"] or [""]
    bodies = [*marks, *(f"a{m}b" for m in marks), *(f" \n{m}\u3000 " for m in marks), *(m + m for m in marks)]
    bodies += [f"a{one}b{two}c" for one in marks for two in marks]
    bodies += [f"\n{m}\n\nthen\n\n" for m in marks] + ["", " ", "x", "\u2003x\n"]
    return bodies + [f"{start}{body}{end}" for start in starts for end in ends for body in bodies]


def _kind(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
