"""`python -m bench.verl.images`, with verl's environment: its filter for prompts with images, and gpuload's.

Both datasets get the same parquet file, with one JPEG of a megapixel per row, and a Qwen2.5-VL processor made from its
classes. CPU time of this process, all of a dataset's construction; the rows that are kept are compared.

    PYTHONPATH=.:.venv-images .venv-verl/bin/python -m bench.verl.images    with torchvision, which qwen_vl_utils needs
"""

import bench.cuda_torchvision  # noqa: F401, before transformers looks for it

# isort: split
import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
from omegaconf import OmegaConf
from verl.utils.dataset.rl_dataset import RLHFDataset as VerlDataset

from bench.images import LIMIT, qwen, write
from gpuload.integrations.verl import RLHFDataset


def timed(kind: Any, file: Path, processor: Any, folder: str) -> tuple[float, list[str]]:
    """CPU seconds of the construction, and the prompts that are kept."""
    config = OmegaConf.create(
        {
            "max_prompt_length": LIMIT,
            "filter_overlong_prompts_workers": None,
            "cache_dir": folder,
            "prompt_key": "prompt",
        }
    )
    datasets.config.HF_DATASETS_CACHE = Path(tempfile.mkdtemp(dir=folder))  # nothing of the other one
    started = time.process_time()
    made = kind(str(file), processor.tokenizer, config, processor)
    return time.process_time() - started, [str(each) for each in made.dataframe["prompt"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--pixels", type=int, default=1_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.parquet")
        write(file, given.rows, given.pixels)
        for name in ("Qwen2VLImageProcessorPil", "Qwen2VLImageProcessor"):
            processor = qwen(name)
            found = [timed(kind, file, processor, folder) for kind in (RLHFDataset, VerlDataset, RLHFDataset)]
            (first, one), (stock, other), (again, _) = found
            print(f"{name}: verl {stock:.2f} s, gpuload {first:.2f} s, and again {again:.2f} s; {len(other)} rows kept")
            assert one == other, "other rows are kept"


if __name__ == "__main__":
    main()
