"""The command line: inspect · prepare · doctor · demo."""

import argparse
import sys
from collections.abc import Sequence

from gpuload._version import __version__
from gpuload.errors import GpuloadError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0 done, 1 the data or the machine is not right, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="gpuload", description="A GPU-accelerated dataframe loader for prompts.")
    parser.add_argument("--version", action="version", version=f"gpuload {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    inspect = commands.add_parser("inspect", help="what is in these files: rows, columns, prompt lengths in tokens")
    inspect.add_argument("files", nargs="*", help="paths, globs or URLs of parquet, json or jsonl files")
    inspect.add_argument("--tokenizer", required=True, help="a path or a hub id")
    inspect.add_argument("--prompt-key", default="prompt", help="the column with the prompts (default: prompt)")
    inspect.add_argument("--max-samples", type=int, default=-1, help="look at the first N rows only")
    inspect.add_argument("--no-template", action="store_true", help="prompts are plain strings, tokenized as they are")
    inspect.add_argument(
        "--template",
        action="store_true",
        help="show the compiled chat template instead: for the conversations in the files, or for common ones",
    )
    inspect.add_argument("--html", metavar="FILE", help="write the same, with plots, as one page")

    prepare = commands.add_parser("prepare", help="make the tokens of these files now, and keep them for later loads")
    prepare.add_argument("files", nargs="*", help="paths, globs or URLs of parquet, json or jsonl files")
    prepare.add_argument("--tokenizer", help="a path or a hub id")
    prepare.add_argument("--prompt-key", default="prompt", help="the column with the prompts (default: prompt)")
    prepare.add_argument("--no-template", action="store_true", help="prompts are plain strings, tokenized as they are")
    prepare.add_argument("--template-kwargs", metavar="JSON", default="{}", help="constants for the chat template")
    prepare.add_argument("--verify", default="sample", help="compare a sample (default), full or off")
    prepare.add_argument("--cache-dir", metavar="FOLDER", help="default: $GPULOAD_CACHE, or ~/.cache/gpuload")
    prepare.add_argument("--clear", action="store_true", help="remove all tokens that are kept, instead")

    doctor = commands.add_parser("doctor", help="versions, GPUs, and each stage of each engine tried out")
    doctor.add_argument(
        "--require", choices=["cpu", "cuda"], help="try out this engine alone; exit status 1 where it does not work"
    )
    commands.add_parser("demo", help="load a shipped data set and compare with the row-wise way")

    given = parser.parse_args(arguments)
    try:
        # Imported late: the help of a command line should not wait for torch.
        if given.command == "inspect":
            from gpuload.cli.inspect import inspect_files, inspect_template

            if given.template:
                inspect_template(given.files, given.tokenizer, prompt_key=given.prompt_key)
                return 0
            if not given.files:
                inspect.error("no files given")
            inspect_files(
                given.files,
                given.tokenizer,
                prompt_key=given.prompt_key,
                max_samples=given.max_samples,
                no_template=given.no_template,
                html=given.html,
            )
        elif given.command == "prepare":
            from gpuload.cli.prepare import clear_cache, prepare_files

            where = {"cache_dir": given.cache_dir} if given.cache_dir else {}
            if given.clear:
                clear_cache(**where)
                return 0
            if not given.files or not given.tokenizer:
                prepare.error("files and --tokenizer are needed, or --clear")
            prepare_files(
                given.files,
                given.tokenizer,
                given.template_kwargs,
                prompt_key=given.prompt_key,
                chat_template=None if given.no_template else "default",
                verify=given.verify,
                **where,
            )
        elif given.command == "doctor":
            from gpuload.cli.doctor import diagnose

            return diagnose(given.require)
        else:
            from gpuload.cli.demo import demo

            return demo()
    except GpuloadError as error:
        print(f"gpuload: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
