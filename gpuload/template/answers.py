"""Which parts of a rendered conversation are answers of the assistant: those that a model is trained on.

A template with `{% generation %}` blocks says so itself; the tracer records its blocks (`Path.generated`). For all
other templates the rule is:

    an answer begins after the header of an assistant's turn and ends with the marker that ends the turn

Header and marker are literals of the template. They are found once per template, by rendering short conversations whose
texts are marks (`turns.py`):

    user, with generation prompt     the text at the end is the header, up to the first <think> or as far as answers
                                     have it; if there is none, the marker that ends the user's turn, such as [/INST]
    user, assistant                  what follows the assistant's text is the marker at the end of a conversation
    user, assistant, user            what follows it is the marker, then the header of the next turn

Where neither is found next to a message of some role, such as a tool's, they are learned from conversations with tool
calls and messages of that role: the answer is what the template does not print without it.

A rendered conversation is a sequence of literals and texts, and of each text it is known whose message it is from. So
an answer must have begun in the literals before an assistant's text, and must have ended in those before the next text
of anybody else. Where header or marker are missing there, the answers are unknown, and the row is dropped. Texts are
not searched: a user's text cannot open or close an answer. Everything between belongs to the answer: `<think>` blocks,
tool calls, the white space after the marker.

    family      template                                                   answer
    ChatML      <|im_start|>assistant⏎TEXT<|im_end|>⏎                      TEXT<|im_end|>⏎
    Llama 3     <|start_header_id|>assistant<|end_header_id|>⏎⏎TEXT<|eot_id|>   TEXT<|eot_id|>
    Gemma       <start_of_turn>model⏎TEXT<end_of_turn>⏎                    TEXT<end_of_turn>⏎
    Phi         <|assistant|>⏎TEXT<|end|>⏎<|endoftext|>                    TEXT<|end|>⏎<|endoftext|>
    Mistral     [INST] TEXT[/INST] TEXT</s>                                 ⎵TEXT</s>
                [TOOL_RESULTS] {"content": TEXT}[/TOOL_RESULTS] TEXT</s>    ⎵TEXT</s>
    Cohere      <|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>TEXT<|END_OF_TURN_TOKEN|>   TEXT<|END_OF_TURN_TOKEN|>

TRL's training templates give the same answers, with four exceptions, where the header counts as part of the answer, or
a part of it does. They are followed here, see `turns.py`.
"""

import copy
import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from gpuload.reference.mask_rules import mask_rules
from gpuload.reference.template_call import TemplateCall, rejection
from gpuload.reference.template_source import blocks_of_a_message
from gpuload.template.loss_marks import OTHERS, mark_problem, shape_problem, spans_of_last, spans_with_loss, weights_of
from gpuload.template.marks import CALLS, Render, UnknownAnswersError, has_empty, taken_apart
from gpuload.template.program import Answer, ByReference, Path, Ref, Rejected, Segment, Shape
from gpuload.template.turns import End, Turns, is_inside

_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def has_blocks(template: str) -> bool:
    """Whether a template marks what an assistant generates."""
    return _BLOCK.search(template) is not None


UNSEEN = "this version of transformers does not see a {% generation %} block with which a text begins"


def first_unseen(before: Sequence[Segment]) -> bool:
    """Whether transformers may not see a block before which this may be all that is printed."""
    return mask_rules().ignores_first and not any(isinstance(segment, str) and segment for segment in before)


def with_answers(path: Path, roles: Sequence[str | None], turns: Turns, calling: Collection[int] = ()) -> Path:
    """The same path, with its answers as `generated` and literals cut where they begin and end.

    `roles` are those of the messages. `calling` are messages that have an answer although none of their texts is in the
    path, such as calls of tools without arguments. An `UnknownAnswersError` if an assistant's text is in no answer, or
    another text in one.
    """
    segments: list[Segment] = []
    generated: list[tuple[int, int]] = []
    begun: int | None = None
    ours = [turns.is_answer(role) for role in roles]
    shown = {segment.message for segment in path.segments if isinstance(segment, Ref)}
    before: int | None = None
    seen = -1
    for number, (literal, text) in enumerate(gaps := list(_gaps(path))):
        after = None if text is None else text.message
        # Messages around the text of an earlier one, such as a system's before the last user's, may be hidden.
        rest = gaps[number:] if after is not None and after <= seen else [(literal, text)]
        hidden = range(seen + 1, next((one.message for _, one in rest if one and one.message > seen), len(roles)))
        if before is not None and before == after:  # results without texts may be within the message of the call
            follow = itertools.takewhile(lambda k: not ours[k] and k not in shown, range(before + 1, len(roles)))
            hidden = range(before + 1, before + 1 + len(list(follow)))
        at, opened, place = 0, begun is not None, (before, hidden, after)
        if hidden or before == after:
            cuts = _cuts(literal, opened, place, roles, ours, turns, calling)
        else:
            first, second = (False if k is None else roles[k] for k in (before, after))
            cuts = cuts_between(literal, opened, (first, second), after is None and before in calling, turns)
        for cut in cuts:
            segments += [literal[at:cut]] if cut > at else []
            at = cut
            if begun is None:
                begun = len(segments)
            else:
                generated += [(begun, len(segments))] if len(segments) > begun else []
                begun = None
        segments += [literal[at:]] if literal[at:] else []
        if text is not None:
            segments.append(text)
            before, seen = text.message, max(seen, text.message)
    if begun is not None and len(segments) > begun:
        generated.append((begun, len(segments)))
    return Path(tuple(segments), tuple(generated))


