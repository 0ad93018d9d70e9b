"""Automodel's ChatDataset, or gpuload's: the start, and an epoch. Runs in Automodel's environment."""

from nemo_automodel._transformers.auto_tokenizer import NeMoAutoTokenizer
from nemo_automodel.components.datasets.llm.chat_dataset import ChatDataset as Stock

from bench.contenders.common import Clock, answer, objects_digest, task_given
from bench.contenders.imported import import_ahead
from gpuload.integrations.automodel import ChatDataset


def main() -> None:
    """Measure one of the two."""
    task, clock = task_given(), Clock()
    tokenizer = NeMoAutoTokenizer.from_pretrained(task["tokenizer"])
    kind = ChatDataset if task["library"] == "gpuload" else Stock
    import_ahead(ours=task["library"] == "gpuload")
    with clock("start"):
        dataset = kind(task["file"], tokenizer, chat_template=task["template"])
    with clock("an epoch"):
        for row in range(len(dataset)):
            dataset[row]
    digest = objects_digest(dataset[row] for row in range(len(dataset))) if task["compared"] else ""
    answer(seconds=clock.seconds, cpu_seconds=clock.cpu_seconds, digest=digest)


if __name__ == "__main__":
    main()
