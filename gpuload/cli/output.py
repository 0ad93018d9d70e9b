"""What commands print: names from files cannot control the terminal, and messages name arguments instead of options."""

import argparse
import io
import os
import re
import shlex
import sys
import unicodedata
from collections.abc import Mapping

_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
_QUOTED = r"'[^']*'|\"[^\"]*\""
_OPTION = re.compile(rf"\b([a-z_]+)=(?:({_QUOTED})|(-?[A-Za-z0-9_.]+)|(\[(?:(?:{_QUOTED})(?:, )?)+\])|)")


def prepare_output() -> None:
    """Makes standard output and standard error streams that take any text, whatever this process was started with."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed (`>&-`): print would use the other one instead
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # characters that the locale has not are shown by their code points
            stream.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Makes the rest of standard output vanish, which cannot be written: Python flushes it once more at exit, and would
    fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(text: str) -> str:
    """A text whose control and format characters are shown by their code points, except line breaks.

    Column names, file names and reasons come from data: an escape sequence in one of them could clear the screen, or
    make the terminal write what is not there.
    """
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(
        f"⟨U+{ord(character):04X}⟩" if character != "\n" and unicodedata.category(character) in _HIDDEN else character
        for character in text
    )


def arguments_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Option of Python → the argument of a command that sets it."""
    actions = [each for each in parser._actions if each.option_strings and each.dest not in ("help", "version")]
    return {action.dest: action.option_strings[-1] for action in actions}


def as_arguments(message: str, arguments: Mapping[str, str]) -> str:
    """A message that names the arguments of a command where it names options of Python: `arguments` has both."""

    def replaced(found: re.Match[str]) -> str:
        name, quoted, bare, values = found.groups()
        if name == "chat_template" and bare == "None" and "no_template" in arguments:
            return arguments["no_template"]
        if name not in arguments:
            return found[0]
        if values:  # of an argument that takes several
            return " ".join([arguments[name], *(shlex.quote(each[1:-1]) for each in re.findall(_QUOTED, values))])
        value = quoted[1:-1] if quoted else bare
        if value == "True":  # a switch
            return arguments[name]
        return f"{arguments[name]} {shlex.quote(value)}" if value and value.strip(".") else arguments[name]

    return _OPTION.sub(replaced, message)
