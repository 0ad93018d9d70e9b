"""The options of rows as served."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpuload.core.errors import OptionError
from gpuload.core.options import History, LossOn, MissingReasoning, Options, TurnsMode, template_source

OF_SERVED = ("turns", "missing_reasoning", "serving_template", "thinking", "history")
"""Names of these options."""

LOSS_ON: dict[str, tuple[LossOn, ...]] = {
    **dict.fromkeys(("messages", "sharegpt"), ("assistant", "last", "last_turn", "marked")),
    "alpaca": ("assistant", "last", "last_turn"),
    "prompt-completion": ("completion", "assistant", "last", "last_turn", "marked"),
}
"""What can have loss in data of each format; the first is the default."""


@dataclass(frozen=True, kw_only=True)
class ServedOptions:
    """How conversations become rows: as for `load_chats`."""

    turns: TurnsMode = "conversation"
    missing_reasoning: MissingReasoning = "prompt"
    serving_template: str | None = None
    thinking: tuple[str, str] | None = None
    history: History = "rendered"

    @property
    def as_served(self) -> bool:
        """Whether rows are those that inference would see."""
        return self.turns == "served"

    def of_turns(self) -> dict[str, Any]:
        """These options, as arguments of `ServedReference`."""
        template = self.serving_template
        return {
            "missing_reasoning": self.missing_reasoning,
            "serving_template": None if template is None else template_source(template, "serving_template"),
            "history": self.history,
            "thinking": None if self.thinking is None else tuple(self.thinking),
        }

    def check_turns(self) -> None:
        """Checks these options; an `OptionError` if a value is invalid, or is for turns='served' only."""
        if not self.as_served:
            default = ServedOptions()
            for name in OF_SERVED[1:]:
                if getattr(self, name) != getattr(default, name):
                    raise OptionError(f"{name}={getattr(self, name)!r:.80} is for turns='served': pass that too")
        pair = self.thinking
        texts = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
        if pair is not None and not (texts and all(isinstance(each, str) and each.strip() for each in pair)):
            raise OptionError(
                f"thinking={pair!r:.80}: expected the two texts that open and close reasoning, such as "
                "('<think>\\n', '\\n</think>\\n\\n')"
            )
        if self.serving_template is not None and not (
            isinstance(self.serving_template, str) or hasattr(self.serving_template, "__fspath__")
        ):
            raise OptionError(
                f"serving_template={self.serving_template!r:.80}: expected a template's name or text, or the path of a "
                ".jinja file"
            )


def check_limits(options: Options) -> None:
    """Checks the options of a load of rows as served; an `OptionError` if a GPU is asked for, or rows are to lose their
    beginning."""
    if options.device.startswith("cuda"):
        raise OptionError(f"device={options.device!r}: turns='served' is made on the CPU: use device='auto' or 'cpu'")
    if options.truncation == "left":
        raise OptionError(
            "overlong='keep_end' is not possible with turns='served', because no answer would be behind its whole "
            "prompt: use 'drop', or 'keep_start', which ends rows behind their last whole answer"
        )
