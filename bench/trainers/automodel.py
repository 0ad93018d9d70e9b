"""The start and an epoch over Automodel's ChatDataset: its own class against gpuload's.

    python -m bench.trainers.automodel [--template FILE]

The start is the construction of the dataset. In an epoch all rows are read, by one thread. Rows of both are compared.
`make automodel-test` makes the environment.
"""

from pathlib import Path

from bench.trainers import common


def main() -> None:
    """Measure, print the table, and write a record."""
    template = {"type": Path, "help": "also measure with this chat template, besides the tokenizer's own"}
    given = common.arguments(__doc__ or "", "automodel", rows=20_000, template=template)
    cases = {"the tokenizer's template": {"template": None}}
    if given.template:
        cases[given.template.name] = {"template": given.template.read_text()}
    common.compare(given, "automodel", cases, {common.OURS: {}, "Automodel": {}}, common.write_messages)


if __name__ == "__main__":
    main()
