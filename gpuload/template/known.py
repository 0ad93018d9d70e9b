"""What was learned of templates, kept for later loads of this process: a run loads its training and its test data."""

import json
import os
from dataclasses import replace
from typing import Any

from gpuload.reference.template_call import TemplateCall

TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}

Key = tuple[str | None, ...]


class KnownTemplates(dict[Key, Any]):
    """What is known of `most` templates, by all that decides about it."""

    def __init__(self, most: int):
        super().__init__()
        self._most = most
        _all.append(self)

    def keep(self, key: Key, value: Any) -> None:
        """Keeps what is known; what was kept first makes room for it."""
        while len(self) >= self._most:
            self.pop(next(iter(self)), None)
        self[key] = value


_all: list[KnownTemplates] = []


def identity(call: TemplateCall, own_tools: bool = False) -> Key | None:
    """Template, constants and date of a call, which decide about everything if the tokenizer's class renders as
    transformers does; None for constants that are no plain data, or a template that transformers does not have.

    With `own_tools`, each conversation has tools of its own, for which there may be another template.
    """
    try:
        text, instant = call.text(), call.instant
        with_tools = replace(call, tools=[TOOL]).text() if own_tools else None
        context = call.context()
        constants = json.dumps(context)  # in their order, in which templates may print them
        if json.loads(constants) != context:  # tuples, or numbers as keys: templates print them in another way
            return None
    except Exception:
        return None
    return text, with_tools, constants, str(instant) if "strftime_now" in text else ""


def forget_templates() -> None:
    """Makes later loads begin with nothing."""
    for each in _all:
        each.clear()


os.register_at_fork(after_in_child=forget_templates)  # another thread may hold a lock of what is known
