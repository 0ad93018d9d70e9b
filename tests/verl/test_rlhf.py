"""gpuload's RLHFDataset inside verl: its configuration, loaders, checkpoints, the data it leaves to verl's class."""

import copy
import io
import pickle
from collections.abc import Iterator
from functools import partial
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
from same import OURS, assert_same, assert_same_row, ours, verls
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import ProcessorMixin
from verl import DataProto
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
from verl.utils.dataset.rl_dataset import RLHFDataset as VerlDataset
from verl.utils.dataset.rl_dataset import collate_fn, get_dataset_class

import gpuload.integrations.verl
from gpuload.errors import DataError, DeviceError, OptionError, ResumeError, SourceError
from gpuload.integrations.verl import RLHFDataset
from gpuload.integrations.verl.reuse import prompt_source, seal
from gpuload.integrations.verl.rows import Rows


@pytest.fixture
def numbered(write: Any) -> str:
    """A file of 60 rows."""
    rows = [user(f"question {i}") for i in range(60)]
    return write({"prompt": rows, "extra_info": [{"index": i} for i in range(60)], "data_source": ["a"] * 60})


# -- verl's command line -----------------------------------------------------------------------------------------------


def test_the_flag_on_verls_command_line(gsm8k: str, qwen: Any) -> None:
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
    folder = str(Path(verl.trainer.__file__).parent / "config")
    with initialize_config_dir(folder, version_base=None):
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


def test_the_package_names_its_classes() -> None:
    assert get_dataset_class(OmegaConf.create({"custom_cls": OURS})) is RLHFDataset
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
def test_settings_that_make_no_sense(numbered: str, qwen: Any, section: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message.replace("?", r"\?")):
        ours(numbered, qwen, gpuload=section)


def test_device_and_verify_are_passed_on(numbered: str, qwen: Any) -> None:
    assert "60 rows compared" in ours(numbered, qwen, gpuload={"verify": "full"}).report
    assert "not checked" in ours(numbered, qwen, gpuload={"verify": "off", "device": "cpu"}).report
    with pytest.raises(DeviceError, match="cuda"):
        ours(numbered, qwen, gpuload={"device": "cuda:77"})


def test_files_that_are_not_there_or_of_another_kind(tmp_path: Path, qwen: Any) -> None:
    with pytest.raises(SourceError, match="nowhere.parquet"):
        ours("nowhere.parquet", qwen)
    with pytest.raises(ValueError, match=r"data.csv: verl takes .parquet, .json and .jsonl files"):
        ours(tmp_path / "data.csv", qwen)


def test_a_missing_prompt_column_is_named(write: Any, qwen: Any) -> None:
    path = write({"messages": [user("a")]})
    with pytest.raises(DataError, match="no column 'prompt'. Its columns are messages"):
        ours(path, qwen)
    assert_same(ours(path, qwen, prompt_key="messages"), verls(path, qwen, prompt_key="messages"))


def test_shared_memory(numbered: str, qwen: Any, tmp_path: Path, monkeypatch: Any) -> None:
    copied = []

    def copy_to_shm(path: str) -> str:
        copied.append(path)
        return path

    monkeypatch.setattr("verl.utils.fs.copy_to_shm", copy_to_shm)
    assert len(ours(numbered, qwen, use_shm=True)) == 60
    assert copied == [numbered]


# -- rows --------------------------------------------------------------------------------------------------------------


def test_what_extra_info_says(write: Any, qwen: Any, caplog: Any) -> None:
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
        found, expected = ours(path, qwen, **data), verls(path, qwen, **data)
        caplog.clear()
        assert_same(found, expected)
        assert "tools_kwargs is empty for index None, data source: b" in caplog.text
    assert found[2]["extra_info"] == {}
    without = write({"prompt": [user("a")]}, "without.parquet")
    assert_same(ours(without, qwen), verls(without, qwen))


def test_rows_are_the_callers_own(numbered: str, qwen: Any) -> None:
    found = ours(numbered, qwen)
    row = found[0]
    assert row["raw_prompt"] is row["prompt"]  # as in verl
    row["raw_prompt"].append("more")
    row["extra_info"]["index"] = 99
    assert_same_row(found[0], verls(numbered, qwen)[0], 0)
    first, again = found.__getitems__([1, 1])
    assert first == again or first["dummy_tensor"] is not again["dummy_tensor"]
    assert first["prompt"] is not again["prompt"]


