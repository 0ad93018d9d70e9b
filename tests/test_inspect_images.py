"""`gpuload inspect --images`: tokens of images, and what smaller images would keep."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_cases import encoded, picture
from test_image_chats import message, processor_named

from gpuload.cli.main import main
from gpuload.core.errors import OptionError
from gpuload.inspect.images import images_text, load_with_images


@pytest.fixture
def file(tmp_path: Path) -> str:
    sizes = [(100, 60 + 40 * k) for k in range(14)]
    images = [[{"bytes": encoded(picture(*size), "PNG")}] for size in sizes] + [[]]
    prompts = [[message("user", "<image>What?")]] * len(sizes) + [[message("user", "What?")]]
    pq.write_table(pa.table({"prompt": prompts, "pictures": images}), tmp_path / "rows.parquet")
    return str(tmp_path / "rows.parquet")


def test_tokens_of_images_and_rows_kept(file: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import transformers

    processor = processor_named("qwen2_vl")
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda name: processor)
    assert main(["inspect", file, "--tokenizer", "X", "--images", "pictures", "--limit", "100"]) == 0
    out = capsys.readouterr().out
    found = load_with_images([file], processor, "pictures", None)
    ids = found.tokens.values.tolist()  # an image also has a token before and behind, which the template writes
    assert (
        f"14 images in 14 of 15 rows: {ids.count(processor.image_token_id):,} of {found.lengths.sum():,} tokens" in out
    )
    kept = 100 * (found.lengths <= 100).mean()
    assert re.search(rf"as it is .* {found.lengths.max()} +{kept:.1f}%", out)


def test_other_limits_of_pixels_are_those_of_the_processor(file: str) -> None:
    processor = processor_named("qwen2_vl")
    out = images_text(load_with_images([file], processor, "pictures", "prompts"), 90)
    pixels = 64 * 28**2
    (line,) = [line for line in out.splitlines() if line.strip().startswith(f"{pixels:,}")]
    kwargs = {"size": {"shortest_edge": processor.image_processor.size["shortest_edge"], "longest_edge": pixels}}
    found = load_with_images([file], processor, "pictures", "prompts", mm_processor_kwargs=kwargs)
    assert f"{100 * (found.lengths <= 90).mean():.1f}%" in line
    assert f" {found.lengths.max()} " in line


def test_processors_without_a_limit_and_names_without_a_processor(file: str, qwen_folder: str) -> None:
    assert "no limit of pixels" in images_text(load_with_images([file], processor_named("llava"), "pictures", None))
    with pytest.raises(OptionError, match=r"'/nowhere' has no processor of images"):
        load_with_images([file], "/nowhere", "pictures", None)
    with pytest.raises(OptionError, match=r"has no processor of images \(.*image_processor"):
        load_with_images([file], qwen_folder, "pictures", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--images", "pictures", "--html", "page.html"], "--html and --no-template are not for --images"),
        (["--images", "pictures", "--no-template"], "--html and --no-template are not for --images"),
        (["--template", "--no-template"], "--template and --no-template exclude each other"),
    ],
)
def test_options_that_would_do_nothing(arguments: list[str], message: str, file: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", file, "--tokenizer", "X", *arguments])
    assert message in capsys.readouterr().err


def test_a_limit_of_no_tokens(file: str, capsys: Any) -> None:
    assert main(["inspect", file, "--tokenizer", "X", "--images", "pictures", "--limit", "0"]) == 1
    assert "--limit 0: expected an integer > 0" in capsys.readouterr().err
