"""A parser for split regexes: the part of Oniguruma's Ruby syntax that tokenizers use.

Supported are literals and escapes, classes (`[...]`, `\\p{L}`, `\\s`, `.` and so on), alternation, groups, `?`, `*`,
`+`, `{n,m}`, the lazy `??`, `*?` and `+?`, `(?i:...)`, and look-ahead at one class, such as `(?!\\S)` or `(?=\\s)`. Any
other construct raises `UnsupportedRegexError` with its name. The parser does not decide which code points are in a
class: it keeps the class as text, about which `classes.py` asks the engine.
"""

from dataclasses import dataclass

_CLASS_ESCAPES = "dDsSwWhH"
_REJECTED_ESCAPES = {
    **dict.fromkeys("bByYAZzG", "the anchor"),
    **dict.fromkeys("123456789kg", "the back-reference or call"),
    **dict.fromkeys("RXKNO0cCM", "the escape"),
}
_REJECTED_GROUPS = {
    "(?>": "an atomic group",
    "(?<=": "look-behind",
    "(?<!": "look-behind",
    "(?<": "a named group",
    "(?#": "a comment",
    "(?~": "an absent operator",
    "(?(": "a condition",
}
_QUANTIFIERS = {"?": (0, 1), "*": (0, None), "+": (1, None)}
_MOST_REPEATS = 64  # an interval copies its body so often into the program


class UnsupportedRegexError(ValueError):
    """The regex contains an unsupported construct; the message names it."""


@dataclass(frozen=True)
class Atom:
    """Matches one code point of a class."""

    text: str  # the class, as a regex
    literal: str | None = None  # the character, if the class is a single one
    ignore_case: bool = False  # whether it is in a case-insensitive group


@dataclass(frozen=True)
class Ahead:
    """Look-ahead: the next code point is (`negative`: is not) in a class. At the end of the text only `negative`
    holds."""

    atom: Atom  # the class
    negative: bool  # whether this is `(?!...)` rather than `(?=...)`


