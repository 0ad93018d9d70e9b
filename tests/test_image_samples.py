"""Rows with images that are compared with the processor: in full until one is equal, then as in dry runs."""

import sys
from typing import Any

import pyarrow as pa
import pytest
from image_cases import BUILDERS, encoded, picture

import gpuload
from gpuload.kinds.images import engine, reference
from gpuload.kinds.images.messages import as_parts
from gpuload.kinds.images.prompts import REFERENCE, sizes_in
from gpuload.media import rule
from gpuload.sources.types import readable

WITHOUT = {"do_rescale": False, "do_normalize": False, "resample": 0}


@pytest.fixture(scope="module")
def processor() -> Any:
    return BUILDERS["qwen2_5_vl"]()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each call of the processor for a row; no rule is known."""
    found: list[dict[str, Any]] = []
    right = reference.call

    def noted(processor: Any, text: str, images: Any, kwargs: dict[str, Any]) -> Any:
        found.append(dict(kwargs))
        return right(processor, text, images, kwargs)

    monkeypatch.setattr(reference, "call", noted)
    monkeypatch.setattr(rule, "call", noted)
    monkeypatch.setattr(engine, "_rules", {})
    return found


def load(processor: Any, only_text: bool = False, **options: Any) -> Any:
    images = [[encoded(picture(60 + 9 * row, 200 - 7 * row), "JPEG")] * (not only_text) for row in range(20)]
    table = pa.table({"prompt": [f"{'<image>' * (not only_text)} is {row}" for row in range(20)], "images": images})
    return gpuload.load(table, processor, **{"progress": False, "max_prompt_length": 9000, **options})


def test_the_first_row_of_a_processor_is_compared_in_full(processor: Any, calls: list[dict[str, Any]]) -> None:
    first = load(processor)
    assert first.report.check.rows == len(calls) >= 2
    assert calls == [{}, *[WITHOUT] * (len(calls) - 1)]
    calls.clear()
    second = load(processor)
    assert second.report.check.rows == len(calls) >= 2
    assert calls == [WITHOUT] * len(calls)
    assert second.tokens.to_lists() == first.tokens.to_lists()
    calls.clear()
    load(processor, mm_processor_kwargs={"do_normalize": False, "do_rescale": False})
    assert [each.get("resample") for each in calls] == [None] + [0] * (len(calls) - 1)
    calls.clear()
    load(BUILDERS["qwen2_5_vl"]())  # another object with the same settings
    assert calls == [{}, *[WITHOUT] * (len(calls) - 1)]


def test_dry_runs_that_do_nothing_less_confirm_nothing(processor: Any, calls: list[dict[str, Any]]) -> None:
    """Then rows take as long as before, and the sample has all of its seconds. Runs on tensors without memory, which
    processors of torchvision allow, always do less."""
    load(processor, mm_processor_kwargs=WITHOUT)
    ((found, *_),) = engine._rules.values()
    on_meta = "torchvision" in sys.modules
    assert (found.runs_whole, found.confirmed) == (not on_meta, on_meta)
    assert calls == [WITHOUT] * len(calls)


def test_rows_without_images_confirm_nothing(processor: Any, calls: list[dict[str, Any]]) -> None:
    load(processor, only_text=True)
    assert calls == [{}] * len(calls)
    assert len(calls) >= 2
    calls.clear()
    load(processor)
    assert calls[0] == {}


def test_all_rows_are_compared_in_full_on_request(processor: Any, calls: list[dict[str, Any]]) -> None:
    load(processor)
    calls.clear()
    load(processor, verify="full")
    assert calls == [{}] * 20


def test_wrong_ids_are_found(processor: Any, calls: list[dict[str, Any]]) -> None:
    right = load(processor)
    ((found, *_),) = engine._rules.values()
    for known in found._known.values():
        known[0] = known[0]._replace(core=known[0].core[:-1])
    calls.clear()
    with pytest.warns(UserWarning, match="the fast path differs from the tokenizer"):
        again = load(processor)
    assert calls[:2] == [WITHOUT, {}]
    assert again.tokens.to_lists() == right.tokens.to_lists()


@pytest.mark.parametrize("fails", [True, False])
def test_processors_that_need_the_values_are_compared_in_full(
    processor: Any, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    load(processor)
    kind = type(processor)
    right = kind.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("do_normalize") is False:
            if fails:
                raise ValueError("values are needed")
            kwargs["text"] = [f"{text} other" for text in kwargs["text"]]
        return right(self, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", call)
    calls.clear()
    found = load(processor)
    assert not found.report.check.mismatches
    assert found.report.check.rows >= 2
    assert calls[:4] == [WITHOUT, {}] * 2  # what differs is for the processor with all that it does


def test_processors_of_other_modules_are_compared_in_full(calls: list[dict[str, Any]]) -> None:
    """Their ids may depend on the values of pixels."""
    processor = BUILDERS["qwen2_5_vl"]()

    class Own(type(processor)):  # type: ignore[misc]
        pass

    processor.__class__ = Own
    assert load(processor).report.check.rows == len(calls) >= 2
    assert calls == [{}] * len(calls)


def test_sizes_of_rows_are_read_from_their_column() -> None:
    image = {"height": 3, "width": 5}
    rows = [[image], None, [], [image, {"height": 7, "width": 9}], [{"height": None, "width": None}], [image]]
    column = pa.array(rows, pa.list_(REFERENCE))
    wanted = [((3, 5),), (), (), ((3, 5), (7, 9)), ((0, 0),), ((3, 5),)]
    assert sizes_in(column) == wanted
    assert sizes_in(column.slice(2, 3)) == wanted[2:5]
    assert sizes_in(column.slice(6)) == []


@pytest.mark.parametrize(
    ("content", "wanted"),
    [("a<image>b", ["a", None, "b"]), ("<image><image>", [None, None]), ("", []), ("<image>\n", [None, "\n"])],
)
def test_marks_in_texts_are_parts(content: str, wanted: list[str | None]) -> None:
    ((message),) = as_parts(content, with_images=True)
    assert message["content"] == [
        {"type": "image"} if text is None else {"type": "text", "text": text} for text in wanted
    ]


def test_schemas_are_told_apart_when_one_follows_another() -> None:
    views, plain = pa.schema({"a": pa.string_view()}), pa.schema({"a": pa.string()})
    named = plain.with_metadata({"huggingface": "{}"})
    for _ in range(2):
        assert readable(views).field("a").type == pa.large_string()
        assert readable(plain).metadata is None
        assert readable(named).equals(named, check_metadata=True)
