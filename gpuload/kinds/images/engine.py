"""The stages of a load with images on the host: rendered text, and ids in which images take the place of marks."""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Ragged, offsets_of
from gpuload.core.arrow import as_arrow
from gpuload.core.memory import garbage_collection_paused
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.host.prompts import attempt, render_messages, render_rows
from gpuload.engines.host.render import HostText, MixedText
from gpuload.engines.protocol import ArrowPrompts, Tokenized
from gpuload.kinds.images.gate import difference, type_ids
from gpuload.kinds.images.prompts import JOINED_BYTES, read_prompts, sizes_in
from gpuload.kinds.images.reference import ProcessorReference
from gpuload.media.dry_run import NotUnderstoodError, Size, image_token_of
from gpuload.media.rule import Expansion, ImageRule
from gpuload.media.spool import Spool
from gpuload.reference.template_call import first_line
from gpuload.sources.batches import BATCH_BYTES
from gpuload.sources.columns import to_python
from gpuload.sources.read import Source

if TYPE_CHECKING:
    from gpuload.template.compiler import ChatProgram

_Found = tuple[ImageRule | None, str | None, tuple[str, tuple[int, ...]] | None]
"""A rule, or why there is none; and see `ImageFacts.type_ids`."""

_MOST_RULES = 4
_MOST_SAMPLED = 1 << 25  # pixels
_ruling = threading.RLock()
_rules: dict[Any, _Found] = {}  # of the last processors, for the next load of the same process

Bits = Callable[[Sequence[str], pa.LargeStringArray, Ragged], tuple[np.ndarray[Any, np.dtype[np.int32]], np.int32]]

ROW_BY_ROW = "the processor is run on each of them"


@dataclass(kw_only=True, eq=False)
class ImageText(HostText):
    """n rendered prompts with images.

    Attributes:
        rows: as the reference takes them.
        images: what stands for the images of each row, in `text` and in each column of `more`.
        pixels: (n,) int64, of the images of each row, 0 where they are not known.
        by_itself: rows that the processor must tokenize.
    """

    rows: list[Any]
    images: list[list[list[Expansion]]]
    pixels: np.ndarray[Any, np.dtype[np.int64]]
    by_itself: list[int]

    @property
    def sampled_sizes(self) -> np.ndarray[Any, Any]:
        """Without rows whose images have so many pixels that the processor takes seconds, if others have fewer."""
        usable = self.pixels[(self.sizes >= 0) & (self.pixels > 0)]
        fewest = int(usable.min()) if len(usable) else 0
        return np.where(self.pixels > max(_MOST_SAMPLED, fewest), -1, self.sizes)