def test_row_numbers(numbered: str, qwen: Any) -> None:
    found, expected = ours(numbered, qwen), verls(numbered, qwen)
    assert_same_row(found[-1], expected[-1], -1)
    assert_same_row(found[np.int64(3)], expected[3], 3)
    for number in (60, -61):
        with pytest.raises(IndexError):
            found[number]
    assert len(list(found)) == 60


@pytest.mark.parametrize(
    "number", ["input_ids", "prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores"]
)
def test_names_that_the_rollout_takes(write: Any, qwen: Any, number: str, caplog: Any) -> None:
    path = write({"prompt": [user("a"), user("b")], number: ["x", "y"], "other": ["x", "y"]})
    found, expected = ours(path, qwen), verls(path, qwen)
    assert f"rows do not carry {number!r}" in caplog.text
    for row, wanted in zip(found.__getitems__([0, 1]), (expected[0], expected[1]), strict=True):
        assert wanted.pop(number)
        assert_same_row(row, wanted, number)
    named = ours(write({number: [user("a")]}, "named.parquet"), qwen, prompt_key=number)
    assert number not in named[0]
    assert named[0]["raw_prompt"] == user("a")


def test_a_subclass_with_rows_of_its_own(numbered: str, qwen: Any) -> None:
    class Marked(RLHFDataset):
        def __getitem__(self, item: int) -> dict[str, Any]:
            return super().__getitem__(item) | {"marked": item}

    config = OmegaConf.create({"filter_overlong_prompts": True})
    marked = Marked(numbered, qwen, config)
    assert [row["marked"] for row in marked.__getitems__([5, 2])] == [5, 2]
    assert marked[7]["marked"] == marked[7]["index"] == 7


def test_a_subclass_with_a_filter_of_its_own(numbered: str, qwen: Any, caplog: Any) -> None:
    class Odd(RLHFDataset):
        def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
            return dataframe.filter(lambda row: row["extra_info"]["index"] % 2 == 1)

    odd = Odd(numbered, qwen, OmegaConf.create({}))
    assert len(odd) == 30
    assert "Odd has a maybe_filter_out_long_prompts of its own" in caplog.text


def test_an_object_made_without_init() -> None:
    bare = RLHFDataset.__new__(RLHFDataset)
    bare.image_key, bare.video_key, bare.audio_key, bare.processor = "images", "videos", "audios", object()
    bare.prompt_key, bare.need_tools_kwargs = "prompt", False
    bare.dataframe = [{"prompt": user("<image> what?"), "images": ["a.png"]}]
    content = bare[0]["raw_prompt"][0]["content"]
    assert content == [{"type": "image", "image": "a.png"}, {"type": "text", "text": " what?"}]


# -- ids for the agent loop --------------------------------------------------------------------------------------------


def test_ids_are_those_of_the_prompt(gsm8k: str, qwen: Any) -> None:
    data = {"max_samples": 40, "gpuload": {"reuse_ids": True}, "max_prompt_length": 100}
    for more in ({}, {"shuffle": True, "seed": 4}, {"filter_overlong_prompts": False}):
        found = ours(gsm8k, qwen, **data | more)
        plain = ours(gsm8k, qwen, **data | more | {"gpuload": {}})
        for row, without in zip(found.__getitems__(range(len(found))), plain, strict=True):
            ids, mark = row.pop("gpuload_prompt_ids"), row.pop("gpuload_prompt_seal")
            assert mark == seal(prompt_source(qwen, {}), row["raw_prompt"])
            assert ids == qwen.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, return_dict=False)
            assert_same_row(row, without, "without ids")


def test_a_prompt_without_ids(write: Any, qwen: Any) -> None:
    path = write([user("a"), None, user("b")])
    found = ours(path, qwen, filter_overlong_prompts=False, gpuload={"reuse_ids": True})
    ids = [found.dataframe[i]["gpuload_prompt_ids"] for i in range(3)]
    assert ids[1] is None
    assert ids[0]
    assert ids[2]


