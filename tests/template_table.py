"""Write `docs/templates.md`: which chat templates compile, for which conversations, and what stops the others.

    PYTHONPATH=.:tests python tests/template_table.py      # from the repository's root; again when TRL is updated

A template is tried on conversations of each kind, following every answer to its questions for which a text is found. It
is *compiled* for a kind where every such way ends in a path (or in the template's own rejection), *partly* where some
do, and left to the *reference* where none does.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from template_cases import TEMPLATES

from gpuload.template import compile
from gpuload.template.program import TEXT, ByReference, Rejected, Shape

PAGE = Path(__file__).parents[1] / "docs" / "templates.md"
KINDS = {
    "user": ("user",),
    "system, user": ("system", "user"),
    "with an answer": ("user", "assistant", "user"),
    "with answers": ("system", "user", "assistant", "user", "assistant", "user"),
}


def shape_of(roles: tuple[str, ...]) -> Shape:
    """Messages of those roles with text in them."""
    return tuple((("role", role), ("content", TEXT)) for role in roles)


def outcome(name: str, roles: tuple[str, ...]) -> tuple[str, list[str]]:
    """What becomes of conversations with those roles: a word, and the constructs that stop the compiler."""
    tokenizer, template = TEMPLATES[name]
    program = compile(tokenizer, chat_template=template)
    leaves = [leaf for _, leaf in program.explore(shape_of(roles), most=24).leaves() if leaf is not None]
    reasons = sorted({leaf.reason for leaf in leaves if isinstance(leaf, ByReference)})
    if not reasons:
        return ("rejected" if all(isinstance(leaf, Rejected) for leaf in leaves) else "compiled"), []
    return ("partly" if len(leaves) > sum(isinstance(leaf, ByReference) for leaf in leaves) else "reference"), reasons


def rows() -> list[str]:
    """The table, a line a template."""
    lines = ["| template | " + " | ".join(KINDS) + " | stopped by |", "|---|" + "---|" * (len(KINDS) + 1)]
    for name in TEMPLATES:
        found = [outcome(name, roles) for roles in KINDS.values()]
        reasons = sorted({reason for _, some in found for reason in some})
        lines.append(
            f"| {name} | "
            + " | ".join(word for word, _ in found)
            + f" | {'; '.join(reasons).replace('|', chr(92) + '|')} |"
        )
    return lines


HEAD = """# Chat templates, compiled

Written by `python tests/template_table.py` with trl {trl} and transformers {transformers}. `trl/` are the
templates in TRL's wheel, `shared/` those of further tokenizers at hand. *compiled*: every way through the template
for such conversations is a list of text pieces. *partly*: rows that take some ways are rendered by transformers, one
by one, for the reason in the last column. *rejected*: the template itself rejects them.

"""


def page() -> str:
    """The whole page."""
    return HEAD.format(trl=version("trl"), transformers=version("transformers")) + "\n".join(rows()) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