def cuts_between(
    literal: str, opened: bool, sides: tuple[str | bool | None, ...], calling: bool, turns: Turns
) -> list[int]:
    """`_cuts` of the literals between the texts of two messages that follow each other. `sides` are their roles; False
    at the beginning and at the end. `calling`: the first one has an answer without a text, and is the last one."""
    key = (literal, opened, *sides, calling)
    if (known := turns.cuts.get(key)) is None:
        roles: list[Any] = [role for role in sides if role is not False]
        place = (None if sides[0] is False else 0, range(0), None if sides[1] is False else len(roles) - 1)
        ours = [turns.is_answer(role) for role in roles]
        known = turns.cuts[key] = _cuts(literal, opened, place, roles, ours, turns, {0} if calling else ())
    return known


def _gaps(path: Path) -> Iterator[tuple[str, Ref | None]]:
    """The literals before each text, and the text; at last those at the end, and None."""
    literal = ""
    for segment in path.segments:
        if isinstance(segment, str):
            literal += segment
        else:
            yield literal, segment
            literal = ""
    yield literal, None


def _cuts(
    literal: str,
    opened: bool,
    place: tuple[int | None, range, int | None],
    roles: Sequence[str | None],
    ours: Sequence[bool],
    turns: Turns,
    calling: Collection[int],
) -> list[int]:
    """Where answers begin and end, in turn, in the literals between two texts, the first of which is in an answer or
    not (`opened`). `place` has its message, those without texts between, and the message of the text after; `ours` says
    which messages are answers."""
    before, hidden, after = place
    wanted = None if after is None else ours[after]
    if before is not None and before == after:
        # A template may write one message as several turns.
        if not opened:
            return []
        around = [turns.around(str(roles[k])) for k in hidden]
        headers = [turns.header, *(header for each in around for header in each.headers)]
        ends = [*turns.ends_within, *(end for each in around for end in each.ends)]
        found = _search(literal, True, True, 1, headers, ends)
        return found if len(found) == 2 else []
    others = [roles[k] for k in hidden if not ours[k]]
    most = sum(ours[k] for k in hidden) + bool(wanted)
    fewest = sum(k in calling for k in hidden) + bool(wanted)
    if not opened and not most:
        return []
    if opened and wanted and (not others or not _rest(literal, turns)):
        # Answers one after the other may be one turn; also if the template prints nothing of what is between.
        found = _search(literal, True, True, most, [turns.header], turns.ends_within)
        if not found and turns.header in literal:  # nothing ends an answer but the next header
            at = literal.index(turns.header)
            found = [at, at if is_inside(turns.header) else at + len(turns.header)]
        return found if len(found) % 2 == 0 else []
    sides = [roles[k] for k in (before, after) if k is not None and not ours[k]]
    near = [str(role) for role in dict.fromkeys([*sides, *others])]
    if after is None and before in calling:
        near.append("tool")  # what ends a call may be known only from calls with results
    headers, ends = [turns.header], list(turns.ends if after is None and not others else turns.ends_within)
    # Next to a user's text, header and ends are enough if they are there.
    for learned in (False, True) if set(near) <= {"user", "system"} and not others else (True,):
        for role in near if learned else ():
            # Learned headers may not say whose turn it is, so they cannot show which of several turns has no texts.
            headers += turns.around(role).headers if most == 1 or not others else ()
            ends += turns.around(role).ends
        cuts = _search(literal, opened, wanted, most, headers, ends)
        begun = (len(cuts) + (not opened)) // 2
        if begun >= fewest and wanted in (None, opened ^ (len(cuts) % 2 == 1)):
            return cuts
    if wanted and not opened and not hidden:
        starts = [start for role in near for start in turns.around(role).starts]
        if literal.startswith(tuple(starts)):
            return [0]
    what = "begins" if not opened else "ends" if not wanted else "ends and the next one begins"
    role = ", ".join(near) or "assistant"
    raise UnknownAnswersError(f"the template does not show where an answer {what} next to a message of the role {role}")


