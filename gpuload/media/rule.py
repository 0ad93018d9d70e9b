"""The rule of a processor: what stands for an image of a given size in the ids of a prompt.

Tried in this order, and named in the report:

    closed form       text, a token as often as the processor's own count says, text
    dry run           the processor's own code on tensors without memory, or on black images: once for each size
    dry run per row   the same for each different list of sizes, where images of a prompt depend on each other
    none              the processor itself, row by row

A rule is checked by `kinds/images/gate.py` before it is used, and rows of the data are compared afterwards.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from gpuload.media.dry_run import (
    DryRun,
    DryRunner,
    NotUnderstoodError,
    Size,
    call,
    ids_of,
    may_be_channels,
    without_values,
)

Ids = np.ndarray[Any, np.dtype[np.int32]]

_PROBES: tuple[Size, ...] = (
    (56, 56), (64, 96), (96, 64), (200, 300), (31, 250), (250, 31), (128, 512), (336, 336), (448, 300), (90, 333),
    (600, 450),
)  # fmt: skip
_FEWEST_PROBES = 10
_OTHER_MEDIA = ("video_token", "audio_token")  # attributes of processors
_PAIRS: tuple[tuple[Size, ...], ...] = (((64, 96), (96, 64)), ((200, 300), (31, 250), (64, 96)), ((336, 336),) * 2)


class Expansion(NamedTuple):
    """What stands for an image.

    Attributes:
        before, after: text that is tokenized together with what surrounds it.
        core: the ids between them, from the first to the last special token.
        extras: name → values of this image.
    """

    before: str
    after: str
    core: Ids
    extras: dict[str, np.ndarray[Any, Any]]


class _Form(NamedTuple):
    """An expansion of which only a count depends on the size."""

    before: str
    after: str
    head: tuple[int, ...]
    token: int
    tail: tuple[int, ...]
    more: int  # than the processor counts


class ImageRule:
    """Expansions of images by their sizes.

    Args:
        processor: of transformers.
        kwargs: further arguments of its calls.

    Attributes:
        rung: of the ladder, in words.
        token: what stands for an image in rendered prompts.
        confirmed: whether a row of data had the processor's own ids.

    Raises:
        NotUnderstoodError: there is no rule for this processor.
    """

    def __init__(self, processor: Any, kwargs: Mapping[str, Any]):
        self._processor, self._kwargs = processor, dict(kwargs)
        self._tokenizer = processor.tokenizer
        self._special = _pattern_of_special(self._tokenizer)
        self._run = _runner(processor, kwargs)
        self.token, self.confirmed = self._run.token, False
        others = (getattr(processor, name, None) for name in _OTHER_MEDIA)
        self._others = tuple(token for token in others if isinstance(token, str) and token not in ("", self.token))
        self._known: dict[tuple[Size, ...], list[Expansion]] = {}
        self._errors: dict[tuple[Size, ...], str] = {}
        self._cores: dict[int, Ids] = {}  # by what is counted: few, where there are many sizes
        self._form: _Form | None = None
        self._grids: _Grids | None = None
        self._looked = False
        self.by_row = not all(map(self._independent, _PAIRS))

    @property
    def rung(self) -> str:
        if self._form is not None:
            return "closed form"
        what = "on tensors without memory" if self._run.on_meta else "on black images"
        return f"dry run {what}, once for each {'list of sizes' if self.by_row else 'size'}"

    @property
    def runs_whole(self) -> bool:
        """Whether dry runs call the processor as it is called for rows: none that does less shows the same."""
        return not self._run.on_meta and self._run.kwargs == self._kwargs

    def has_other_media(self, text: str) -> bool:
        """Whether a rendered text has a literal token for a video or a sound, which the processor may reject."""
        return any(token in text for token in self._others)

    def of(self, sizes: tuple[Size, ...]) -> list[Expansion]:
        """The expansions of the images of one prompt.

        Raises:
            ValueError: the processor rejects images of these sizes; the message is its own.
        """
        if self.by_row:
            return self._dry(sizes)
        return [self._dry((size,))[0] for size in sizes]

    def extras(self, sizes: tuple[Size, ...]) -> list[dict[str, np.ndarray[Any, Any]]]:
        """What the processor returns of the images of one prompt besides ids and pixels, also where what stands for
        them in the text is not understood. For errors see `of`."""
        try:
            return [each.extras for each in self.of(sizes)]
        except NotUnderstoodError:
            made = self._run(sizes).extras
            return [{name: rows[k] for name, rows in made.items()} for k in range(len(sizes))]

    def learn(self, sizes: Iterable[Size]) -> None:
        """Finds the expansions of many sizes at once, by a closed form if there is one."""
        given = {(size,) for size in sizes if not may_be_channels(size)}
        new = sorted(given - self._known.keys() - self._errors.keys())
        if self.by_row or not new:
            return
        if not self._looked and len(new) + len(self._known) > _FEWEST_PROBES:
            self._looked = True
            self._find_form([size for (size,) in new])
        if self._form is not None:
            self._count([size for (size,) in new])

    def ids(self, text: str, images: Sequence[Any]) -> list[int]:
        """The ids of a prompt whose images have the sizes of these, as the processor makes them in dry runs."""
        sizes = [(each.height, each.width) for each in images]
        if self._run.on_meta:
            images = [self._run.image(*size) for size in sizes]
        return ids_of(call(self._processor, text, images, self._run.kwargs_for(sizes)))

    def _dry(self, sizes: tuple[Size, ...]) -> list[Expansion]:
        if sizes not in self._known:
            if sizes in self._errors:
                raise ValueError(self._errors[sizes])
            try:
                made = self._run(sizes)
            except NotUnderstoodError:
                raise
            except Exception as error:
                self._errors[sizes] = f"{type(error).__name__}: {error!s:.300}"
                raise ValueError(self._errors[sizes]) from error
            self._known[sizes] = self._expansions(made)
        return self._known[sizes]

    def _expansions(self, made: DryRun) -> list[Expansion]:
        found = []
        for k, text in enumerate(made.replacements):
            matches = list(self._special.finditer(text))
            if not matches:
                raise NotUnderstoodError("what stands for an image has no special token")
            start, end = matches[0].start(), matches[-1].end()
            ids = self._tokenizer(text[start:end], add_special_tokens=False)["input_ids"]
            extras = {name: rows[k] for name, rows in made.extras.items()}
            found.append(Expansion(text[:start], text[end:], np.array(ids, np.int32), extras))
        return found

    def _independent(self, sizes: tuple[Size, ...]) -> bool:
        """Whether the images of a prompt are replaced as if each was alone."""
        together = self._expansions(self._run(sizes))
        alone = [self._dry((size,))[0] for size in sizes]
        return all(same(*pair) for pair in zip(together, alone, strict=True))

    # -- closed form -------------------------------------------------------------------------------------------------

    def _find_form(self, new: Sequence[Size]) -> None:
        """Looks for a closed form that has what dry runs show: of some fixed sizes, and of extremes among the new."""
        probes = [*_PROBES, *_extremes(new)]
        found: dict[Size, Expansion] = {}
        for size in dict.fromkeys(probes):
            try:
                found[size] = self._dry((size,))[0]
            except ValueError:
                continue
            except NotUnderstoodError:
                return  # a form would say something of such sizes, too
        if len(found) < _FEWEST_PROBES:
            return
        counts = self._counts(list(found))
        forms = {_form_of(each, counts.get(size)) for size, each in found.items()}
        grids = _Grids.of(self._processor, self._kwargs, found)
        if len(forms) == 1 and None not in forms and grids is not None:
            (self._form,), self._grids = forms, grids

    def _counts(self, sizes: Sequence[Size]) -> dict[Size, int]:
        """What the processor's own method counts."""
        count = getattr(self._processor, "_get_num_multimodal_tokens", None)
        if count is None:
            return {}

        def counted(some: Sequence[Size]) -> list[int]:
            return [
                int(each)
                for each in count(image_sizes=[list(size) for size in some], **self._kwargs)["num_image_tokens"]
            ]

        try:
            return dict(zip(sizes, counted(sizes), strict=True))
        except Exception:
            found = {}
            for size in sizes:
                try:
                    (found[size],) = counted([size])
                except Exception:  # the dry run says why
                    continue
            return found

    def _count(self, sizes: Sequence[Size]) -> None:
        form, grids = self._form, self._grids
        assert form is not None
        assert grids is not None
        head, tail = np.array(form.head, np.int32), np.array(form.tail, np.int32)
        for size, count in self._counts(sizes).items():
            extras = grids.extras(size, count)
            if extras is None or count + form.more < 1:
                continue  # a dry run will show
            core = self._cores.get(count)
            if core is None:
                core = np.concatenate([head, np.full(count + form.more, form.token, np.int32), tail])
                self._cores[count] = core
            self._known[(size,)] = [Expansion(form.before, form.after, core, extras)]


