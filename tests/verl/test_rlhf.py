"""gpuload's RLHFDataset inside verl: configuration, rows, ids, fallback to verl's class."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import verl.trainer
from conftest import user
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from PIL import Image
from same import (
    CUSTOM_CLS,
    NUMBERED,
    VERL,
    assert_same,
    assert_same_row,
    create_rl_dataset,
    create_rl_sampler,
    gpuload_dataset,
    verl_dataset,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import ProcessorMixin
from verl import DataProto
from verl.utils.dataset.rl_dataset import RLHFDataset as VerlDataset
from verl.utils.dataset.rl_dataset import collate_fn, get_dataset_class

import gpuload.integrations.verl
from gpuload.core.errors import DataError, DeviceError, OptionError, SourceError
from gpuload.engines.host.store import HostTokens
from gpuload.integrations.verl import RLHFDataset
from gpuload.integrations.verl.reuse import DIGEST_KEY, IDS_KEY, prompt_digest, source_digest
from gpuload.integrations.verl.rows import ArrowRows


@pytest.fixture
def numbered(write: Any) -> str:
    """A file of 60 rows."""
    return write(NUMBERED)


# -- configuration -----------------------------------------------------------------------------------------------------


def test_verl_command_line(gsm8k: str, qwen: Any) -> None:
    command_line = [
        "data.custom_cls.path=pkg://gpuload.integrations.verl",
        "data.custom_cls.name=RLHFDataset",
        "+data.gpuload.device=auto",
        f"data.train_files={gsm8k}",
        "data.filter_overlong_prompts=true",
        "data.max_prompt_length=150",
        "data.train_batch_size=64",
        "data.seed=5",
    ]
    config_dir = str(Path(verl.trainer.__file__).parent / "config")
    with initialize_config_dir(config_dir, version_base=None):
        config = compose("ppo_trainer", overrides=command_line).data
        without = compose("ppo_trainer", overrides=command_line[3:]).data
    found = create_rl_dataset(config.train_files, config, qwen, None, max_samples=config.train_max_samples)
    without.filter_overlong_prompts_workers = None
    expected = create_rl_dataset(without.train_files, without, qwen, None, max_samples=without.train_max_samples)
    assert isinstance(found, RLHFDataset)
    assert type(expected) is VerlDataset
    assert len(expected) < 8792
    orders = [list(create_rl_sampler(config, dataset)) for dataset in (found, expected)]
    assert orders[0] == orders[1]
    for dataset in (found, expected):
        loader = StatefulDataLoader(
            dataset, config.train_batch_size, sampler=create_rl_sampler(config, dataset), drop_last=True,
            collate_fn=collate_fn,
        )  # fmt: skip
        batch = DataProto.from_single_dict(next(iter(loader)))
        assert len(batch) == 64
        assert batch.batch["dummy_tensor"].dtype == torch.uint8
        assert batch.non_tensor_batch["raw_prompt"].tolist() == [expected[i]["raw_prompt"] for i in orders[0][:64]]


def test_classes_of_the_package() -> None:
    assert get_dataset_class(OmegaConf.create({"custom_cls": CUSTOM_CLS})) is RLHFDataset
    for name in dir(gpuload.integrations.verl):
        assert getattr(gpuload.integrations.verl, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'RLHFDatset'"):
        gpuload.integrations.verl.RLHFDatset  # noqa: B018


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"devise": "cpu"}, "unknown key data.gpuload.devise: did you mean device?"),
        ({"reuse_id": True}, "did you mean reuse_ids"),
        ({"strict_resume": "no"}, "data.gpuload.strict_resume='no': expected true or false"),
        ({"device": "gpu"}, "device='gpu': expected 'auto', 'cpu'"),
        ({"verify": "some"}, "verify='some'"),
        ("cpu", "data.gpuload='cpu': expected keys under it"),
    ],
)
def test_invalid_settings(numbered: str, qwen: Any, section: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message.replace("?", r"\?")):
        gpuload_dataset(numbered, qwen, gpuload=section)


def test_device_and_verify_are_passed_on(numbered: str, qwen: Any) -> None:
    assert "60 rows compared" in gpuload_dataset(numbered, qwen, gpuload={"verify": "full"}).report
    assert "no rows compared" in gpuload_dataset(numbered, qwen, gpuload={"verify": "off", "device": "cpu"}).report
    with pytest.raises(DeviceError, match="cuda"):
        gpuload_dataset(numbered, qwen, gpuload={"device": "cuda:77"})


def test_missing_file_and_unsupported_file_type(tmp_path: Path, qwen: Any) -> None:
    with pytest.raises(SourceError, match="nowhere.parquet"):
        gpuload_dataset("nowhere.parquet", qwen)
    with pytest.raises(
        ValueError, match=r"data.csv: unsupported file type. verl reads .parquet, .json and .jsonl files"
    ):
        gpuload_dataset(tmp_path / "data.csv", qwen)


def test_missing_prompt_column(write: Any, qwen: Any) -> None:
    path = write({"messages": [user("a")]})
    with pytest.raises(DataError, match="no column 'prompt'. Its columns are messages"):
        gpuload_dataset(path, qwen)
    assert_same(gpuload_dataset(path, qwen, prompt_key="messages"), verl_dataset(path, qwen, prompt_key="messages"))


@pytest.mark.parametrize("kind", ["missing", "texts"])
def test_files_without_messages(write: Any, qwen: Any, caplog: Any, kind: str) -> None:
    """Texts, and a file without the column next to one with it: verl's rows, or its error."""
    files = [write({"prompt": ["a text", "other"]})]
    why = "holds string, not messages"
    if kind == "missing":
        files, why = [write({"prompt": [user("a")]}), write({"level": [1]}, "b.parquet")], "some files have no column"
    outcomes: list[Any] = []
    for make in (gpuload_dataset, verl_dataset):
        try:
            outcomes.append(make(files, qwen).dataframe[:])
        except Exception as error:
            outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1]
    assert re.search(f"falls back to verl's own dataset class: .*{why}", caplog.text)


