"""Write `docs/templates.md`: which chat templates compile, for which conversations, and why others do not.

    PYTHONPATH=.:tests python tests/template_table.py      # from the repository's root; again when TRL is updated

Each template is tried on conversations of each kind, following both answers of every predicate for which a text is
found. It is *compiled* for a kind if all these paths compile (or are rejected by the template itself), *partly* if some
do, and rendered by the *reference* if none does.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from template_cases import TEMPLATES, compile

from gpuload.template.program import TEXT, ByReference, Rejected, Shape

PAGE = Path(__file__).parents[1] / "docs" / "templates.md"
KINDS = {
    "user": ("user",),
    "system, user": ("system", "user"),
    "with an answer": ("user", "assistant", "user"),
    "with answers": ("system", "user", "assistant", "user", "assistant", "user"),
}


def shape_of(roles: tuple[str, ...]) -> Shape:
    """Return the shape of a conversation with these roles, each message with a text."""
    return tuple((("role", role), ("content", TEXT)) for role in roles)


def outcome(name: str, roles: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return how conversations with these roles are rendered, in one word, and the reasons for the reference."""
    tokenizer, template = TEMPLATES[name]
    program = compile(tokenizer, chat_template=template)
    leaves = [leaf for _, leaf in program.explore(shape_of(roles), most=24).leaves() if leaf is not None]
    reasons = sorted({leaf.reason for leaf in leaves if isinstance(leaf, ByReference)})
    if not reasons:
        return ("rejected" if all(isinstance(leaf, Rejected) for leaf in leaves) else "compiled"), []
    return ("partly" if len(leaves) > sum(isinstance(leaf, ByReference) for leaf in leaves) else "reference"), reasons


def rows() -> list[str]:
    """Return the table, one line per template."""
    lines = ["| template | " + " | ".join(KINDS) + " | reason |", "|---|" + "---|" * (len(KINDS) + 1)]
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
templates in TRL's wheel, `shared/` those of further tokenizers. *compiled*: every path through the template is compiled
for such conversations. *partly*: rows on some paths are rendered by transformers, one by one, for the reason in the
last column. *reference*: all are. *rejected*: the template itself rejects such conversations.

"""


def page() -> str:
    """Return the whole page. Its further sections stay as they are."""
    head = HEAD.format(trl=version("trl"), transformers=version("transformers"))
    _, section, rest = PAGE.read_text().partition("\n## ")
    return head + "\n".join(rows()) + "\n" + section + rest


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