class ImageEngine(HostEngine):
    """The `Engine` of a load with images. For the arguments see `HostEngine`."""

    may_be_few = False
    _reference: ProcessorReference

    def __init__(self, reference: Any, exact_only: bool = False, notes: tuple[str, ...] = ()):
        super().__init__(reference, exact_only, notes)
        self._rule: ImageRule | None = None
        self._why: str | None = "the load is made again by it" if exact_only else None
        self._sought = exact_only
        self._ruling = _ruling
        self._by_processor = 0
        self._marks: dict[tuple[int, int], str] = {}  # the first and the last id of an image → its mark
        self.spool: Spool | None = None
        self.type_ids: tuple[str, tuple[int, ...]] | None = None

    @property
    def reference(self) -> ProcessorReference:
        return self._reference

    @property
    def rule(self) -> ImageRule | None:
        """The rule of the processor; None if it is run row by row. Found and checked when it is first needed."""
        with self._ruling:
            if not self._sought:
                self._sought, key = True, self._reference.key_of_rule()
                found = _rules.get(key) or self._find_rule()
                _rules[key] = found
                while len(_rules) > _MOST_RULES:
                    _rules.pop(next(iter(_rules)), None)
                self._rule, self._why, self.type_ids = found
                self._reference.follow(self._rule)
            return self._rule

    def _find_rule(self) -> _Found:
        try:
            rule = ImageRule(self._reference.called, self._reference.images.mm_processor_kwargs)
            if why := difference(self, rule):
                return None, why, None
            return rule, None, type_ids(self._reference, rule.token)
        except Exception as error:
            understood = isinstance(error, NotUnderstoodError)
            return None, str(error) if understood else f"a dry run fails: {first_line(error):.160}", None

    def type_ids_without_rule(self) -> tuple[str, tuple[int, ...]] | None:
        """As `type_ids`, for a processor that is run row by row."""
        try:
            return type_ids(self._reference, image_token_of(self._reference.called))
        except Exception:  # whatever a processor raises for a prompt that is not of its model
            return None

    def _new_program(self) -> "ChatProgram":
        from gpuload.template.compiler import known_program  # loads from the token cache do without

        return known_program(self._reference.call) if self._reference.answers is None else super()._new_program()

    @property
    def by_prompt(self) -> bool:
        return super().by_prompt or self.rule is None

    def describe(self, compiled: bool = True) -> str:
        name = type(self._reference.processor).__name__
        if self.by_prompt:
            return f"cpu: {name} itself, row by row ({self._why or 'because of the template'})"
        assert self._rule is not None
        made = f"cpu: {self.rendering(compiled)}, encoded by {self.encoder.name}"
        return f"{made}; images of {name} by {self._rule.rung}"

    @property
    def counts(self) -> dict[str, int]:
        return {**super().counts, **({ROW_BY_ROW: self._by_processor} if self._by_processor else {})}

    def read(self, source: Source, prompt_key: str, keep_prompts: bool) -> Iterator[tuple[pa.Table, ArrowPrompts]]:
        if self._nbytes is not None:  # of whole rows; an encoder for much text would take longer to build than to use
            whole, prompts = source.decoded_bytes(None), source.decoded_bytes((prompt_key,))
            self._nbytes = self._nbytes * prompts // max(1, whole)
        self._begin()
        # Row by row, small batches keep all threads busy.
        joined = BATCH_BYTES if self.by_prompt else JOINED_BYTES
        return read_prompts(source, prompt_key, self._reference.images, self.spool, joined)

    @garbage_collection_paused()
    def _render(self, prompts: ArrowPrompts) -> HostText:
        if self.by_prompt:
            return render_rows(prompts.column, self._reference, self.program, with_ids=True, why=ROW_BY_ROW)
        rejected: dict[int, str] = {}
        rows = to_python(prompts.column)
        given: list[Any] = [None] * len(rows)
        for number, row in enumerate(rows):
            if why := attempt(rejected, number, self._reference.problem, row):
                rejected[number] = why
            elif number not in rejected:
                given[number] = self._reference.given(row)
        parts, sizes = [], sizes_in(prompts.column.field("images"))
        for numbers, text in self._rendered(given, rejected):
            own = [rows[number] for number in numbers], [sizes[number] for number in numbers]
            parts.append((numbers, self._with_images(text, *own)))
        return MixedText.of(parts)

    def _rendered(self, rows: list[Any], rejected: dict[int, str]) -> list[tuple[Sequence[int], HostText]]:
        """Renders rows: the numbers of some, which are ascending, and their texts.

        Args:
            rows: what the template gets of each.
            rejected: row → why there is no text of it.
        """
        if self._reference.uses_template:
            return [(range(len(rows)), render_messages(rows, rejected, self.program))]
        return [(range(len(rows)), HostText(text=as_arrow(rows, pa.large_string()), rejected=rejected))]

    def _with_images(self, text: HostText, rows: list[Any], sizes: list[tuple[Size, ...]]) -> ImageText:
        """Rendered rows with what stands for their images, which have these sizes; rejects rows that the processor
        would."""
        rule = self._rule
        assert rule is not None
        columns: list[list[Any]] = [each.to_pylist() for each in (text.text, *text.more)]
        texts = columns[0]
        sizes = [() if one is None else some for one, some in zip(texts, sizes, strict=True)]
        images: list[list[list[Expansion]]] = [[[] for _ in texts] for _ in columns]
        rejected: dict[int, str] = {}
        by_itself: list[int] = []
        with self._ruling:
            rule.learn({size for some in sizes for size in some})
            for number, some in enumerate(sizes):
                own = [column[number] or "" for column in columns]
                counts = [each.count(rule.token) for each in own]
                places = next((count for count in counts if count > len(some)), counts[0])
                # Versions of transformers take a literal token for text, or reject it.
                if (places and not some) or any(map(rule.has_other_media, own)):
                    if attempt(rejected, number, self._reference.ids, rows[number]):
                        by_itself.append(number)
                elif places != len(some):
                    rejected[number] = (
                        f"its text has {places} times {rule.token}, but the row has {len(some)} "
                        f"image{'s' * (len(some) != 1)}"
                    )
                elif some:
                    try:
                        for count, each in zip(counts, images, strict=True):
                            each[number] = rule.of(some[:count])
                    except NotUnderstoodError:
                        by_itself.append(number)
                    except ValueError as error:
                        rejected[number] = f"the processor rejects its images: {error}"
        column, more = text.text, text.more
        if rejected:
            text.reject(rejected)
            column, *more = (
                as_arrow([None if n in rejected else one for n, one in enumerate(some)], pa.large_string())
                for some in columns
            )
        return ImageText(
            text=column,
            more=more,
            answers=text.answers,
            rows=rows,
            images=images,
            pixels=np.array([sum(height * width for height, width in some) for some in sizes], np.int64),
            by_itself=by_itself,
            **text.fates(),
        )

    @garbage_collection_paused()
    def encode(self, text: HostText) -> Tokenized:
        if not isinstance(text, ImageText):
            return super().encode(text)
        if len(text.rejected) == len(text):
            return text.tokenized(Ragged(np.zeros(0, np.int32), np.zeros(len(text) + 1, np.int64)))
        made, wrong = self.tokens_of(text)
        by_itself = sorted({*text.by_itself, *wrong})
        for number in by_itself:
            ids = attempt(text.rejected, number, self._reference.ids, text.rows[number])
            made[number] = np.array(ids or [], np.int32)
        self._by_processor += len(by_itself)
        made = [row[:0] if number in text.rejected else row for number, row in enumerate(made)]
        lengths = np.fromiter(map(len, made), np.int64, len(made))
        return text.tokenized(Ragged(np.concatenate([np.zeros(0, np.int32), *made]), offsets_of(lengths)))

    def tokens_of(self, text: ImageText) -> tuple[list[Any], list[int]]:
        """The tokens of rows, and the numbers of rows in which the marks of images are not unambiguous."""
        return self.spliced([one or "" for one in text.text.to_pylist()], text.images[0])

    def spliced(
        self, texts: Sequence[str], images: Sequence[Sequence[Expansion]], bits: Bits | None = None
    ) -> tuple[list[Any], list[int]]:
        """Ids of n texts, in which the ids of images replace their marks.

        Args:
            bits: marked texts, what stands for images in them and their ids → the bits of each id, and bits of ids that
                are added around them; None: no bits. Ids of images have none.

        Returns:
            The ids, and the numbers of texts in which the marks are not unambiguous.
        """
        token, first, both = self.token_of_images()
        marked = [self._marked(one, some, token) if some else one for one, some in zip(texts, images, strict=True)]
        column = as_arrow(marked, pa.large_string())
        encoded = self.ids(column)
        tokens, around = encoded, np.int32(0)
        if bits is not None:
            own, around = bits(texts, column, encoded)
            tokens = Ragged(encoded.values | own, encoded.offsets)
        firsts = {int(each.core[0]) for some in images for each in some}
        at = np.flatnonzero(np.isin(encoded.values, np.array([*firsts], encoded.values.dtype)))
        candidates = list(zip(at.tolist(), encoded.values[at].tolist(), strict=True))
        bounds: Any = np.searchsorted(at, encoded.offsets).tolist()
        places: list[int] = []
        cores, seconds, wrong = [], [], []
        for number, some in enumerate(images):
            if some:
                of_row = _places_of(candidates[bounds[number] : bounds[number + 1]], some, encoded, number)
                if of_row is None:
                    wrong.append(number)
                    continue
                places += of_row
                cores += [each.core for each in some]
                seconds += [place + 1 for place, each in zip(of_row, some, strict=True) if _width(each) == 2]
        whole = _replaced(tokens, np.array(places, np.int64), np.array(seconds, np.int64), cores)
        made = [whole.values[start:end] for start, end in pairwise(whole.offsets.tolist())]
        for number in wrong:
            made[number] = made[number][:0]
        for number, text in enumerate(texts) if any(both) else ():
            if not first or not text.startswith(first):
                start, end = (np.array(each, np.int32) | around for each in both)
                made[number] = np.concatenate([start, made[number], end])
        return made, wrong

    def token_of_images(self) -> tuple[str, str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """What stands for an image in rendered text; the text of the first special token, and what a tokenizer adds
        before and after a text without it."""
        tokenizer, calling = self._reference.tokenizer, self._reference.calling
        with self._lock:
            if not hasattr(self, "_added"):
                plain, whole = (list(calling("x", add_special_tokens=each)["input_ids"]) for each in (False, True))
                at = next((k for k in range(len(whole)) if whole[k : k + len(plain)] == plain), 0)
                self._added = (tuple(whole[:at]), tuple(whole[at + len(plain) :]))
        return image_token_of(self._reference.processor), tokenizer.bos_token or "", self._added

    def _marked(self, text: str, images: Sequence[Expansion], token: str) -> str:
        """A text in which the marks of images stand in their places."""
        marks = [each.before + self._mark(each.core) + each.after for each in images]
        if all(mark == token for mark in marks):
            return text
        rest = iter(marks)
        return re.sub(re.escape(token), lambda _: next(rest), text)

    def _mark(self, core: np.ndarray[Any, Any]) -> str:
        ends = (int(core[0]), int(core[-1]))
        if ends not in self._marks:
            own = ends[:1] if ends[0] == ends[1] else ends
            self._marks[ends] = "".join(self._reference.tokenizer.convert_ids_to_tokens(list(own)))
        return self._marks[ends]


def _width(image: Expansion) -> int:
    """How many tokens the mark of an image has."""
    return 1 if image.core[0] == image.core[-1] else 2


def _places_of(
    candidates: Sequence[tuple[int, int]], images: Sequence[Expansion], encoded: Ragged, row: int
) -> list[int] | None:
    """Where the marks of the images of a row begin among all ids; None if other text looks like a mark.

    Args:
        candidates: places in this row whose ids may be the first of a mark, of this row or of another, and these ids.
    """
    firsts = [int(each.core[0]) for each in images]
    found = [one for one in candidates if one[1] in firsts]
    if [own for _, own in found] != firsts:
        return None
    end = int(encoded.offsets[row + 1])
    for (place, _), image in zip(found, images, strict=True):
        if _width(image) == 2 and (place + 1 >= end or encoded.values[place + 1] != image.core[-1]):
            return None
    return [place for place, _ in found]


def _replaced(
    tokens: Ragged, places: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any], cores: Sequence[np.ndarray[Any, Any]]
) -> Ragged:
    """Rows with the ids of images in the places of their marks, which are ascending.

    Args:
        tokens: ids with their bits.
        places: of the first tokens of marks, among those of all rows.
        seconds: of their second tokens, where they have some.
        cores: the ids of each image.
    """
    counts = np.ones(len(tokens.values), np.int64)
    counts[places] = [len(core) for core in cores]
    counts[seconds] = 0
    starts = offsets_of(counts)
    values = np.repeat(tokens.values.astype(np.int32, copy=False), counts)
    for start, core in zip(starts[places].tolist(), cores, strict=True):
        values[start : start + len(core)] = core
    return Ragged(values, starts[np.asarray(tokens.offsets)])