def _rest(literal: str, turns: Turns) -> str:
    """What a literal has besides header and end markers."""
    marks = sorted((turns.header, *(end.text for end in turns.ends)), key=len, reverse=True)
    return re.sub("|".join(map(re.escape, marks)), "", literal).strip()


def _search(
    literal: str, opened: bool, wanted: bool | None, most: int, headers: Sequence[str], ends: Sequence[End]
) -> list[int]:
    """Headers and end markers, in turn, as places to cut. An answer has begun before or not (`opened`), what follows is
    `wanted` in an answer or not, None if nothing follows, and `most` answers can begin here."""
    cuts: list[int] = []
    at = 0
    while most or (opened and not wanted):
        if opened:
            found = [(place, -len(end.text)) for end in ends if (place := literal.find(end.text + end.next, at)) >= 0]
            if not found:
                break
            place, size = min(found)
            at = place - size
            cuts.append(at)
        else:
            # The last header before the answer's text: those before may be of other messages, or in the descriptions of
            # tools.
            last = most == 1 and wanted
            find = literal.rfind if last else literal.find
            found = [(place, len(header)) for header in headers if (place := find(header, at)) >= 0]
            if not found:
                break
            place, size = max(found, key=sum) if last else min(found, key=lambda each: (each[0], -each[1]))
            cuts.append(place if is_inside(literal[place:]) else place + size)
            at = place + size
            most -= 1
        opened = not opened
    return cuts