class _Grids:
    """What dry runs show of images besides text, as a function of the size."""

    def __init__(self, processor: Any, found: Mapping[Size, Expansion]):
        self._names = sorted(next(iter(found.values())).extras)
        self._patch = getattr(getattr(processor, "image_processor", None), "patch_size", None)
        self._image: Any = getattr(processor, "image_processor", None)
        self._smart = _smart_resize_of(self._image)

    @classmethod
    def of(cls, processor: Any, kwargs: Mapping[str, Any], found: Mapping[Size, Expansion]) -> "_Grids | None":
        """None if there is no function that has what was found."""
        made = cls(processor, found)
        if made._names and (made._names != ["image_grid_thw"] or made._smart is None or kwargs):
            return None
        for size, each in found.items():
            guess = made.extras(size, None)
            if guess is None or sorted(guess) != sorted(each.extras):
                return None
            if any(not np.array_equal(guess[name], value) for name, value in each.extras.items()):
                return None
        return made

    def extras(self, size: Size, count: int | None) -> dict[str, np.ndarray[Any, Any]] | None:
        """Those of one image; None if they do not agree with the count of tokens."""
        if not self._names:
            return {}
        image = self._image
        given = {"height": size[0], "width": size[1], "factor": self._patch * image.merge_size}
        if "num_frames" in inspect.signature(self._smart).parameters:
            given |= {"num_frames": image.temporal_patch_size, "temporal_factor": image.temporal_patch_size}
        try:
            limits = {"min_pixels": image.size["shortest_edge"], "max_pixels": image.size["longest_edge"]}
            height, width = self._smart(**given, **limits)
        except Exception:
            return None
        grid = np.array([1, height // self._patch, width // self._patch], np.int64)
        if count is not None and int(grid.prod()) != count * image.merge_size**2:
            return None
        return {"image_grid_thw": grid}


def _smart_resize_of(image_processor: Any) -> Any:
    """The function by which a module of transformers resizes images to whole patches."""
    for kind in type(image_processor).__mro__:
        if kind.__module__.startswith("transformers.models."):
            return getattr(sys.modules[kind.__module__], "smart_resize", None)
    return None


def same(one: Expansion, other: Expansion) -> bool:
    """Whether two expansions are equal."""
    return (
        one[:2] == other[:2]
        and np.array_equal(one.core, other.core)
        and one.extras.keys() == other.extras.keys()
        and all(np.array_equal(value, other.extras[name]) for name, value in one.extras.items())
    )


def _runner(processor: Any, kwargs: Mapping[str, Any]) -> DryRunner:
    """The cheapest dry runs that show the same as the whole processor on black images: on tensors without memory, or
    without the values of pixels."""
    on_black = DryRunner(processor, kwargs, False)
    image_processor = getattr(processor, "image_processor", None)
    less = without_values(image_processor, kwargs)
    of_pillow = type(image_processor).__name__.endswith("Pil")
    others = [DryRunner(processor, kwargs, on_meta, less) for on_meta in (True, False) if not (on_meta and of_pillow)]
    sizes = (_PROBES[1], _PROBES[3])
    wanted = [_shown(on_black([size])) for size in sizes]
    for other in others:
        with suppress(Exception):  # it reads values of a tensor
            if [_shown(other([size])) for size in sizes] == wanted:
                return other
    return on_black


def _shown(made: DryRun) -> tuple[list[str], dict[str, Any]]:
    return made.replacements, {name: rows.tolist() for name, rows in made.extras.items()}


def _pattern_of_special(tokenizer: Any) -> re.Pattern[str]:
    """Finds special tokens in a text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    texts = sorted((each.content for each in added.values() if each.special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _form_of(found: Expansion, count: int | None) -> _Form | None:
    if count is None:
        return None
    values, counts = np.unique(found.core, return_counts=True)
    token = int(values[counts.argmax()])
    at = np.flatnonzero(found.core == token)
    first, last = int(at[0]), int(at[-1])
    if last - first + 1 != len(at):
        return None
    head, tail = tuple(found.core[:first].tolist()), tuple(found.core[last + 1 :].tolist())
    return _Form(found.before, found.after, head, token, tail, len(at) - count)


def _extremes(sizes: Sequence[Size]) -> list[Size]:
    """The largest, and the one with the most extreme ratio."""
    return [max(sizes, key=lambda s: s[0] * s[1]), max(sizes, key=lambda s: max(s) / min(s))]