# -- what goes verl's own way ------------------------------------------------------------------------------------------


class TextProcessor(ProcessorMixin):  # type: ignore[misc]
    """A processor of a model that takes images, as far as texts are concerned."""

    attributes = ("tokenizer",)
    tokenizer_class = "AutoTokenizer"


TERSE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools | length if tools }}"


@pytest.mark.parametrize("kwargs", [{}, {"chat_template": "{{ messages | length }}{{ messages[0].content }}"}])
def test_texts_with_a_processor(gsm8k: str, qwen: Any, kwargs: dict[str, Any]) -> None:
    processor = TextProcessor(qwen, chat_template=TERSE)
    data = {"max_samples": 150, "max_prompt_length": 75, "apply_chat_template_kwargs": kwargs}
    found, expected = ours(gsm8k, qwen, processor, **data), verls(gsm8k, qwen, processor, **data)
    assert 0 < len(expected) < 150
    assert found.report
    assert len(ours(gsm8k, qwen, **data)) != len(expected) or kwargs
    assert_same(found, expected)


def test_a_processor_that_renders_in_its_own_way(numbered: str, qwen: Any, caplog: Any) -> None:
    class Loud(TextProcessor):
        def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
            return super().apply_chat_template(conversation, **kwargs) + "!" * 500

    found = ours(numbered, qwen, Loud(qwen, chat_template=TERSE), max_prompt_length=60)
    assert "Loud has an apply_chat_template of its own" in caplog.text
    assert len(found) == len(verls(numbered, qwen, Loud(qwen, chat_template=TERSE), max_prompt_length=60))


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize("kind", ["bytes", "paths", "none", "metadata"])
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
    found, expected = ours(path, qwen, processor, **config), verls(path, qwen, processor, **config)
    assert ("verl's own way, row by row" in caplog.text) == (kind != "none")
    assert isinstance(found.dataframe, Rows) == (kind == "none")
    for row, number in zip(found.__getitems__([0, 1]), (0, 1), strict=True):
        wanted = expected[number]
        assert row.keys() == wanted.keys()
        assert "images" not in row
        parts = [part for part in wanted["raw_prompt"][0]["content"] if isinstance(part, dict)]
        assert bool(parts) == (kind != "none" and number == 0)
        assert str(row["raw_prompt"]).split(" at 0x")[0] == str(wanted["raw_prompt"]).split(" at 0x")[0]


# -- loaders and checkpoints -------------------------------------------------------------------------------------------


def loader(dataset: Any, workers: int = 0, seed: int = 1) -> StatefulDataLoader:
    """As the trainer makes it."""
    config = OmegaConf.create({"shuffle": True, "seed": seed})
    return StatefulDataLoader(
        dataset, 4, num_workers=workers, drop_last=True, collate_fn=collate_fn,
        sampler=create_rl_sampler(config, dataset),
    )  # fmt: skip


def prompts(batches: Iterator[Any]) -> list[Any]:
    return [batch["raw_prompt"].tolist() for batch in batches]


