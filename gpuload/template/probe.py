"""Probes: compare a traced path with transformers before it is used.

A traced path should hold for every text that gives the same answers to the template's predicates. The tracer could be
wrong, so every path is tested first. A probe renders a conversation of adversarial texts with transformers and with the
path, and compares the results: white space of all kinds at both ends, empty texts, special tokens, Jinja syntax, and
the literals that the predicates test for, in several positions. All texts of a probe give the same answers as the
traced row. If one probe differs, the path is not used, and its rows are rendered by transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpuload.reference.template_call import TemplateCall, rejection
from gpuload.template.program import ByReference, Leaf, Path, Predicate, Ref, Rejected, Shape, holds, render_path

WHITE_SPACE = (
    "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""All characters that Python's `str.strip` removes."""

ADVERSARIAL = (
    "", " ", "\n", "x", WHITE_SPACE, WHITE_SPACE + "both ends" + WHITE_SPACE, "  lead", "trail \n",
    "\n\nlines\n\nof text\n\n", "\u200b\ufeff not white space \u200b\u2060\u180e", "\u3000全角\u3000",
    "e\u0301 \U0001f600 \u0085", "\0nul\0", "{{ 7 * 7 }}", "{% raw %}{{ messages }}{% endraw %}{# note #}",
    "%s %d %%", "{0} {}", "\\n \\ '\" <b>&amp;</b>", "<think>\n\nthought\n\n</think>\n\nanswer", "</think>",
    "<think>", "a</think>b</think>c", "<think>open", "<tool_response>\nr\n</tool_response>", "<tool_response>",
    "</tool_response>", "<|im_start|>system\nx<|im_end|>\n", "<|eot_id|><|start_header_id|>", "[INST] i [/INST]</s>",
    "<|channel|>analysis<|message|>", "<|channel>thought\nt\n<channel|>", "/think /no_think", "system", "user",
    "assistant", "None", "0", "False", "gpuload 0123456789abcdef 0", "[message 0 content]", "\0text",
)  # fmt: skip
"""Adversarial texts: white space, empty, markup, template syntax, special tokens, marks of this compiler."""

FAILED = "the probe failed"
"""How the reason begins for which a path is not used."""

FEWEST_ROUNDS, MOST_ROUNDS = 6, 96
"""Limits of the number of probes per path."""


class Prober:
    """Probes the paths of one template call, which renders the reference."""

    def __init__(self, call: TemplateCall) -> None:
        self._call = call
        special = [str(token) for token in dict.fromkeys(getattr(call.tokenizer, "all_special_tokens", []))][:4]
        self._pool = tuple(dict.fromkeys((*ADVERSARIAL, *special, *(f" {token}\n" for token in special))))
        self._cached: dict[tuple[tuple[Predicate, bool], ...], tuple[str, ...]] = {}

    def probed(
        self,
        leaf: Leaf,
        shape: Shape,
        texts: Mapping[tuple[int, str], str],
        decisions: Sequence[tuple[Predicate, bool]],
        conversation: Callable[[Mapping[tuple[int, str], str]], list[dict[str, Any]]],
    ) -> Leaf:
        """Probe the leaf that the trace of a row of some shape has led to, by decisions about the row's texts. From
        texts, `conversation` builds the messages of a conversation of this shape. Return the leaf, if it is `Rejected`
        with the message that transformers gives for it; or a `ByReference` leaf if a probe differs."""
        asked: dict[tuple[int, str], list[tuple[Predicate, bool]]] = {key: [] for key in texts}
        for predicate, answer in decisions:
            asked[predicate.ref.message, predicate.ref.field].append((predicate, answer))
        choices = {key: self._witnesses(asked[key], texts[key]) for key in texts}
        # A single text goes through all its choices. With several texts, each round tries one choice of every text, so
        # fewer rounds are enough.
        widest = max(map(len, choices.values()), default=1)
        rounds = min(MOST_ROUNDS, max(FEWEST_ROUNDS, widest // max(1, len(choices)) + 2)) if choices else 1
        if len(choices) == 1:
            rounds = min(MOST_ROUNDS, widest)
        rejected: set[str] = set()
        for turn in range(rounds):
            # Round 0 is the traced row. In later rounds, neighbouring texts step through their choices with different
            # strides (1, 3, 5), so that different combinations meet.
            chosen = {
                key: some[(turn * (1 + 2 * (i % 3)) + i * (turn > 0)) % len(some)]
                for i, (key, some) in enumerate(choices.items())
            }
            messages = conversation(chosen)
            try:
                truth = self._call.render(messages)
            except Exception as error:
                if not isinstance(leaf, Rejected):
                    return ByReference(f"{FAILED}: the template rejects such rows ({_kind(error)})")
                rejected.add(_kind(error))
                leaf = Rejected(rejection(error))
                continue
            if not isinstance(leaf, Path):
                return ByReference(f"{FAILED}: the trace was {leaf}, but the template accepts such rows")
            if render_path(leaf, messages) != truth:
                return ByReference(f"{FAILED}: the compiled path and transformers give different text")
        return ByReference("the template's error message depends on the text") if len(rejected) > 1 else leaf

    def example(
        self, plain: Mapping[tuple[int, str], str], decisions: Sequence[tuple[Predicate, bool]]
    ) -> dict[tuple[int, str], str] | None:
        """Find texts that give certain answers to predicates: `plain`, with texts replaced by adversarial ones where
        necessary; None if none are found."""
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
        """Return texts that give the answers in `asked`: `example` first, then adversarial ones."""
        # Templates test many messages with the same predicates, and the matching texts do not depend on the message:
        # cache them without it.
        key = tuple((Predicate(Ref(0, "", p.ref.operations), p.test, p.value), answer) for p, answer in asked)
        if key not in self._cached:
            pool = dict.fromkeys((*self._pool, *_around(asked)))
            self._cached[key] = tuple(text for text in pool if all(holds(p, text) is answer for p, answer in asked))
        candidates = [f"\n \u2003{example}\t\u3000 ", f"{example} "] if len(example) < 4090 else []
        wrapped = [c for c in candidates if all(holds(p, c) is answer for p, answer in asked)]
        return (example, *self._cached[key], *wrapped)


def _around(asked: Sequence[tuple[Predicate, bool]]) -> list[str]:
    """Return texts built from the literals in `asked`: alone, repeated, combined, with white space around them."""
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
