"""The table of templates: which ones must compile, and that the page in the docs is up to date."""

import pytest
from template_cases import TRL
from template_table import KINDS, PAGE, outcome
from tiers import exhaustive

INDEX_PARTS = {
    f"trl/{name}{end}" for name in ("idefics3", "llava_next", "smolvlm") for end in ("", "_training")
}  # their content is a list of parts, never text
STOPPED_AFTER_ANSWERS = {"trl/lfm2_2_5_vl": "the template does arithmetic with the length of a message's text"}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, tuple[str, list[str]]]]:
    return {name: {kind: outcome(name, roles) for kind, roles in KINDS.items()} for name in TRL}


@exhaustive
@pytest.mark.skipif(not TRL, reason="trl is not installed")
def test_prompts_of_users_compile_with_every_text_template(
    outcomes: dict[str, dict[str, tuple[str, list[str]]]],
) -> None:
    for name in set(TRL) - INDEX_PARTS:
        assert outcomes[name]["user"] == ("compiled", []), name
        assert outcomes[name]["system, user"][0] in ("compiled", "rejected"), name


@exhaustive
@pytest.mark.skipif(not TRL, reason="trl is not installed")
def test_answers_compile_with_nearly_every_text_template(outcomes: dict[str, dict[str, tuple[str, list[str]]]]) -> None:
    for name in set(TRL) - INDEX_PARTS:
        for kind in ("with an answer", "with answers"):
            word, reasons = outcomes[name][kind]
            if name in STOPPED_AFTER_ANSWERS:
                assert (word, reasons) == ("partly", [STOPPED_AFTER_ANSWERS[name]])
            else:
                assert word in ("compiled", "rejected"), (name, reasons)


@exhaustive
@pytest.mark.skipif(not TRL, reason="trl is not installed")
def test_the_page_is_up_to_date(outcomes: dict[str, dict[str, tuple[str, list[str]]]]) -> None:
    written = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        if line.startswith("| trl/"):
            written[cells[0].strip("| ")] = [cell.strip("| ") for cell in cells[1:5]]
    assert written == {name: [outcomes[name][kind][0] for kind in KINDS] for name in TRL}
