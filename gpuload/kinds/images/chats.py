"""Conversations with images to train on: `gpuload.load_chats` with a processor.

The ids of a row are those of the processor, and its loss is defined on the *expanded* text: the rendered one with what
stands for each image in the place of its mark. For templates with generation blocks it is the processor's own mask:
tokens that overlap a block. For others it is that of texts, see `gpuload.kinds.chats`. What stands for an image is
never learned.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from gpuload.core.arrays import common_prefix
from gpuload.core.errors import OptionError
from gpuload.core.keywords import LoadChatsKeywords
from gpuload.core.marks import IDS, LOSS, loss_bits
from gpuload.core.options import Options, Verify
from gpuload.dataset.rows import Loaded
from gpuload.engines.batches import BatchLayout
from gpuload.engines.host.render import AnswerSpans
from gpuload.kinds.chats.dataset import ChatDataset
from gpuload.kinds.chats.engine import ChatEngine
from gpuload.kinds.chats.load import ChatKind
from gpuload.kinds.chats.reference import ChatReference
from gpuload.kinds.images.dataset import ImageRows
from gpuload.kinds.images.engine import ImageText
from gpuload.kinds.images.load import facts_and_pixels
from gpuload.kinds.images.messages import problem_of_parts
from gpuload.kinds.images.prompts import problem_of_images, prompt_of
from gpuload.kinds.images.training import ImageTrainingEngine, ImageTrainingKind, ImageTrainingReference
from gpuload.kinds.training_reference import messages_in, own_arguments
from gpuload.media.dry_run import DryRunner, NotUnderstoodError, image_token_of
from gpuload.pipeline.kind import Finder
from gpuload.reference.reference import Reference
from gpuload.template.answers import Answers, has_blocks

# Not position_ids, see `kinds/images/dataset.py`.
LAYOUT = BatchLayout("right", ("input_ids", "attention_mask", "labels"))

_WHOLE_ROWS = ("bfd", "trl")


class ImageChatReference(ImageTrainingReference, ChatReference):
    """What a processor makes of conversations with images; ids with loss have a bit (`gpuload.core.marks`)."""

    @cached_property
    def answers(self) -> Answers | None:
        if self.loss_on not in ("assistant", "last", "marked"):
            return None
        return Answers(self.with_parts if self.parts_only else self.call, self.loss_on, self.weights)

    def problem(self, row: Any) -> str | None:
        prompt = prompt_of(row)
        found = ChatReference.problem(self, prompt)
        if found is None and isinstance(messages_in(prompt), str):
            found = "the row is text, and images need messages"
        return found or problem_of_parts(messages_in(prompt)) or problem_of_images(row)

    def texts(self, row: Any) -> list[str]:
        """The texts of what the template gets of a row: all of it, and the prompt alone if there is one."""
        if isinstance(row, dict) and "prompt" in row:
            return self.texts_with_prompt(row)
        return [self.text_of(messages_in(row), self.call_with(own_arguments(row)))]

    def _ids(self, row: Any, answers: Answers | None) -> list[int]:
        given, images = self.given(row), self.images_of(row)
        text, *alone = self.texts(given)
        spans = None
        if answers is not None:
            spans = answers.with_call(self.call_with(own_arguments(given))).of_text(messages_in(given), text)
        tokens = self._marked(text, images, spans)
        if not alone or self.loss_on == "all":
            return tokens
        (prompt,) = alone
        ids = self.ids_of_text(prompt, images[: prompt.count(image_token_of(self.processor))])
        begin = common_prefix(ids, [token & int(IDS) for token in tokens])
        return [token & int(IDS) if k < begin else token for k, token in enumerate(tokens)]

    def _marked(self, text: str, images: Sequence[Any], spans: Sequence[Any] | None) -> list[int]:
        """The ids of a rendered text with their bits.

        Args:
            spans: the parts with loss, in characters; None if all of it is meant that the load wants.

        Raises:
            NotUnderstoodError: what the processor makes of the text is not the text with something for each image.
        """
        ids = self.ids_of_text(text, list(images))
        expanded, stretches, moved = self._expanded(text, images)
        bos = self.tokenizer.bos_token
        special = bos is None or not text.startswith(bos)
        encoded = self.calling(expanded, add_special_tokens=special, return_offsets_mapping=True)
        if list(encoded["input_ids"]) != ids:
            raise NotUnderstoodError("which of its tokens have loss is unknown: they are not those of the text")
        low, high = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        bits = np.full(len(ids), LOSS if spans is None and self.loss_on in ("all", "completion") else 0, np.int32)
        for start, end, *number in spans or ():
            start, end = moved(start), moved(end)
            inside = (low < end) & (high > start)
            if not has_blocks(self.call.text()):
                first, last = encoded.char_to_token(start), encoded.char_to_token(end - 1)
                if first is None:
                    break
                inside = np.zeros(len(ids), bool)
                inside[first : last + 1 if last else len(ids)] = True
            bits[inside & (bits == 0)] = loss_bits(*number or [0])
        for start, end in stretches:
            bits[(low < end) & (high > start)] = 0
        found: list[int] = (np.array(ids, np.int32) | bits).tolist()
        return found

    def _expanded(self, text: str, images: Sequence[Any]) -> tuple[str, list[tuple[int, int]], Any]:
        """A text with what stands for its images; where that is; and what moves a place of the text to its place."""
        if not images:
            return text, [], lambda at: at
        run = DryRunner(self.called, self.images.mm_processor_kwargs, on_meta=False)
        made = run([(each.height, each.width) for each in images]).replacements
        places = [each.start() for each in re.finditer(re.escape(run.token), text)]
        stretches, pieces, done, gained = [], [], 0, [0]
        for place, replacement in zip(places, made, strict=True):
            start = place + gained[-1]
            stretches.append((start, start + len(replacement)))
            pieces += [text[done:place], replacement]
            done = place + len(run.token)
            gained.append(gained[-1] + len(replacement) - len(run.token))
        ends = [place + len(run.token) for place in places]
        return "".join([*pieces, text[done:]]), stretches, lambda at: at + gained[sum(end <= at for end in ends)]


class ImageChatEngine(ImageTrainingEngine, ChatEngine):
    """The `Engine` of a load of conversations with images. For the arguments see `HostEngine`."""

    _reference: ImageChatReference

    def tokens_of(self, text: ImageText) -> tuple[list[Any], list[int]]:
        texts = [[one or "" for one in each.to_pylist()] for each in (text.text, *text.more)]
        whole = texts[0]
        made, wrong = self.spliced(whole, text.images[0], lambda *given: self._bits(text, *given))
        if len(texts) == 1 or self._reference.loss_on == "all":
            return made, wrong
        prompts, unclear = self.spliced(texts[1], text.images[1])
        for row, (tokens, prompt) in enumerate(zip(made, prompts, strict=True)):
            ids = tokens & IDS
            size = min(len(ids), len(prompt))
            differ = np.flatnonzero(ids[:size] != prompt[:size])
            begin = int(differ[0]) if len(differ) else size
            made[row] = np.concatenate([ids[:begin], tokens[begin:]])
        return made, sorted({*wrong, *unclear})

    def _bits(self, text: ImageText, texts: Sequence[str], marked: Any, ids: Any) -> tuple[Any, np.int32]:
        """The bits of the ids of marked texts, and those of tokens around them."""
        token = image_token_of(self._reference.processor)
        stretches: list[tuple[int, int, int]] = []  # row, and bytes of what stands for an image
        moved: dict[
            int, tuple[Any, Any]
        ] = {}  # row → bytes where marks end in its text, and how much is gained by them
        for row, images in enumerate(text.images[0]):
            if not images:
                continue
            ends, gained = [], [0]
            places = (each.start() for each in re.finditer(re.escape(token.encode()), texts[row].encode()))
            for place, image in zip(places, images, strict=True):
                size = len((image.before + self._mark(image.core) + image.after).encode())
                stretches.append((row, place + gained[-1], place + gained[-1] + size))
                ends.append(place + len(token.encode()))
                gained.append(gained[-1] + size - len(token.encode()))
            moved[row] = np.array(ends), np.array(gained)
        answers = text.answers
        if answers is None:
            wanted = self._reference.loss_on in ("all", "completion")
            bits, around = np.full(len(ids.values), LOSS * np.int32(wanted)), LOSS * np.int32(wanted)
        else:
            bits, around = self._of_answers(text, answers, moved, marked, ids), np.int32(0)
        if stretches:
            rows, start, end = np.array(stretches, np.int64).T
            owner, _ = self.spans.owners(marked, ids, rows, start, end)
            bits[owner >= 0] = 0
        return bits, around

    def _of_answers(
        self, text: ImageText, answers: AnswerSpans, moved: Mapping[int, Any], marked: Any, ids: Any
    ) -> Any:
        """The bits of answers, whose places are those in texts before images were marked."""
        kept = ~np.isin(answers.rows, list(text.rejected))
        rows, start, end = answers.rows[kept], answers.start[kept], answers.end[kept]
        bits = answers.bits[kept]
        for row, (ends, gained) in moved.items():
            some = slice(*np.searchsorted(rows, [row, row + 1]))
            for places in (start, end):
                places[some] += gained[np.searchsorted(ends, places[some], side="right")]
        blocks = self._reference.answers is not None and has_blocks(self._reference.call.text())
        return self.spans.bits(marked, ids, rows, start, end, bits, overlapping=blocks)


class ImageChatDataset(ImageRows, ChatDataset):
    """Tokenized conversations with images: see `ImageRows`. Made by `gpuload.load_chats` with a processor.

    Packs consist of whole rows. Where batches have `position_ids`, those of packs are `(4, 1, T)`: the place of each
    token in its row, and its position in time, height and width.
    """

    def loader(self, *given: Any, **settings: Any) -> Any:
        packing, size = settings.get("packing"), settings.get("pack_length")
        if packing not in (None, *_WHOLE_ROWS):
            raise OptionError(f"packing={packing!r}: packs with images are 'bfd' or 'trl', and None is for rows")
        if packing is not None and (room := self._pack_size(size)) < (longest := self._lengths.max()):
            raise OptionError(
                f"pack_length={room} is less than the longest row, {longest} tokens, which would be cut, and maybe in "
                "an image: pass more, or load with a smaller max_length"
            )
        return super().loader(*given, **settings)

    def to_arrow(self, **settings: Any) -> pa.RecordBatchReader:
        if settings.get("packing") is not None:
            raise OptionError("packs have no columns of images: use loader(packing=...)")
        return super().to_arrow(**settings)

    def _flat(self, plan: Any, packs: Any) -> Any:
        batch = super()._flat(plan, packs)
        plain = batch["position_ids"]
        del batch["position_ids"]
        ids = batch["input_ids"]
        batch.update(self._type_ids(ids, torch.ones_like(ids)))
        rows = plan.take(packs).rows
        if self._facts.merge is not None:
            parts = zip(pairwise(batch["cu_seq_lens_q"].tolist()), self._references(rows), strict=True)
            made = [self._positions(ids[:, a:b], torch.ones_like(ids[:, a:b]), [some]) for (a, b), some in parts]
            batch["position_ids"] = torch.cat([plain[None], torch.cat(made, dim=2)])
        return self._with_images(batch, rows)


@dataclass(frozen=True)
class ImageChatKind(ImageTrainingKind[ChatDataset], ChatKind):
    """Conversations with images."""

    others = LoadChatsKeywords.__optional_keys__
    engine_type = ImageChatEngine

    def reference(self, tokenizer: Any, options: Options) -> Reference:
        own: dict[str, Any] = {"loss_on": self.loss_on, "weights": self.weights, **self.of_messages()}
        return ImageChatReference(tokenizer, self.images, **own, **options.of_tokenizer())

    def finders(self, mode: Verify, reference: Any, rows: int) -> Sequence[Finder]:
        return ()

    def rows(self, loaded: Loaded, weights: tuple[float, ...]) -> ImageChatDataset:
        layout = replace(LAYOUT, weights=weights)
        return ImageChatDataset(loaded, layout, *facts_and_pixels(loaded, self.images))