def saved_after(dataset: Any, batches: int, workers: int = 0) -> Any:
    """A checkpoint taken in the middle of an epoch, as it comes back from disk."""
    drawn = loader(dataset, workers)
    iterator = iter(drawn)
    for _ in range(batches):
        next(iterator)
    file = io.BytesIO()
    torch.save(drawn.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("workers", [0, 8])
def test_resuming_in_mid_epoch(numbered: str, qwen: Any, workers: int) -> None:
    whole = prompts(iter(loader(verls(numbered, qwen), workers)))  # torchdata's order is another one with workers
    assert len(whole) == 15
    state = saved_after(ours(numbered, qwen), 6, workers)
    resumed = loader(ours(numbered, qwen), workers, seed=2)
    resumed.load_state_dict(state)
    assert prompts(iter(resumed)) == whole[6:]


@pytest.mark.parametrize("workers", [0, 2])
def test_another_data_set_is_rejected_by_name(numbered: str, write: Any, qwen: Any, workers: int, caplog: Any) -> None:
    state = saved_after(ours(numbered, qwen), 3, workers)
    rows = [user(f"question {i}") for i in range(60)]
    write({"prompt": rows, "extra_info": [{"index": i} for i in range(60)], "data_source": ["a"] * 59 + ["b"]})
    resumed = loader(ours(numbered, qwen), workers)
    resumed.load_state_dict(state)
    with pytest.raises(ResumeError, match=r"the checkpoint is of other data: files: 0: data.parquet was .*, is .*"):
        next(iter(resumed))
    resumed = loader(ours(numbered, qwen, gpuload={"strict_resume": False}), workers)
    resumed.load_state_dict(state)
    assert len(prompts(iter(resumed))) == 12
    if not workers:
        assert "the checkpoint is of other data, and strict_resume is off: files: 0: data.parquet was" in caplog.text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"max_prompt_length": 37}, "max_prompt_length was 1024, is 37"),
        ({"filter_overlong_prompts": False}, "filter_overlong_prompts was True, is False"),
        ({"apply_chat_template_kwargs": {"chat_template": TERSE}}, "chat_template was 'default'"),
    ],
)
def test_another_configuration_is_rejected(numbered: str, qwen: Any, data: dict[str, Any], message: str) -> None:
    state = ours(numbered, qwen).state_dict()
    with pytest.raises(ResumeError, match=message):
        ours(numbered, qwen, **data).load_state_dict(state)


def test_other_samples_are_rejected(numbered: str, qwen: Any) -> None:
    for more in ({}, {"filter_overlong_prompts": False}):
        draw = partial(ours, numbered, qwen, max_samples=10, shuffle=True, **more)
        state = draw().state_dict()
        with pytest.raises(ResumeError, match="other rows were drawn: .* needs a data.seed"):
            draw().load_state_dict(state)
        draw(seed=1).load_state_dict(draw(seed=1).state_dict())


def test_what_does_not_change_the_data(numbered: str, qwen: Any) -> None:
    state = ours(numbered, qwen).state_dict()
    settings = {"device": "cpu", "verify": "off", "gpu_memory_limit": 7, "strict_resume": True}
    ours(numbered, qwen, gpuload=settings, cache_dir="/tmp").load_state_dict(state)


def test_data_that_went_verls_own_way_has_a_state_too(write: Any, qwen: Any) -> None:
    path = write({"prompt": ["a", "b"]})
    config = {"filter_overlong_prompts": True, "max_prompt_length": 10_000}
    found = ours(path, qwen, **config)
    assert not found.report
    found.load_state_dict(pickle.loads(pickle.dumps(found.state_dict())))
    state = found.state_dict()
    write({"prompt": ["a", "c", "d"]})
    with pytest.raises(ResumeError, match="files: 0: data.parquet was"):
        ours(path, qwen, **config).load_state_dict(state)


def test_a_checkpoint_of_verls_own_class(numbered: str, qwen: Any) -> None:
    for workers in (0, 2):
        whole = prompts(iter(loader(verls(numbered, qwen), workers)))
        resumed = loader(ours(numbered, qwen), workers)
        resumed.load_state_dict(saved_after(verls(numbered, qwen), 5, workers))
        assert prompts(iter(resumed)) == whole[5:]


def test_pickled_without_its_data(numbered: str, qwen: Any) -> None:
    found = ours(numbered, qwen)
    again = pickle.loads(pickle.dumps(found))
    assert not hasattr(again, "dataframe")
    again.resume_dataset_state()
    assert_same(again, verls(numbered, qwen))
    found.serialize_dataset = True
    assert_same(pickle.loads(pickle.dumps(found)), verls(numbered, qwen))


def test_split(numbered: str, qwen: Any) -> None:
    found, expected = ours(numbered, qwen).split(7), verls(numbered, qwen).split(7)
    assert len(found) == 7
    for part, wanted in zip(found, expected, strict=True):
        assert isinstance(part, RLHFDataset)
        assert_same(part, wanted, spread=3)
    nothing = copy.copy(found[0])
    assert not hasattr(nothing, "dataframe")
    with pytest.raises(AttributeError, match="dataframe"):
        nothing.split(2)
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="positive integer"):
            found[0].split(wrong)  # type: ignore[arg-type]
    nothing.dataframe = None
    with pytest.raises(ValueError, match="no rows"):
        nothing.split(2)
