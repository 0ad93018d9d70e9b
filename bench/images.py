"""`python -m bench.images`: prompts with images of 1 MP in parquet, loaded and filtered, and the processor row by row.

Both have the same Qwen2.5-VL processor, made from its classes with the shipped tokenizer. CPU time of this process, as
seconds of one core; the rows of the baseline are a part of all, and their time is scaled. Ids are compared. Then epochs
with `media="inputs"`, and the same batches decoded and given to the processor, in one thread and in as many as a loader
uses, with the time of the clock, too; pixels are compared.

    PYTHONPATH=.venv-images python -m bench.images    with torchvision, see `make .venv-images/installed`
"""

import bench.cuda_torchvision  # noqa: F401, before transformers looks for it

# isort: split
import argparse
import io
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from PIL import Image, ImageOps
from transformers import AutoTokenizer, ProcessorMixin, Qwen2_5_VLProcessor

import gpuload
from gpuload.demo_data import demo_files

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LIMIT = 2048


def qwen(image_processor: str) -> Any:
    """A processor with the settings of Qwen2.5-VL."""
    tokenizer = AutoTokenizer.from_pretrained(demo_files()[1])
    names = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    images = getattr(transformers, image_processor)(size={"shortest_edge": 3136, "longest_edge": 12845056})
    with mock.patch.object(ProcessorMixin, "check_argument_for_proper_class", return_value=None):
        return Qwen2_5_VLProcessor(images, tokenizer, None, TEMPLATE)


