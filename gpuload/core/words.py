"""Numbers of things, in words."""

import re

_VERBS = {"have": "has", "are": "is", "were": "was", "differ": "differs", "change": "changes", "exceed": "exceeds"}


def counted(count: int, what: str) -> str:
    """So many things: "2,000 rows have loss", "1 row has loss", "1 more entry".

    `what` is in words, as for many; the first word that ends with an "s" is the noun.
    """
    if count != 1:
        return f"{count:,} {what}"
    words = what.split(" ")
    noun = next(k for k, word in enumerate(words) if word.endswith("s"))
    words[noun] = re.sub("ies$", "ys", re.sub("(ch|x)es$", r"\1s", words[noun]))[:-1]
    words[noun + 1 : noun + 2] = [_VERBS.get(word, word) for word in words[noun + 1 : noun + 2]]
    return f"1 {' '.join(words)}"
