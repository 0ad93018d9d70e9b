"""Start-up of SFT in LLaMA-Factory, its own preparation against gpuload's.

    python -m bench.trainers.llamafactory

From a JSONL file to the data set that the trainer gets. For gpuload this is `load_chats`, writing the store and
LLaMA-Factory opening it. LLaMA-Factory's imports, arguments and tokenizer are not counted. The ids of the same rows are
compared. `make llamafactory-test` makes the environment.
"""

from bench.trainers import common


def turns(row: list[dict[str, str]]) -> bool:
    """Return whether user and assistant take turns after the system message: LLaMA-Factory drops other rows."""
    roles = [message["role"] for message in row if message["role"] != "system"]
    return roles == ["user", "assistant"] * (len(roles) // 2)


def main() -> None:
    """Measure, print the table, and write a record."""
    given = common.arguments(__doc__ or "", "llamafactory", rows=8_000)
    libraries = {
        common.OURS: {"processes": 1},
        "LLaMA-Factory, 1 process": {"processes": 1},
        "LLaMA-Factory, 2 processes": {"processes": 2},
    }
    cases = {"SFT": {"limit": 1 << 15}}
    common.compare(given, "llamafactory", cases, libraries, common.write_messages, turns, "sgd_multiturn")


if __name__ == "__main__":
    main()