def write(path: Path, rows: int, pixels: int) -> None:
    """Rows with one JPEG each, whose sizes differ."""
    chance, noise = random.Random(0), np.random.default_rng(0)
    table = []
    for number in range(rows):
        width = chance.randint(int(pixels**0.5 * 0.75), int(pixels**0.5 * 1.3))
        height = pixels // width
        small = noise.integers(0, 255, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
        text = f"<image>What is in picture {number}? " + "Think step by step. " * chance.randint(0, 20)
        images = [{"bytes": file.getvalue(), "path": None}]
        table.append({"prompt": [{"role": "user", "content": text}], "images": images})
    pq.write_table(pa.Table.from_pylist(table), path, row_group_size=100)


def row_by_row(path: Path, processor: Any, rows: int) -> list[list[int]]:
    """The ids of the first rows that are not too long, made as trainers make them."""
    found: list[list[int]] = []
    for row in pq.ParquetFile(path).iter_batches(100):
        for each in row.to_pylist():
            if len(found) == rows:
                return found
            text = each["prompt"][0]["content"].removeprefix("<image>")
            content = [{"type": "image"}, {"type": "text", "text": text}]
            messages = [{"role": "user", "content": content}]
            prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            opened = [Image.open(io.BytesIO(image["bytes"])) for image in each["images"]]
            images = [ImageOps.exif_transpose(image).convert("RGB") for image in opened]
            found.append(list(processor(text=[prompt], images=images)["input_ids"][0]))
    return found


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """A result, and the seconds of CPU time of this process."""
    started = time.process_time()
    made = function()
    return made, time.process_time() - started


def epoch(prompts: Any) -> Iterator[Any]:
    """The pixels of each batch of a loader. No batch is kept while the next one is made, as in `epoch_by_hand`."""
    return map(itemgetter("pixel_values"), prompts.loader(8, shuffle=False))


def epoch_by_hand(path: Path, processor: Any, rows: int, threads: int) -> Iterator[Any]:
    """The same pixels by the processor, batch by batch, in some threads."""

    def pixels(batch: Any) -> Any:
        data = [image["bytes"] for row in batch.to_pylist() for image in row["images"]]
        images = [[ImageOps.exif_transpose(Image.open(io.BytesIO(each))).convert("RGB")] for each in data]
        text = [processor.image_token] * len(images)
        return processor(text=text, images=images, return_tensors="pt", padding=True)["pixel_values"]

    batches = islice(pq.ParquetFile(path).iter_batches(8), -(-rows // 8))
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Any] = deque()
        for batch in batches:
            waiting.append(pool.submit(pixels, batch))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def consumed(batches: Iterator[Any]) -> tuple[float, float]:
    """Goes through batches and keeps none, as a trainer does: seconds of the clock, and of CPU time."""
    started = time.perf_counter()
    _, seconds = timed(lambda: deque(batches, maxlen=0))
    return time.perf_counter() - started, seconds


def compare_epochs(ways: dict[str, Callable[[], Iterator[Any]]], repeats: int) -> None:
    """Prints what epochs take that are made in several ways, each time in another order."""
    chance = random.Random(0)
    orders = [chance.sample(list(ways), len(ways)) for _ in range(repeats)]
    taken = [{name: consumed(ways[name]()) for name in order} for order in orders]
    first = next(iter(ways))
    for name in ways:
        clock, cpu = ([each[name][which] for each in taken] for which in (0, 1))
        ratio = median(each[name][0] / each[first][0] for each in taken)
        print(
            f"{name}: {median(clock):.2f} s ({min(clock):.2f} to {max(clock):.2f}), {median(cpu):.2f} s of CPU, "
            f"{ratio:.2f} times the first of these"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--baseline-rows", type=int, default=100, help="of each repeat; their time is scaled")
    parser.add_argument("--megapixels", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epoch-rows", type=int, default=64)
    parser.add_argument("--epoch-repeats", type=int, default=9)
    parser.add_argument("--only", help="a class of image processors, so that its first load is that of the process")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "images.parquet"
        write(path, given.rows, int(given.megapixels * 1e6))
        for name in (given.only,) if given.only else ("Qwen2VLImageProcessorPil", "Qwen2VLImageProcessor"):
            processor = qwen(name)
            if type(processor.image_processor).__name__ != name:
                print(f"{name}: not measured, because it needs torchvision")
                continue
            some: dict[str, Any] = {"max_prompt_length": LIMIT, "progress": False, "cache_dir": directory}
            load: Callable[..., Any] = lambda **more: gpuload.load(str(path), processor, **(some | more))  # noqa: B023, E731
            times: dict[str, list[float]] = {"load": [], "row by row": []}
            for _ in range(given.repeats):
                prompts, seconds = timed(lambda: load(token_cache=False))  # noqa: B023
                times["load"].append(seconds)
                wanted, seconds = timed(lambda: row_by_row(path, processor, given.baseline_rows))  # noqa: B023
                times["row by row"].append(seconds * given.rows / len(wanted))
            different = sum(
                row["raw_prompt_ids"] != ids
                for row, ids in zip(prompts[: len(wanted)], [ids for ids in wanted if len(ids) <= LIMIT], strict=False)
            )
            first, *others = times["load"]
            fast, slow = median(others or [first]), median(times["row by row"])
            print(
                f"{name}: {given.rows:,} rows of {given.megapixels} MP: row by row {slow:.1f} s, load {fast:.2f} s "
                f"({slow / fast:.0f} times), first load of the process {first:.2f} s ({slow / first:.0f} times); "
                f"{different} of {len(wanted)} rows differ\n{prompts.report.engine}"
            )
            (filled, filling), (cached, seconds) = timed(load), timed(load)
            assert cached.report.from_cache == [str(path)]
            assert cached.tokens.to_lists() == prompts.tokens.to_lists()
            print(f"a load that fills the cache {filling:.2f} s, the next one {seconds:.2f} s: {len(filled):,} rows")
            some = {"max_samples": given.epoch_rows, "shuffle": False, "media": "inputs", "progress": False}
            prompts = gpuload.load(str(path), processor, max_prompt_length=8192, **some)
            by_hand = partial(epoch_by_hand, path, processor, given.epoch_rows)
            assert all(map(torch.equal, epoch(prompts), by_hand(1)))
            threads = os.cpu_count() or 1
            print(f"epochs of {given.epoch_rows} rows with pixels, which are equal; {torch.get_num_threads()} of torch")
            ways = {f"by hand, {count} threads": partial(by_hand, count) for count in (1, threads)}
            compare_epochs({"loader": partial(epoch, prompts), **ways}, given.epoch_repeats)


if __name__ == "__main__":
    main()