@dataclass(frozen=True)
class Concat:
    """Matches the parts one after the other."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Alternate:
    """Matches the first option that leads to a match."""

    options: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    """Matches `body` `least` to `most` times; None is no limit. A lazy one prefers fewer times."""

    body: "Node"
    least: int
    most: int | None
    lazy: bool


Node = Atom | Ahead | Concat | Alternate | Repeat


def parse(pattern: str) -> Node:
    """Parse a pattern.

    Raises:
        UnsupportedRegexError: the pattern contains an unsupported construct, can match the empty text, or is malformed.
    """
    parser = _Parser(pattern)
    if pattern.startswith("(?i)"):
        parser.at = 4
        parser.ignore_case = True
    tree = parser.alternation()
    if parser.at != len(pattern):
        raise UnsupportedRegexError(f"a stray ) at position {parser.at}")
    if nullable(tree):
        raise UnsupportedRegexError("a pattern that matches the empty text")
    return tree


def nullable(node: Node) -> bool:
    """Return whether a pattern can match without taking a code point."""
    match node:
        case Atom():
            return False
        case Ahead():
            return True
        case Concat(parts):
            return all(nullable(part) for part in parts)
        case Alternate(options):
            return any(nullable(option) for option in options)
        case Repeat(body, least, _, _):
            return least == 0 or nullable(body)


def atoms(node: Node) -> list[Atom]:
    """Return every class in the tree once, in order."""
    match node:
        case Atom():
            found = [node]
        case Ahead(atom, _):
            found = [atom]
        case Concat(parts):
            found = [atom for part in parts for atom in atoms(part)]
        case Alternate(options):
            found = [atom for option in options for atom in atoms(option)]
        case Repeat(body, _, _, _):
            found = atoms(body)
    return list(dict.fromkeys(found))


class _Parser:
    """A recursive descent parser: alternation → concatenation → repetition → single.

    Attributes:
        pattern: the regex.
        at: the current position.
        ignore_case: whether the position is in a case-insensitive group.
    """

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.at = 0
        self.ignore_case = False

    def peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def take(self, text: str) -> bool:
        if self.pattern.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def alternation(self) -> Node:
        options = [self.concatenation()]
        while self.take("|"):
            options.append(self.concatenation())
        return options[0] if len(options) == 1 else Alternate(tuple(options))

    def concatenation(self) -> Node:
        parts: list[Node] = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.repetition())
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def repetition(self) -> Node:
        node = self.single()
        while True:
            sign = self.peek()
            if sign in _QUANTIFIERS and sign:
                self.at += 1
                least, most = _QUANTIFIERS[sign]
                lazy = self.take("?")
                if not lazy and self.take("+"):
                    raise UnsupportedRegexError(f"the possessive quantifier {sign}+")
            elif sign == "{" and (interval := self.interval()):
                least, most = interval
                lazy = False
                if self.peek() in ("?", "+") and self.peek():
                    raise UnsupportedRegexError(f"an interval followed by {self.peek()}")
            else:
                return node
            if isinstance(node, Repeat):
                raise UnsupportedRegexError("a quantifier on a quantifier")
            if isinstance(node, Ahead) or nullable(node):
                raise UnsupportedRegexError("a quantifier on a part that can match the empty text")
            node = Repeat(node, least, most, lazy)

    def interval(self) -> tuple[int, int | None] | None:
        inside, brace, _ = self.pattern[self.at + 1 :].partition("}")
        least, comma, most = inside.partition(",")
        if not brace or not all(c in "0123456789," for c in inside) or not (least or most) or "," in most:
            raise UnsupportedRegexError("a { that does not begin an interval")
        self.at += len(inside) + 2
        low = int(least or 0)
        high = (int(most) if most else None) if comma else low
        if max(low, high or 0) > _MOST_REPEATS or (high is not None and high < low):
            raise UnsupportedRegexError(f"the interval {{{inside}}}")
        return low, high

    def single(self) -> Node:
        sign = self.peek()
        if sign == "(":
            return self.group()
        if sign == "[":
            return self.atom(self.bracket())
        if sign == "\\":
            return self.escape()
        if sign in "^$":
            raise UnsupportedRegexError(f"the anchor {sign}")
        if sign in "?*+{":
            raise UnsupportedRegexError(f"a quantifier {sign} with nothing before it")
        self.at += 1
        return self.atom(sign, None if sign == "." else sign)

    def atom(self, text: str, literal: str | None = None) -> Atom:
        return Atom(text, literal, self.ignore_case)

    def group(self) -> Node:
        before = self.ignore_case
        for opening, name in _REJECTED_GROUPS.items():
            if self.pattern.startswith(opening, self.at):
                raise UnsupportedRegexError(name)
        ahead = None
        if self.take("(?!"):
            ahead = True
        elif self.take("(?="):
            ahead = False
        elif self.take("(?i:"):
            self.ignore_case = True
        elif self.take("(?-i:"):
            self.ignore_case = False
        elif self.take("(?:"):
            pass
        elif self.pattern.startswith("(?", self.at):
            raise UnsupportedRegexError(f"the group {self.pattern[self.at : self.at + 4]}...")
        else:
            self.at += 1
        inside = self.alternation()
        if not self.take(")"):
            raise UnsupportedRegexError("a group that is not closed")
        self.ignore_case = before
        if ahead is None:
            return inside
        if not isinstance(inside, Atom):
            raise UnsupportedRegexError("look-ahead at more than one class")
        return Ahead(inside, ahead)

    def bracket(self) -> str:
        """Read a class in brackets, which may contain further ones; return its text."""
        start, depth = self.at, 0
        while self.at < len(self.pattern):
            sign = self.pattern[self.at]
            if sign == "[":
                depth += 1
                self.at += 1
                self.take("^")
                if self.peek() == "]":
                    raise UnsupportedRegexError("a class that is empty or begins with ]")
            elif sign == "]":
                depth -= 1
                self.at += 1
                if not depth:
                    return self.pattern[start : self.at]
            else:
                self.at += 2 if sign == "\\" else 1
        raise UnsupportedRegexError("a class that is not closed")

    def escape(self) -> Atom:
        start = self.at
        sign = self.pattern[self.at + 1 : self.at + 2]
        self.at += 2
        if sign in _REJECTED_ESCAPES or not sign:
            raise UnsupportedRegexError(f"{_REJECTED_ESCAPES.get(sign, 'the escape')} \\{sign}")
        if sign in "pP":
            if not self.take("{") or "}" not in self.pattern[self.at :]:
                raise UnsupportedRegexError(f"\\{sign} without braces")
            self.at = self.pattern.index("}", self.at) + 1
            return self.atom(self.pattern[start : self.at])
        if sign in _CLASS_ESCAPES:
            return self.atom(f"\\{sign}")
        if sign in "xu":
            return self.code_point(sign)
        if sign.isalnum() or not sign.isascii():
            literal = dict(zip("tnrfvae", "\t\n\r\f\v\a\x1b", strict=True)).get(sign)
            if literal is None:
                raise UnsupportedRegexError(f"the escape \\{sign}")
            return self.atom(f"\\{sign}", literal)
        return self.atom(f"\\{sign}", sign)

    def code_point(self, sign: str) -> Atom:
        """Read `\\x41`, `\\x{1F600}` or `\\u00E9`. Without braces, `\\x80` and above would be bytes: not supported."""
        rest = self.pattern[self.at :]
        if sign == "x" and rest.startswith("{") and "}" in rest:
            digits, length = rest[1 : rest.index("}")], rest.index("}") + 1
        else:
            length = 2 if sign == "x" else 4
            digits = rest[:length]
        try:
            number = int(digits, 16)
        except ValueError:
            number = -1
        if not 0 <= number < 0x110000 or 0xD800 <= number < 0xE000 or (sign == "x" and length == 2 and number > 0x7F):
            raise UnsupportedRegexError(f"the escape \\{sign}{rest[:length]}")
        self.at += length
        return self.atom(f"\\x{{{number:X}}}", chr(number))