def test_shared_memory(numbered: str, qwen: Any, tmp_path: Path, monkeypatch: Any) -> None:
    copied = []

    def copy_to_shm(path: str) -> str:
        copied.append(path)
        return path

    monkeypatch.setattr("verl.utils.fs.copy_to_shm", copy_to_shm)
    assert len(gpuload_dataset(numbered, qwen, use_shm=True)) == 60
    assert copied == [numbered]


# -- rows --------------------------------------------------------------------------------------------------------------


def test_extra_info(write: Any, qwen: Any, caplog: Any) -> None:
    kwargs = pa.struct([("create_kwargs", pa.struct([("answer", pa.string())]))])
    fields = [
        ("index", pa.int64()),
        ("tools_kwargs", pa.struct([("score", kwargs)])),
        ("interaction_kwargs", pa.struct([("name", pa.string())])),
        ("need_tools_kwargs", pa.bool_()),
    ]
    extra = [
        {
            "index": 3,
            "tools_kwargs": {"score": {"create_kwargs": {"answer": "4"}}},
            "interaction_kwargs": {"name": "x"},
        },
        {"index": None, "tools_kwargs": None, "need_tools_kwargs": True},
        None,
    ]
    schema = pa.schema(
        [
            ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
            ("extra_info", pa.struct(fields)),
            ("data_source", pa.string()),
        ]
    )
    path = write({"prompt": [user("a")] * 3, "extra_info": extra, "data_source": list("abc")}, schema=schema)
    for data in ({}, {"need_tools_kwargs": True}):
        found, expected = gpuload_dataset(path, qwen, **data), verl_dataset(path, qwen, **data)
        caplog.clear()
        assert_same(found, expected)
        assert "tools_kwargs is empty for index None, data source: b" in caplog.text
    assert found[2]["extra_info"] == {}
    without = write({"prompt": [user("a")]}, "without.parquet")
    assert_same(gpuload_dataset(without, qwen), verl_dataset(without, qwen))


def test_rows_do_not_share_objects(numbered: str, qwen: Any) -> None:
    found = gpuload_dataset(numbered, qwen)
    row = found[0]
    assert row["raw_prompt"] is row["prompt"]  # as in verl
    row["raw_prompt"].append("more")
    row["extra_info"]["index"] = 99
    assert_same_row(found[0], verl_dataset(numbered, qwen)[0], 0)
    first, again = found.__getitems__([1, 1])
    assert first == again or first["dummy_tensor"] is not again["dummy_tensor"]
    assert first["prompt"] is not again["prompt"]


