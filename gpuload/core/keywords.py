"""The keyword arguments of the load functions: the one place where each of them is described.

`load(files, tokenizer, **options)` takes them as PEP 692 has it, so editors and type checkers know names and types.
`takes` adds the defaults, for `help`. The tables of the documentation are made of this module.
"""

import ast
import dataclasses
import inspect
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, get_type_hints

from gpuload.core.options import (
    History,
    LossOn,
    MissingReasoning,
    Normalize,
    Objective,
    Overlong,
    Store,
    TokensOn,
    Truncation,
    TurnsMode,
    Verify,
)

Function = TypeVar("Function", bound=Callable[..., Any])


class LoadKeywords(TypedDict, total=False):
    """What all loads take."""

    tokenizer: Any
    """The second argument by its name."""

    apply_chat_template_kwargs: Mapping[str, Any] | None
    """Constants passed to the chat template: `tools`, `enable_thinking`, `documents`, ..."""

    chat_template: str | os.PathLike[str] | None
    """`"default"` for the tokenizer's own template, the name of one of its templates, the text of a template, the
    path of a `.jinja` file, or None: prompts are plain strings, tokenized without a template."""

    max_samples: int
    """Maximum number of rows, counted before the length filter; -1 for all."""

    shuffle: bool
    """Draw `max_samples` at random instead of taking the first rows. Also the default of `loader(shuffle=)`."""

    seed: int | None
    """Seed of `shuffle`; None draws a new one. Also the default of `loader(seed=)`."""

    pad_token_id: int | None
    """Padding token, instead of the tokenizer's."""

    cache_dir: str | os.PathLike[str] | None
    """Directory for downloaded files and cached tokens, or the URL of a store of tokens that a cluster has filled.
    None is `$GPULOAD_CACHE`, else `$XDG_CACHE_HOME/gpuload`, else `~/.cache/gpuload`."""

    remote_timeout: float
    """Seconds that a web server may send nothing before an attempt to download a file fails. There are three
    attempts."""

    token_cache: bool
    """Cache the token ids of files in `cache_dir`, and use cached ones."""

    token_cache_bytes: int
    """Maximum size of the token cache in bytes; the least recently used entries are evicted. 0 is a tenth of the
    free disk space, at most 20 GB."""

    device: str
    """`"cpu"`, `"cuda"`, `"cuda:N"`, or `"auto"`: the GPU if it works, else the CPU. The report gives the reason."""

    tokens_on: TokensOn
    """Where the GPU engine stores token ids: in `"device"` memory (4 bytes per token), in pinned `"host"` memory,
    from which the ids of each batch are copied, or `"auto"`: in device memory if they fit into what
    `gpu_memory_limit` leaves of the free memory, else in host memory."""

    store: Store
    """Where the host has ids and columns: in `"memory"`; on `"disk"`, in files in `cache_dir` that are mapped into
    memory, so that the process needs 16 bytes per row and a few buffers, whatever the size of the data; or
    `"auto"`: on disk if they would take more than half of the free memory."""

    gpu_memory_limit: int
    """Maximum GPU memory of a load in bytes, in addition to the stored ids; 0 is half of the free memory."""

    verify: Verify
    """Compare the fast path with the reference on a `"sample"` of rows, on all rows (`"full"`) or not at all
    (`"off"`)."""

    strict: bool
    """Raise an error for a row that cannot be rendered, and for a token that differs from the reference. By default
    the row is dropped, or the load falls back to the reference."""

    progress: bool | None
    """Show a progress bar; None shows it in a terminal."""

    trust_remote_code: bool
    """Passed to transformers when the tokenizer is given by name."""

    distributed: bool
    """Share the work among the ranks of the default process group of `torch.distributed`: each prompt is rendered
    and tokenized by one rank, and all ranks get the whole dataset. All of them must call `load`, with the same
    arguments."""


class PromptKeywords(LoadKeywords, total=False):
    """What `load` takes. The names are those of verl's `data:` section."""

    prompt_key: str
    """Column with the prompts: messages (a list of `{role, content}`) or plain strings."""

    max_prompt_length: int
    """Maximum length of a prompt in tokens; the width of padded rows."""

    filter_overlong_prompts: bool
    """Drop prompts longer than `max_prompt_length`."""

    truncation: Truncation
    """What to do with a longer prompt that was not dropped, when it is drawn: raise an `"error"`, or remove tokens
    on the `"left"`, on the `"right"` or in the `"middle"`."""

    return_raw_chat: bool
    """Add the messages to each row, as `raw_prompt`."""

    return_full_prompt: bool
    """Add the rendered text to each row, as `full_prompts`."""


