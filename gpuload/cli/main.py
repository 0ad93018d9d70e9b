"""The command line: inspect · show · check · diff · prepare · cache · doctor · demo."""

import argparse
import importlib
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from gpuload._version import __version__
from gpuload.cli.arguments import add_commands, add_data, add_files, add_served, add_training, not_empty
from gpuload.cli.output import arguments_of, as_arguments, discard_output, prepare_output, printable
from gpuload.core.errors import GpuloadError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        The exit status: 0 for success, 1 for a problem with the data or the machine, 2 for wrong usage, 130 if the
        command was interrupted.
    """
    prepare_output()
    parser = build_parser()
    given = parser.parse_args(arguments)
    usual, warnings.formatwarning = warnings.formatwarning, _warning
    try:
        # Commands are imported when they run: `gpuload --help` does not wait for torch.
        status: int = importlib.import_module(f"gpuload.cli.{given.command}").run(given)
        sys.stdout.flush()
    except GpuloadError as error:
        print(printable(f"gpuload: {as_arguments(str(error), arguments_of(given.parser))}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"gpuload: {given.command} was interrupted", file=sys.stderr)
        return 130  # as a shell reports a program that SIGINT has ended
    except BrokenPipeError:  # the reader of a pipe has stopped: `gpuload inspect ... | head`
        discard_output()
        return 0
    except OSError as error:  # the disk of the output or of the cache is full, or closed to this user
        print(printable(f"gpuload: {given.command}: {error}"), file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:
            discard_output()
        return 1
    finally:
        warnings.formatwarning = usual
    return status


def _warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> str:
    """One line instead of the place in the code."""
    return printable(f"gpuload: {category.__name__}: {message}") + "\n"


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. `run` of the module of its name executes a command."""
    parser = argparse.ArgumentParser(prog="gpuload", description="A GPU-accelerated dataframe loader for prompts.")
    parser.add_argument("--version", action="version", version=f"gpuload {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    inspect = commands.add_parser("inspect", help="show rows, columns, and lengths in tokens")
    add_files(inspect)
    inspect.add_argument("--tokenizer", required=True, help="path or hub id")
    add_data(inspect)
    add_served(inspect)
    inspect.add_argument("--max-samples", type=int, default=-1, metavar="N", help="only the first N rows")
    inspect.add_argument(
        "--template",
        action="store_true",
        help="show the compiled chat template instead, for the conversations in the files or, without files, for "
        "common ones",
    )
    inspect.add_argument("--limit", type=int, metavar="N", help="also list rows that N tokens as limit would drop")
    inspect.add_argument(
        "--html", type=not_empty, metavar="FILE", help="also write an HTML page with plots and some rows"
    )
    inspect.add_argument(
        "--images", nargs="?", const="images", metavar="COLUMN", help="count tokens of images, with a processor"
    )
    inspect.set_defaults(parser=inspect)

    show = commands.add_parser("show", help="show one row token by token")
    show.add_argument("file", help="path, glob or URL of a parquet, json or jsonl file")
    show.add_argument("--row", type=int, required=True, metavar="N", help="number of the row; -1 is the last one")
    show.add_argument("--tokenizer", help="path or hub id; without it, the columns of the row are shown")
    add_data(show)
    show.set_defaults(parser=show)

    add_commands(commands)

    prepare = commands.add_parser("prepare", help="tokenize files now, and cache the tokens for later loads")
    add_files(prepare)
    prepare.add_argument("--tokenizer", help="path or hub id")
    add_data(prepare)
    add_training(prepare)
    prepare.add_argument(
        "--verify",
        default="sample",
        metavar="MODE",
        help="compare a sample of the rows with the tokenizer (sample, the default), all rows (full) or none (off)",
    )
    prepare.add_argument(
        "--store",
        metavar="MODE",
        help="as later loads have it: with disk, the columns other than prompts are stored, too (default: auto)",
    )
    prepare.add_argument(
        "--return-raw-chat", action="store_true", help="with a store on disk: for loads whose rows have prompts, too"
    )
    _add_cache_dir(prepare)
    prepare.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="tokenize on a Ray cluster (default: that of $RAY_ADDRESS, or this machine), and store the tokens in "
        "--cache-dir, a directory that all nodes mount or a URL such as s3://bucket/tokens",
    )
    _add_export(prepare)
    prepare.set_defaults(parser=prepare)

    cache = commands.add_parser("cache", help="list the files whose tokens are cached, or remove all cached tokens")
    _add_cache_dir(cache)
    cache.add_argument("--clear", action="store_true", help="remove all cached tokens")
    cache.set_defaults(parser=cache)

    _add_doctor(commands)

    demo = commands.add_parser("demo", help="load the shipped dataset, and compare with tokenizing row by row")
    demo.set_defaults(parser=demo)
    return parser


def _add_cache_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="default: $GPULOAD_CACHE, else $XDG_CACHE_HOME/gpuload, else ~/.cache/gpuload",
    )


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--export",
        nargs=2,
        metavar=("KIND", "DIR"),
        help="also write data for a trainer to DIR, as a store of Hugging Face datasets and as parquet, or as what "
        "--for names reads; KIND is sft (conversations or texts with labels), packed (packs of them), rm or dpo (pairs "
        "of answers)",
    )
    # Without defaults: an argument that was given without --export is an error.
    group = parser.add_argument_group("arguments of --export", argument_default=argparse.SUPPRESS)
    group.add_argument(
        "--for",
        dest="trainer",
        metavar="TRAINER",
        help="whose columns the rows have: trl (the default), llamafactory, axolotl, skyrl, areal or megatron",
    )
    group.add_argument(
        "--split",
        action="append",
        metavar="NAME=FILES",
        help="files of another split, such as test=test.parquet; can be repeated. FILES before are the split train",
    )
    group.add_argument("--max-length", type=int, metavar="N", help="limit of a row, or of a pack, in tokens (4096)")
    group.add_argument("--overlong", metavar="MODE", help="longer rows: drop (the default), keep_start or keep_end")
    add_served(group)
    group.add_argument("--columns", metavar="A,B", help="other columns to write, for trl (all; packs have none)")
    group.add_argument("--overwrite", action="store_true", help="replace DIR, if it was written by this command")


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    doctor = commands.add_parser("doctor", help="show versions and GPUs, and test each stage of each engine")
    doctor.add_argument(
        "--require", choices=["cpu", "cuda"], help="test only this engine; exit status 1 if it does not work"
    )
    doctor.add_argument(
        "--gpu",
        nargs="?",
        type=int,
        const=0,
        metavar="N",
        help="test GPU N (0) step by step instead, each in a process of its own, up to the first that fails",
    )
    doctor.add_argument(
        "--dump",
        type=Path,
        metavar="DIR",
        help="with --gpu: save the launches of the first wrong answer in a new directory, and repeat them on the host",
    )
    doctor.add_argument("--kernel", metavar="NAME", help="with --dump: only launches of this kernel")
    doctor.add_argument("--replay", type=Path, metavar="DIR", help="repeat saved launches on the host; needs no GPU")
    doctor.add_argument("--quick", action="store_true", help="show versions and GPUs only, in a second")
    doctor.add_argument("--gpu-step", help=argparse.SUPPRESS)  # one of the steps, in this process
    doctor.set_defaults(parser=doctor)


if __name__ == "__main__":
    sys.exit(main())
