"""The length filter of verl's RLHFDataset for prompts with images, from the headers of the images.

verl runs the whole processor for every row to learn the length of its prompt: it decodes, resizes and normalizes the
images, and throws the pixels away. Here the sizes in the headers go through verl's own function for images, whose
stand-ins have a size and no pixels, and then the rule of the processor says how many ids they become.

The rows themselves stay verl's own. Rows of which a length is not known in this way, because an image is damaged or is
in the network, for example, go through verl's own filter, one by one.
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from PIL import Image
from verl.utils.dataset.rl_dataset import RLHFDataset as VerlDataset

from gpuload.core.options import plain
from gpuload.core.words import counted
from gpuload.engines.host.prompts import render_messages
from gpuload.integrations.comparison import near_and_others
from gpuload.integrations.core import release_of
from gpuload.integrations.known_code import Table, change
from gpuload.kinds.images.engine import ImageEngine
from gpuload.kinds.images.lengths import lengths_of
from gpuload.kinds.images.messages import MARK, as_parts
from gpuload.kinds.images.options import ImageOptions
from gpuload.kinds.images.reference import ImageReference
from gpuload.media.arrow import values_of
from gpuload.media.dry_run import NotUnderstoodError
from gpuload.media.headers import FileBytes, ImageError, read_header

logger = logging.getLogger("gpuload.integrations.verl")

FILTER: Table = {
    "verl.utils.dataset.rl_dataset:RLHFDataset.maybe_filter_out_long_prompts": {"11c1bd3c7e552f47": "0.9.1"},
    "verl.utils.dataset.rl_dataset:RLHFDataset._build_messages": {"51340d304bd1723c": "0.9.1"},
    "verl.utils.dataset.rl_dataset:RLHFDataset._process_multi_modal_info": {"e192bfd1e212fbdd": "0.9.1"},
}
"""The code of verl that decides which rows are kept, of the releases for which this module is right."""

_ROWS = 512  # at a time
_COMPARED = 6  # rows, with verl's own length
_ROW = "gpuload_row"
_OTHER_MEDIA = ("<video>", "<audio>")


class SizedImage(Image.Image):
    """An image with a size and no pixels, for code that resizes images and looks at nothing else."""

    def __init__(self, width: int, height: int):
        super().__init__()
        self._size, self._mode = (width, height), "RGB"

    def convert(self, *given: Any, **more: Any) -> "SizedImage":
        return self

    def resize(self, size: Any, *given: Any, **more: Any) -> "SizedImage":
        width, height = size
        return SizedImage(int(width), int(height))

    def load(self) -> Any:
        raise NotUnderstoodError("the pixels of an image are read")


def filtered(dataset: Any, dataframe: Any) -> Any:
    """The rows within the limit, as the method of verl's dataset returns them; or why verl's filter has to find
    them."""
    if reason := _unsupported(dataset, dataframe):
        return reason
    started = time.perf_counter()
    try:
        images = getattr(dataset.processor, "image_processor", None)
        patch = getattr(images, "patch_size", 14)  # as in verl's agent loop
        lengths = _Lengths(dataset, dataframe, list(dict.fromkeys([dataset.image_patch_size, patch])))
        found, *more = np.concatenate(list(lengths.of_rows()), axis=1)
        if reason := lengths.difference(found, dataset.image_patch_size):
            return reason
    except NotUnderstoodError as error:
        return str(error)
    keep, unknown = (found >= 0) & (found <= dataset.max_prompt_length), np.flatnonzero(found < 0)
    if len(unknown):
        some = dataframe.select(unknown.tolist()).add_column(_ROW, unknown.tolist())
        left = VerlDataset.maybe_filter_out_long_prompts(dataset, some)
        keep[np.array(list(left[_ROW]), np.int64)] = True
    print(
        f"gpuload: {int(keep.sum()):,} of {len(keep):,} prompts have at most {dataset.max_prompt_length} tokens, "
        f"{time.perf_counter() - started:.1f} s; images of {type(dataset.processor).__name__} by {lengths.rung}"
        + (f"; {counted(len(unknown), 'rows')} by verl's own filter" if len(unknown) else "")
    )
    for others in more:
        _warn_of_rollout(dataset, lengths, np.where(keep, others, -1), patch, int(keep.sum()))
    return dataframe.select(np.flatnonzero(keep).tolist())


def _warn_of_rollout(dataset: Any, lengths: "_Lengths", found: Any, patch: int, kept: int) -> None:
    """Warns of rows that are too long in verl's rollout, which resizes images for patches of the processor's size. The
    filter does so for patches of `data.image_patch_size`, which is 14 in verl's configuration.

    `found` has the lengths of rows in the rollout, -1 of those that are not kept.
    """
    limit = dataset.max_prompt_length
    count = int((found > limit).sum())
    if count and lengths.difference(found, patch) is None:
        logger.warning(
            "gpuload: %s of %s prompts have at most %s tokens for verl's filter, and more in the rollout, which raises "
            "an error for them: the filter resizes images for data.image_patch_size=%s, and the rollout for the %s of "
            "the processor. Set data.image_patch_size=%s, and the filter drops them",
            *(f"{count:,}", f"{kept:,}", limit, dataset.image_patch_size, patch, patch),
        )


def _unsupported(dataset: Any, dataframe: Any) -> str | None:
    if dataset.processor is None:
        return "there is no processor"
    for name in ("_build_messages", "_process_multi_modal_info"):
        if _code(type(dataset), name) is not _code(VerlDataset, name):
            return f"{type(dataset).__name__} overrides {name}"
    if dataset.prompt_key not in dataframe.column_names:
        return f"there is no column {dataset.prompt_key!r}"
    stock = [getattr(VerlDataset, place.rpartition(".")[2], None) for place in FILTER]
    if None in stock:
        return "this release of verl filters otherwise"
    changed = change(release_of("verl", "verl"), FILTER, *stock)
    return changed or dataset._unsupported_template_reason()


def _code(kind: type, name: str) -> Any:
    found = getattr(kind, name, None)
    return getattr(found, "__func__", found)


class _Lengths:
    """Lengths of prompts as verl's filter computes them, with images for patches of some sizes; -1 where verl has to.

    Raises:
        NotUnderstoodError: there is no rule for the processor.
    """

    def __init__(self, dataset: Any, dataframe: Any, patches: Sequence[int]):
        from datasets.features.features import require_decoding

        self._dataset, self._rows, self._patches = dataset, dataframe, patches
        self._other_keys = (dataset.video_key, dataset.audio_key)
        self._table = dataframe.with_format("arrow")
        feature = dataframe.features.get(dataset.image_key)
        # `datasets` turns the images that it decodes, and verl opens the bytes of others as they are.
        self._turns = feature is not None and require_decoding(feature)
        _, options = dataset._tokenizer_and_options()
        kwargs = dict(plain(dataset.mm_processor_kwargs or {}))
        images = ImageOptions(dataset.image_key, kwargs, "transpose" if self._turns else "pil")
        reference = ImageReference(dataset.processor, images, **options.of_tokenizer())
        self._engine = ImageEngine(reference)
        if self._engine.by_prompt or self._engine.rule is None:
            raise NotUnderstoodError(self._engine.describe())
        self.rung = self._engine.rule.rung
        self._resized: dict[Any, list[tuple[int, int]]] = {}

    def of_rows(self) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
        """The lengths (patches, n) of some rows at a time."""
        for first in range(0, len(self._table), _ROWS):
            yield self._of_part(self._table[first : first + _ROWS])

    def _of_part(self, table: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        names, key = table.column_names, self._dataset.image_key
        prompts = table.column(self._dataset.prompt_key).to_pylist()
        given: list[Any] = [None] * len(prompts)
        if key in names:
            given = [value for chunk in table.column(key).chunks for value in values_of(chunk)]
        sizes: list[Any] = [None] * len(prompts)
        messages: list[Any] = [None] * len(prompts)
        rejected: dict[int, str] = {}
        others = [column for name in self._other_keys if name in names for column in [table.column(name).to_pylist()]]
        for row, (prompt, images) in enumerate(zip(prompts, given, strict=True)):
            try:
                if any(column[row] for column in others):
                    raise ValueError("videos or audio")
                sizes[row] = self._sizes(prompt, images or [])
                messages[row] = as_parts(prompt, True) if sizes[row] else prompt
            except Exception as error:  # verl's own filter finds out
                rejected[row] = f"{error!s:.80}"
        text = render_messages(messages, dict(rejected), self._engine.program)
        wrong = rejected | text.rejected
        texts = [None if row in wrong else each for row, each in enumerate(text.text.to_pylist())]
        # The processor adds its special tokens to all texts; verl, to texts without images, none.
        _, _, (before, after) = self._engine.token_of_images()
        added = np.array([len(before) + len(after) if some else 0 for some in sizes], np.int64)
        of_patches = ([tuple(each[k] for each in some or ()) for some in sizes] for k in range(len(self._patches)))
        made = np.array([lengths_of(self._engine, texts, each) for each in of_patches])
        return np.where(made < 0, made, made + added)

    def _sizes(self, prompt: Any, images: Sequence[Any]) -> Sequence[Sequence[tuple[int, int]]]:
        """The sizes of a row's images as the processor gets them, of each for all patches; any error if they are
        unknown."""
        if not isinstance(images, list) or not all(message.keys() == {"role", "content"} for message in prompt):
            raise ValueError("rows of another form")
        contents = [message["content"] for message in prompt]
        if not all(isinstance(content, str) for content in contents):
            raise ValueError("contents that are no text")
        if not images:
            return ()
        if any(mark in content for content in contents for mark in _OTHER_MEDIA):
            raise ValueError("places for videos or audio")
        if sum(content.count(MARK) for content in contents) != len(images):
            raise ValueError("another number of places")
        return tuple(map(self._size, images))

    def _size(self, image: Any) -> list[tuple[int, int]]:
        """Height and width of an image as verl gives it to the processor, for all patches."""
        part: dict[str, Any] = {"type": "image"}
        if isinstance(image, str):
            data: Any = FileBytes(_local(image))
        elif self._turns:
            data = image["bytes"] if image["bytes"] is not None else FileBytes(_local(image["path"]))
        else:
            part |= {name: value for name, value in image.items() if name not in ("bytes", "image")}
            data = image["bytes"] if "bytes" in image else FileBytes(_local(image["image"]))
        header = read_header(data, self._turns)
        key = (header.height, header.width, repr(sorted(part.items(), key=str)))
        if key not in self._resized:
            part["image"] = SizedImage(header.width, header.height)
            message = {"role": "user", "content": [part]}
            config, sizes = self._dataset.config, []
            for patch in self._patches:
                (resized,), videos, audios = self._dataset._process_multi_modal_info([message], patch, config)
                if videos or audios or not isinstance(resized, SizedImage):
                    raise ValueError("verl makes something else of an image")
                sizes.append((resized.height, resized.width))
            self._resized[key] = sizes
        return self._resized[key]

    # -- comparison --------------------------------------------------------------------------------------------------

    def difference(self, lengths: np.ndarray[Any, Any], patch: int) -> str | None:
        """What differs from verl's own lengths of some rows: the shortest, the longest, and those near the limit.

        The lengths are those for patches of one size; -1 of rows that are not looked at.
        """
        for row in near_and_others(lengths, self._dataset.max_prompt_length, _COMPARED):
            try:
                expected: Any = self._by_verl(self._rows[row], patch)
            except Exception as error:
                expected = f"{type(error).__name__}: {error!s:.100}"
            if expected != lengths[row]:
                return f"row {row} has {lengths[row]} tokens by the rule of its processor, and by verl {expected}"
        return None

    def _by_verl(self, row: dict[str, Any], patch: int) -> int:
        """The length of a prompt as verl's filter computes it."""
        from verl.utils.tokenizer import build_multimodal_processor_inputs

        dataset = self._dataset
        messages = dataset._build_messages(row, key=dataset.prompt_key)
        kwargs = dict(**dataset.apply_chat_template_kwargs)
        if dataset.tool_schemas is not None:
            kwargs["tools"] = dataset.tool_schemas
        text = dataset.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **kwargs)
        images, videos, audios = dataset._process_multi_modal_info(messages, patch, dataset.config)
        if images is None and videos is None and audios is None:
            return len(dataset.processor.tokenizer(text=text, add_special_tokens=False)["input_ids"])
        made = build_multimodal_processor_inputs(
            dataset.processor,
            text=[text],
            images=images,
            videos=videos,
            audio=audios,
            mm_processor_kwargs=dataset.mm_processor_kwargs,
        )
        return len(made["input_ids"][0])


def _local(path: str) -> str:
    """A path that Pillow opens; an `ImageError` if it is something else."""
    if "://" in path or path.startswith("data:"):
        raise ImageError("it is in the network, or in the text")
    return os.path.realpath(path)