class LoadPromptsKeywords(PromptKeywords, total=False):
    """What `load` takes of its own."""

    turns: TurnsMode
    """`"conversation"`: one prompt for each row. `"served"`: the prompts of all turns, see docs/served.md."""


class MediaKeywords(TypedDict, total=False):
    """What loads take in addition if they are given a processor."""

    image_key: str
    """Column with the images of each row: a list of `{bytes, path}`, of bytes, of paths or of `data:` URLs, or one of
    them."""

    mm_processor_kwargs: Mapping[str, Any] | None
    """Further arguments of the processor's calls, such as `{"size": {...}}`."""

    image_loader: Literal["transpose", "pil"]
    """`"transpose"`: images are turned as their EXIF orientation says, as `transformers` and `datasets` do; `"pil"`:
    they are not."""

    media: Literal["reference", "pil", "inputs"]
    """What rows and batches have of images: a `"reference"`; the decoded images, as `"pil"` objects; or also the
    processor's `"inputs"` of the model, such as `pixel_values`. Then bytes of images in parquet or JSON are copied to a
    file in `cache_dir`, which is removed with the dataset."""

    check_media: Literal["header", "tail", "decode"]
    """How far images are looked at: their `"header"` alone; also the mark at the end of the file, without which they
    are decoded (`"tail"`); or all are decoded (`"decode"`)."""

    media_roots: Sequence[str]
    """Directories from which files of images may be read, besides that of the data."""

    max_image_pixels: int
    """Pixels of an image above which its row is rejected."""


class ImageKeywords(LoadPromptsKeywords, MediaKeywords, total=False):
    """What `load` takes, also with a processor."""


class TrainingKeywords(LoadKeywords, total=False):
    """What loads of data to train on take."""

    max_length: int
    """Maximum length of a row in tokens; for pairs, of each of their sequences."""

    overlong: Overlong
    """What becomes of longer rows: `"drop"` them, or `"keep_start"` or `"keep_end"` of each. Rows of which nothing
    would be learned are dropped."""

    drop_nulls: bool
    """Remove keys that are null from messages and tools, at any depth, before they are rendered, as TRL's
    `remove_none_values` does: parquet has null for each field that another row has."""

    normalize_messages: Normalize | None
    """`"auto"`: contents of messages that are null become the empty text, empty lists of tool calls are removed, and
    arguments of tool calls that are JSON text become objects if the template takes objects. None: messages are rendered
    as they are."""


class ChatKeywords(TrainingKeywords, total=False):
    """What `load_chats` takes."""

    format: str | None
    """`"messages"`, `"sharegpt"`, `"prompt-completion"`, `"alpaca"` or `"text"`; None: found by the columns."""

    messages_key: str | None
    """Column with messages or texts, if it has another name than usual."""

    loss_on: LossOn | None
    """The tokens with loss: those of the answers of the `"assistant"`, of the `"last"` answer, of the answers that
    messages have `"marked"` (`loss`, `train`, `weight` ...), of the `"completion"`, or `"all"`. None: as messages say
    if they have such marks; else of answers for conversations, of the completion for prompt-completion, all for
    texts. With `turns="served"`, `"last_turn"` are the answers after the last message of a user."""

    turns: TurnsMode
    """`"conversation"`: one row for each conversation. `"served"`: the fewest rows in which each answer stands behind
    the prompt that inference would have, see docs/served.md."""

    missing_reasoning: MissingReasoning
    """With `turns="served"`, for answers without reasoning before which the template writes an empty thinking block:
    `"prompt"` puts them behind the template's prompt without thinking, `"learn"` learns the block, and `"skip"` does
    not learn these answers."""

    serving_template: str | os.PathLike[str] | None
    """With `turns="served"`, the template of prompts, if inference has another one than training: a name, a text, or
    the path of a `.jinja` file."""

    thinking: tuple[str, str] | None
    """With `turns="served"`, the texts that open and close reasoning, for templates whose prompts open a thinking block
    that they do not write with an answer: `("<think>\\n", "\\n</think>\\n\\n")`."""

    history: History
    """With `turns="served"`, the ids of earlier answers with `token_ids` in prompts: `"rendered"`, those of their text;
    or `"sampled"`, theirs."""