class Answers:
    """Finds the parts with loss in what one template renders; a `TokenizerError` if its answers are unknown.

    `loss_on` is "assistant" for all answers, "last" for those of the last message of an assistant, "marked" for those
    that have loss as their messages say (`loss_marks.py`); `weights` are those, other than 0 and 1, that messages have.
    """

    def __init__(self, call: TemplateCall, loss_on: str, weights: Sequence[float] = ()) -> None:
        self._call, self._text, self.loss_on = call, call.text(), loss_on
        self._number = {1.0: 0} | {weight: number for number, weight in enumerate(weights, 1)}
        self._known: dict[str, Turns | None] = {}  # for each template: with tools, transformers may choose another one
        _ = self.turns

    @property
    def turns(self) -> Turns | None:
        """How the template writes the turns of an assistant; None if it has `{% generation %}` blocks."""
        text = self._text
        if text not in self._known:
            self._known[text] = None if has_blocks(text) else Turns(self._call)
        return self._known[text]

    def with_call(self, call: TemplateCall) -> "Answers":
        """For the same template with other constants, such as tools."""
        other = copy.copy(self)
        other._call, other._text = call, call.text()
        return other

    def problem(self, messages: Sequence[Any]) -> str | None:
        """Why it is unknown which answers of a conversation have loss, whatever the template; None if it may be."""
        return mark_problem(messages) if self.loss_on == "marked" else None

    def of_path(self, shape: Shape, path: Path) -> Path | ByReference | Rejected:
        """A path with its parts with loss as `generated`; or why rows cannot take it, or are rejected."""
        roles = [dict(message).get("role") for message in shape]
        turns = self.turns
        if self.loss_on == "marked" and (why_not := shape_problem(shape)):
            return Rejected(why_not)
        try:
            if turns is not None:
                path = with_answers(path, roles, turns)
            if path.generated is None:
                return ByReference("the template prints a {% generation %} block elsewhere than where it stands")
            if path.generated and turns is None and first_unseen(path.segments[: path.generated[0][0]]):
                return ByReference(UNSEEN)
            if self.loss_on == "last":
                texts = [(k, s.message) for k, s in enumerate(path.segments) if isinstance(s, Ref)]
                last = spans_of_last(path.generated, texts, self._ours(roles), self._alone)
                path = replace(path, generated=tuple(last))
        except UnknownAnswersError as error:
            return Rejected(rejection(error))
        return path

    def of_text(
        self,
        messages: Sequence[Any],
        text: str,
        render: Render | None = None,
        blocks: list[tuple[int, int]] | None = None,
        parts: tuple[Path, dict[Ref, str]] | None = None,
    ) -> list[Answer]:
        """The parts with loss of one conversation: start and end of each in its `text`, in characters, and the number
        of its weight if that is not 1; an `UnknownAnswersError` if they are unknown.

        Args:
            render: renders another conversation as transformers does; None for transformers itself.
            blocks: start and end of its `{% generation %}` blocks, in characters, if they are known.
            parts: what the text is made of, as `taken_apart` returns it, if that is known, of messages with nothing but
                roles and contents.
        """
        turns, loss = self.turns, weights_of(messages) if self.loss_on == "marked" else []
        every = self.loss_on != "last" and all(weight == 1 for weight in loss)
        if turns is None:
            spans = self._blocks(messages, text) if blocks is None else blocks
            if every:
                return list(spans)
        render = render or self._call.render
        path, texts, others = (*parts, []) if parts else taken_apart(render, messages, text)
        roles = [message.get("role") for message in messages]
        if turns is not None:
            calling = {k for k, message in enumerate(messages) if any(map(message.get, CALLS))}
            marked: Path | None = None
            try:
                marked = with_answers(path, roles, turns, calling)
            except UnknownAnswersError:
                if not any(map(has_empty, messages)):
                    raise
            if marked is None or _hides_turns(path, roles, messages, turns):
                path, texts, others = taken_apart(render, messages, text, empty=True)
                marked = with_answers(path, roles, turns, calling)
            path = marked
            _check_others(others, turns)
        places = [0, *itertools.accumulate(len(s) if isinstance(s, str) else len(texts[s]) for s in path.segments)]
        if turns is not None:
            spans = [(places[first], places[end]) for first, end in path.generated or ()]
        if every:
            return list(spans)
        begins = [(place, s.message) for place, s in zip(places, path.segments, strict=False) if isinstance(s, Ref)]
        ours = self._ours(roles)
        if self.loss_on == "last":
            return [*spans_of_last(spans, begins, ours, self._alone)]
        found = spans_with_loss(spans, begins, loss, ours, self._alone)
        return [span if weight == 1 else (*span, self._number_of(weight)) for span, weight in found.items()]

    def _ours(self, roles: Sequence[Any]) -> list[bool]:
        """Which messages are answers."""
        if (turns := self.turns) is not None:
            return [turns.is_answer(role) for role in roles]
        return [role not in OTHERS for role in roles]  # blocks may be for a role of any name

    @property
    def _alone(self) -> bool:
        """See `messages_of`: with several blocks, one may be for what the template writes around the text."""
        return self.turns is not None or blocks_of_a_message(self._text) == 1

    def _number_of(self, weight: float) -> int:
        if weight not in self._number:
            raise UnknownAnswersError(f"no message had the weight {weight} when the files were opened: load them again")
        return self._number[weight]

    def _blocks(self, messages: Sequence[Any], text: str) -> list[tuple[int, int]]:
        rendered, spans = self._call.blocks(messages)
        if rendered != text:
            raise UnknownAnswersError("the template is not deterministic")
        return spans

    def in_bytes(self, messages: Sequence[Any], text: str, **known: Any) -> list[Answer]:
        """As `of_text`, in bytes."""
        return spans_in_bytes(text, self.of_text(messages, text, **known))


def _hides_turns(path: Path, roles: Sequence[Any], messages: Sequence[Any], turns: Turns) -> bool:
    """Whether answers may begin or end at empty texts, which are not in the path: in a message that has no other text,
    or where there is not one header for each message."""
    answers = [number for number, role in enumerate(roles) if turns.is_answer(role)]
    empty = {number for number in answers if has_empty(messages[number])}
    if not empty:
        return False
    shown = {segment.message for segment in path.segments if isinstance(segment, Ref)}
    headers = turns.headers_near({str(role) for role in roles})
    begun = sum(len(headers.findall(segment)) for segment in path.segments if isinstance(segment, str))
    return begun != len(answers) or not empty <= shown


def spans_in_bytes(text: str, spans: Sequence[Answer]) -> list[Answer]:
    """Start and end of parts of a text in bytes, given in characters. Lone surrogates are rejected later."""
    if text.isascii():
        return list(spans)
    found, before = {0: 0}, 0
    for place in sorted({place for span in spans for place in span[:2]}):
        found[place] = found[before] + len(text[before:place].encode(errors="surrogatepass"))
        before = place
    return [(found[span[0]], found[span[1]], *span[2:]) for span in spans]


def _check_others(others: Sequence[str], turns: Turns) -> None:
    """Checks that the texts of a conversation that may be within literals cannot open or close an answer."""
    marks = {literal.strip() or literal for literal in turns.literals()}
    if any(mark in text for mark in marks for text in others):
        raise UnknownAnswersError("a tool call or another field contains the beginning or the end of a turn")