def test_row_numbers(numbered: str, qwen: Any) -> None:
    found, expected = gpuload_dataset(numbered, qwen), verl_dataset(numbered, qwen)
    assert_same_row(found[-1], expected[-1], -1)
    assert_same_row(found[np.int64(3)], expected[3], 3)
    for number in (60, -61):
        with pytest.raises(IndexError):
            found[number]
    assert len(list(found)) == 60


@pytest.mark.parametrize(
    "name", ["input_ids", "prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores"]
)
def test_reserved_columns_are_removed(write: Any, qwen: Any, name: str, caplog: Any) -> None:
    path = write({"prompt": [user("a"), user("b")], name: ["x", "y"], "other": ["x", "y"]})
    found, expected = gpuload_dataset(path, qwen), verl_dataset(path, qwen)
    assert f"columns {name!r} are removed from the rows" in caplog.text
    for row, wanted in zip(found.__getitems__([0, 1]), (expected[0], expected[1]), strict=True):
        assert wanted.pop(name)
        assert_same_row(row, wanted, name)
    named = gpuload_dataset(write({name: [user("a")]}, "named.parquet"), qwen, prompt_key=name)
    assert name not in named[0]
    assert named[0]["raw_prompt"] == user("a")


def test_subclass_that_overrides_rows(numbered: str, qwen: Any) -> None:
    class Marked(RLHFDataset):
        def __getitem__(self, item: int) -> dict[str, Any]:
            return super().__getitem__(item) | {"marked": item}

    config = OmegaConf.create({"filter_overlong_prompts": True})
    marked = Marked(numbered, qwen, config)
    assert [row["marked"] for row in marked.__getitems__([5, 2])] == [5, 2]
    assert marked[7]["marked"] == marked[7]["index"] == 7


def test_subclass_that_overrides_the_filter(numbered: str, qwen: Any, caplog: Any) -> None:
    class Odd(RLHFDataset):
        def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
            return dataframe.filter(lambda row: row["extra_info"]["index"] % 2 == 1)

    odd = Odd(numbered, qwen, OmegaConf.create({}))
    assert len(odd) == 30
    assert "Odd overrides maybe_filter_out_long_prompts" in caplog.text


def test_object_created_without_init() -> None:
    bare = RLHFDataset.__new__(RLHFDataset)
    bare.image_key, bare.video_key, bare.audio_key, bare.processor = "images", "videos", "audios", object()
    bare.prompt_key, bare.need_tools_kwargs = "prompt", False
    bare.dataframe = [{"prompt": user("<image> what?"), "images": [{"image": "a.png"}]}]
    content = bare[0]["raw_prompt"][0]["content"]
    assert content == [{"type": "image", "image": "a.png"}, {"type": "text", "text": " what?"}]


# -- ids for the agent loop --------------------------------------------------------------------------------------------


def test_ids_of_the_prompt(gsm8k: str, qwen: Any) -> None:
    data = {"max_samples": 40, "gpuload": {"reuse_ids": True}, "max_prompt_length": 100}
    for more in ({}, {"shuffle": True, "seed": 4}, {"filter_overlong_prompts": False}):
        found = gpuload_dataset(gsm8k, qwen, **data | more)
        plain = gpuload_dataset(gsm8k, qwen, **data | more | {"gpuload": {}})
        for row, without in zip(found.__getitems__(range(len(found))), plain, strict=True):
            ids, digest = row.pop(IDS_KEY), row.pop(DIGEST_KEY)
            assert digest == prompt_digest(source_digest(qwen, {}), row["raw_prompt"])
            assert ids == qwen.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, return_dict=False)
            assert_same_row(row, without, "without ids")


@pytest.mark.parametrize("more", [{}, {"max_samples": 40, "shuffle": True, "seed": 4}])
def test_ids_that_no_row_has_are_not_joined(gsm8k: str, qwen: Any, more: dict[str, Any], monkeypatch: Any) -> None:
    files, data = [gsm8k, gsm8k], {"max_prompt_length": 100} | more
    expected = gpuload_dataset(files, qwen, **data, gpuload={"reuse_ids": True}).state_dict()
    monkeypatch.setattr(HostTokens, "to_host", None)
    # The reference is made once: nothing is asked of the tokenizer a second time.
    monkeypatch.setattr("gpuload.integrations.verl.reading.reference_of", None)
    assert gpuload_dataset(files, qwen, **data).state_dict() == expected


