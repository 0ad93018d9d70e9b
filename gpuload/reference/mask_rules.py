"""How this version of transformers makes a mask of `{% generation %}` blocks, which its releases do differently."""

from functools import cache
from typing import NamedTuple


class MaskRules(NamedTuple):
    """What `apply_chat_template(..., return_assistant_tokens_mask=True)` does.

    Attributes:
        overlapping: it marks all tokens that have a character of a block, as 5.24 does; otherwise those from the token
            of the first character to that of the last one.
        ignores_first: it does not see a block before which the template has printed nothing, as 4.57 does.
    """

    overlapping: bool
    ignores_first: bool


@cache
def mask_rules() -> MaskRules:
    """The rules of the installed version, which is tried out."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)

    def mask(template: str) -> list[int]:
        encoded = tokenizer.apply_chat_template(
            [{"role": "assistant", "content": ""}],
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return list(encoded["assistant_masks"])

    # The other rule marks everything behind a block that ends in the first token.
    within = mask("{{ 'a' }}{% generation %}a{% endgeneration %} b")
    return MaskRules(within == [1, 0], not any(mask("{% generation %}a{% endgeneration %} b")))