class LoadChatsKeywords(ChatKeywords, MediaKeywords, total=False):
    """What `load_chats` takes, also with a processor."""


class PairKeywords(TrainingKeywords, total=False):
    """What `load_pairs` takes."""

    objective: Objective | None
    """`"dpo"` or `"rm"` (reward models) for pairs, `"kto"` for single completions with labels, which may be made
    from pairs. None: `"kto"` for files with labels and without pairs, else `"dpo"`."""

    format: str | None
    """`"preference"`, `"implicit"`, `"sharegpt"`, `"prompt-completion"` or `"messages"`; None: found by the columns."""

    chosen_key: str
    """Column with the better completions."""

    rejected_key: str
    """Column with the worse ones."""

    prompt_key: str | None
    """Column with the prompts; None for `"prompt"`."""

    kl_batch_size: int
    """For `"kto"`, rows of a group in which completions are exchanged for `KL_completion_ids`: TRL's
    `per_device_train_batch_size`."""


class LoadPairsKeywords(PairKeywords, MediaKeywords, total=False):
    """What `load_pairs` takes, also with a processor."""


class WorkerKeywords(TypedDict, total=False):
    """What reading on a Ray cluster takes, too."""

    concurrency: int | tuple[int, int] | None
    """Workers, each with an engine of its own: a number, or (at least, at most). None: from one to as many as the
    cluster has GPUs, or CPUs if it has no GPU or `device="cpu"`."""

    num_cpus: float
    """CPUs of each worker. With GPUs, each worker has one of them."""

    rows_per_task: int
    """Rows of a task at least. A task reads whole row groups of one file."""


class ReadPromptsKeywords(WorkerKeywords, PromptKeywords, total=False):
    """What `read_prompts` of Ray takes."""


class ReadChatsKeywords(WorkerKeywords, ChatKeywords, total=False):
    """What `read_chats` of Ray takes."""


class ReadPairsKeywords(WorkerKeywords, PairKeywords, total=False):
    """What `read_pairs` of Ray takes."""


def described(keywords: Any) -> dict[str, str]:
    """What each keyword means, own ones first: name → text. It is read from the source of this module, where docstrings
    of attributes are; without a source there are no texts."""
    try:
        module = ast.parse(inspect.getsource(sys.modules[__name__]))
    except OSError:
        return dict.fromkeys(get_type_hints(keywords), "")
    classes = {each.name: each for each in module.body if isinstance(each, ast.ClassDef)}
    found: dict[str, str] = {}
    names = [keywords.__name__]
    for name in names:  # which grows by the bases of each class
        for field, text in itertools.pairwise(classes[name].body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(ast.literal_eval(text.value).split())
        names += [base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id in classes]
    return found


def takes(keywords: Any, *defaults: Any, others: str | None = None) -> Callable[[Function], Function]:
    """Gives a function with `**options` the signature and the docstring of its keywords, for `help`.

    `defaults` are dataclasses with the default of each keyword; `others` names further ones that are taken and ignored.
    """
    default = {field.name: field.default for each in defaults for field in dataclasses.fields(each)}
    hints = get_type_hints(keywords)

    def complete(function: Function) -> Function:
        own = inspect.signature(function)
        given = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
        texts = {name: text for name, text in described(keywords).items() if name not in own.parameters}
        for name in texts:
            value = None if default[name] is dataclasses.MISSING else default[name]
            given.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=hints[name]))
        if others is not None:
            given.append(inspect.Parameter(others, inspect.Parameter.VAR_KEYWORD, annotation=Any))
        function.__signature__ = own.replace(parameters=given)  # type: ignore[attr-defined]
        lines = "\n".join(_entry(*each) for each in texts.items())
        doc = inspect.cleandoc(function.__doc__ or "")  # as Python 3.13 has it already
        function.__doc__ = re.sub(r"^ {4}\*\*options: .*$", lambda _: lines, doc, count=1, flags=re.MULTILINE)
        return function

    return complete


def _entry(name: str, text: str) -> str:
    """A line, or some, of the section Args of a docstring."""
    return textwrap.indent(textwrap.fill(f"{name}: {text}", 104, subsequent_indent="    "), " " * 4)