def test_rejected_prompt_has_no_ids(write: Any, qwen: Any) -> None:
    path = write([user("a"), None, user("b")])
    found = gpuload_dataset(path, qwen, filter_overlong_prompts=False, gpuload={"reuse_ids": True})
    ids = [found.dataframe[i][IDS_KEY] for i in range(3)]
    assert ids[1] is None
    assert ids[0]
    assert ids[2]


# -- processors and fallback to verl's class ---------------------------------------------------------------------------


class TextProcessor(ProcessorMixin):  # type: ignore[misc]
    """The processor of a vision model, reduced to text."""

    attributes = ("tokenizer",)
    tokenizer_class = "AutoTokenizer"


TERSE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools | length if tools }}"


@pytest.mark.parametrize("kwargs", [{}, {"chat_template": "{{ messages | length }}{{ messages[0].content }}"}])
def test_text_with_a_processor(gsm8k: str, qwen: Any, kwargs: dict[str, Any]) -> None:
    processor = TextProcessor(qwen, chat_template=TERSE)
    data = {"max_samples": 150, "max_prompt_length": 75, "apply_chat_template_kwargs": kwargs}
    found, expected = gpuload_dataset(gsm8k, qwen, processor, **data), verl_dataset(gsm8k, qwen, processor, **data)
    assert 0 < len(expected) < 150
    assert bool(found.report) == (VERL >= (0, 8))
    assert len(gpuload_dataset(gsm8k, qwen, **data)) != len(expected) or kwargs
    assert_same(found, expected)


def test_processor_that_overrides_rendering(numbered: str, qwen: Any, caplog: Any) -> None:
    class Loud(TextProcessor):
        def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
            return super().apply_chat_template(conversation, **kwargs) + "!" * 500

    found = gpuload_dataset(numbered, qwen, Loud(qwen, chat_template=TERSE), max_prompt_length=60)
    reason = "Loud overrides apply_chat_template" if VERL >= (0, 8) else "verl 0.7 encodes prompts with the processor"
    assert reason in caplog.text
    assert len(found) == len(verl_dataset(numbered, qwen, Loud(qwen, chat_template=TERSE), max_prompt_length=60))


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize("kind", ["bytes", "none", "metadata", *(["paths"] if VERL >= (0, 9) else [])])
def test_images(write: Any, qwen: Any, kind: str, caplog: Any) -> None:
    images: list[Any] = [[{"bytes": png(), "path": None}], []]
    if kind == "paths":
        images = [["a.png"], []]
    if kind == "none":
        images = [[], None]
    data: dict[str, Any] = {"prompt": [user("<image> what?"), user("text")], "images": images}
    if kind == "none":
        data["prompt"] = [user("what?"), user("text")]
    if kind == "metadata":
        import datasets

        features = {"prompt": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")})}
        features["images"] = datasets.List(datasets.Image())
        path = str(Path(write(data)).with_name("metadata.parquet"))
        datasets.Dataset.from_dict(data, datasets.Features(features)).to_parquet(path)
    else:
        path = write(data)
    processor = TextProcessor(qwen, chat_template=TERSE)
    config = {"filter_overlong_prompts": False}
    found, expected = gpuload_dataset(path, qwen, processor, **config), verl_dataset(path, qwen, processor, **config)
    assert ("falls back to verl's own dataset class" in caplog.text) == (kind != "none")
    assert isinstance(found.dataframe, ArrowRows) == (kind == "none")
    for row, number in zip(found.__getitems__([0, 1]), (0, 1), strict=True):
        wanted = expected[number]
        assert row.keys() == wanted.keys()
        assert "images" not in row
        parts = [part for part in wanted["raw_prompt"][0]["content"] if isinstance(part, dict)]
        assert bool(parts) == (kind != "none" and number == 0)
        assert str(row["raw_prompt"]).split(" at 0x")[0] == str(wanted["raw_prompt"]).split(" at 0x")[0]
