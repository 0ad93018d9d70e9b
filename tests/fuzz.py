"""One fuzzer for every backend: random texts are encoded by all of them, and it stops at the first difference.

    python tests/fuzz.py                                       # the shipped tokenizer and small ones, for a minute
    python tests/fuzz.py DIR ... --seconds 600 --seed 7        # tokenizers of these directories
    python tests/fuzz.py DIR --text 'e\u0301<|im_end|>'         # one text, with escapes as in Python

Backends of a text: the tokenizer itself, which is right; gigatoken; `tokenizers` by words and as it is, and 1.0 of it
where it is installed (`make tokenizers1-test`, or `$GPULOAD_TOKENIZERS1`); the kernels, on the host. Of a conversation:
the tokenizer's `apply_chat_template`; loads by the engine of the host, and by that of a device with the same kernels.

A difference is cut down to a text of a few characters, printed with the ids of all backends, and the exit status is 1.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

# Before any Hugging Face library is imported: nothing here may reach for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pyarrow as pa
from encoder_variants import VARIANTS, texts
from simulator import engine_on, load_with
from simulator.host_kernels import COMPILER, HostKernels
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import gpuload
from gpuload.demo_data import demo_files
from gpuload.engines.device.encode import DeviceEncoder
from gpuload.engines.host import encode
from gpuload.reference.reference import Reference
from gpuload.tokenizer.compiled import compile_spec
from gpuload.tokenizer.spec import bpe_spec
from gpuload.tokenizer.tokenizers1 import VARIABLE

Ids = list[int] | None
Encode = Callable[[list[str]], list[Ids]]
"""Texts → the ids of each; None where a backend leaves a text to another one."""

ROUND = 64  # texts
VARIANTS_TRIED = ("all flags", "Llama 2", "Gemma", "DeepSeek", "NFKC", "Metaspace first True", "WordPiece", "Unigram")
RANGES = [(0x20, 0x7F), (0x80, 0x2FF), (0x300, 0x36F), (0x370, 0x1FFF), (0x2000, 0x2FFF), (0x3000, 0xD7FF),
          (0x10000, 0x1FFFF)]  # fmt: skip
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"


class Backends(NamedTuple):
    """What encodes one kind of input.

    Attributes:
        right: the tokenizer itself.
        others: name → backend.
        unused: why others are not used.
    """

    right: Encode
    others: dict[str, Encode]
    unused: list[str]


class Different(NamedTuple):
    """A text of which backends make different ids."""

    what: str
    text: str
    ids: dict[str, Ids]


def of_texts(tokenizer: Any) -> Backends:
    """The backends that encode texts."""
    reference = Reference(tokenizer, chat_template=None)
    found = Backends(lambda some: [reference.encode(text) for text in some], {}, [])
    for make in (encode._gigatoken, encode._words, encode._tokenizers1, encode._tokenizers):
        with mock.patch.object(encode, "_makers", return_value=(make,)):
            encoder = encode.host_encoder(reference)
        if encoder.unused:
            found.unused.extend(encoder.unused)
        else:
            found.others[encoder.name] = lambda some, each=encoder: each.encode(
                pa.array(some, pa.large_string())
            ).to_lists()  # type: ignore[misc]
    spec = bpe_spec(reference.backend.to_str())
    if isinstance(spec, str) or COMPILER is None:
        found.unused.append(f"kernels: {spec if isinstance(spec, str) else 'no C++ compiler'}")
        return found
    try:
        device = DeviceEncoder(HostKernels(), compile_spec(spec))
    except ValueError as error:
        found.unused.append(f"kernels: {error}")
        return found

    def by_kernels(some: list[str]) -> list[Ids]:
        raw = [text.encode() for text in some]
        data = np.frombuffer(b"".join(raw), np.uint8)
        ids, falls_back = device.encode(data, np.cumsum([0, *map(len, raw)]))
        return [None if skip else row for row, skip in zip(ids.to_lists(), falls_back.tolist(), strict=True)]

    found.others["kernels on the host"] = by_kernels
    return found


def of_chats(tokenizer: Any) -> Backends:
    """The backends that make ids of conversations, of which a text is the second message."""
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT

    def chat(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text[: len(text) // 2]}, {"role": "assistant", "content": "x"},
                {"role": "user", "content": text}]  # fmt: skip

    def right(some: list[str]) -> list[Ids]:
        made = [
            tokenizer.apply_chat_template(chat(text), add_generation_prompt=True, return_dict=True) for text in some
        ]
        return [list(each["input_ids"]) for each in made]

    def by(load: Callable[..., Any]) -> Encode:
        def ids(some: list[str]) -> list[Ids]:
            table = pa.table({"prompt": [chat(text) for text in some]})
            options = {"verify": "off", "token_cache": False, "progress": False, "max_prompt_length": 1 << 30}
            rows: list[Ids] = load(table, tokenizer, **options).tokens.to_lists()
            return rows

        return ids

    others = {"engine of the host": by(gpuload.load)}
    if COMPILER is not None:
        others["engine of a device"] = by(lambda *data, **more: load_with(engine_on(HostKernels()), *data, **more))
    return Backends(right, others, [])


def difference(what: str, backends: Backends, some: list[str]) -> Different | None:
    """The first difference in some texts, cut down."""
    expected = backends.right(some)
    for name, backend in backends.others.items():
        wrong = [
            text for text, one, other in zip(some, expected, backend(some), strict=True) if other not in (None, one)
        ]
        if wrong:

            def differs(text: str, backend: Encode = backend) -> bool:
                return backend([text])[0] not in (None, backends.right([text])[0])

            text = shortest(min(wrong, key=len), differs)
            ids = {each: encode([text])[0] for each, encode in {"right": backends.right, **backends.others}.items()}
            return Different(f"{what}: {name}", text, ids)
    return None


def shortest(text: str, differs: Callable[[str], bool]) -> str:
    """A short part of a text for which a test still holds; the text itself if it depends on its neighbours."""
    if not differs(text):
        return text
    size = max(1, len(text) // 2)
    while size:
        places = range(0, len(text), size)
        shorter = next((cut for at in places if differs(cut := text[:at] + text[at + size :])), None)
        if shorter is None:
            size //= 2
        else:
            text = shorter
    return text


def inputs(tokenizer: Any, seed: int) -> Iterator[list[str]]:
    """Texts without end: risky fragments, the texts of added tokens, and any characters."""
    contents = list(tokenizer.get_added_vocab())
    for number in range(seed << 20, (seed + 1) << 20):
        rng = random.Random(number)
        anything = ["".join(chr(rng.randint(*rng.choice(RANGES))) for _ in range(rng.randrange(20))) for _ in range(8)]
        made = texts(number, ROUND - 16, contents)
        yield [*made, *anything, *("".join(rng.choices([*made, *anything], k=3)) for _ in range(8))]


def fuzz(
    name: str, tokenizer: Any, seconds: float, seed: int = 0, rounds: int = 1 << 20
) -> tuple[int, Different | None]:
    """Compares all backends of a tokenizer.

    Returns:
        How many texts were compared, and the first difference.
    """
    kinds = {f"{name}, texts": of_texts(tokenizer), f"{name}, conversations": of_chats(tokenizer)}
    for what, backends in kinds.items():
        print(f"{what}: {', '.join(backends.others)}" + "".join(f"\n  not {why}" for why in backends.unused))
    compared, end = 0, time.monotonic() + seconds
    for number, some in enumerate(inputs(tokenizer, seed)):
        if number >= rounds or time.monotonic() > end:
            break
        for what, backends in kinds.items():
            if found := difference(what, backends, some):
                return compared, found
        compared += len(some)
    return compared, None


def tokenizers(folders: Sequence[str]) -> dict[str, Any]:
    """Name → tokenizer: those of some directories, or the shipped one and small ones."""
    found = {Path(each).name: AutoTokenizer.from_pretrained(each) for each in folders or [demo_files()[1]]}
    if not folders:
        for name in VARIANTS_TRIED:
            small = PreTrainedTokenizerFast(tokenizer_object=VARIANTS[name](), pad_token="<|im_end|>")
            found[name] = small
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare every backend on random texts, up to the first difference.")
    parser.add_argument(
        "folders", nargs="*", help="directories of tokenizers (default: the shipped one and small ones)"
    )
    parser.add_argument("--seconds", type=float, default=60, help="for all tokenizers together (60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", help="compare only this text, in which escapes are those of Python")
    given = parser.parse_args(arguments)
    if (folder := Path(__file__).parents[1] / ".venv-tokenizers1").is_dir():
        os.environ.setdefault(VARIABLE, str(folder))
    all_of = tokenizers(given.folders)
    for name, tokenizer in all_of.items():
        if given.text is not None:
            text = given.text.encode("latin-1", "backslashreplace").decode("unicode-escape")
            kinds = {"texts": of_texts(tokenizer), "conversations": of_chats(tokenizer)}
            hits = (difference(f"{name}, {what}", each, [text]) for what, each in kinds.items())
            compared, found = 1, next(filter(None, hits), None)
        else:
            compared, found = fuzz(name, tokenizer, given.seconds / len(all_of), given.seed)
        if found:
            print(f"{found.what} differs on {found.text!a}")
            for backend, ids in found.ids.items():
                print(f"  {backend:24} {'left to another one' if ids is None else ids}")
            return 1
        print(f"{name}: {compared:,} texts, no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
