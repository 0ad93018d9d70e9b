"""Whether the rule of a processor has the processor's own ids: prompts with one and two black images, before it is
used."""

from typing import Any

import numpy as np

from gpuload.media.dry_run import black, call, extras_of, ids_of
from gpuload.media.rule import ImageRule

_CASES: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = (
    ("{0}", ((112, 84),)),
    ("a{0}", ((31, 250),)),
    ("{bos}Look: {0} \n\nwhat is it?", ((336, 200),)),
    ("{0}{0}\n", ((56, 56), (250, 31))),
    ("{bos}\n{0}\n\n {0}b", ((64, 96), (64, 96))),
    ("1. {0}\n2. \t{0} which\u00e9?", ((300, 420), (90, 64))),
    ("only text", ()),
    ("{bos}only text ", ()),
)


def difference(engine: Any, rule: ImageRule) -> str | None:
    """What differs; None if nothing does.

    Args:
        engine: an `ImageEngine`.
        rule: to be checked.
    """
    reference = engine._reference
    processor, kwargs = reference.called, reference.images.mm_processor_kwargs
    bos = getattr(reference.tokenizer, "bos_token", None) or ""
    for text, sizes in _CASES:
        text = text.format(rule.token, bos=bos)
        made = call(processor, text, [black(*size) for size in sizes], kwargs)
        images = rule.of(sizes) if sizes else []
        (found,), wrong = engine.spliced([text], [images])
        if wrong or found.tolist() != ids_of(made):
            return f"its ids of {text!r} with {len(sizes)} images follow no rule"
        for name, rows in extras_of(made, len(sizes)).items() if sizes else ():
            known = [each.extras.get(name, rows[:0]) for each in images]
            if any(not np.array_equal(*pair) for pair in zip(known, rows, strict=True)):
                return f"its {name} follows no rule"
    return None


def type_ids(reference: Any, token: str) -> tuple[str, tuple[int, ...]] | None:
    """Under which name a processor says of each token whether it stands for an image, and the ids of those that do;
    None if it does not, or in another way."""
    processor = reference.called
    made = call(processor, f"a {token} b", [black(112, 84)], reference.images.mm_processor_kwargs)
    wanted = image_ids_of(processor)
    if wanted is None:
        return None
    for name in ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids"):
        if name in made:
            (found,) = made[name]
            expected = np.isin(ids_of(made), wanted).astype(int)
            return (name, wanted) if np.array_equal(np.asarray(found), expected) else None
    return None


def image_ids_of(processor: Any) -> tuple[int, ...] | None:
    """The ids of tokens that stand for images; None if the processor does not say."""
    try:
        found = getattr(processor, "image_token_ids", None)
        found = [processor.image_token_id] if found is None else found  # transformers 4
        return tuple(int(each) for each in found if each is not None)
    except Exception:
        return None
