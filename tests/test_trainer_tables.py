"""Each line of the tables "by columns, single rows, all rows" on the pages of trainers is shown by tests."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGES = TESTS.parent / "docs" / "trainers"

PROOFS: dict[str, list[tuple[str, str]]] = {
    "trl": [
        ("SFT: messages", "test_trl test_sft_data test_order_and_names_of_sft_data"),
        ("SFT: ShareGPT", "test_trl test_data_that_becomes_text_or_messages"),
        ("DPO, reward models, KTO", "test_trl test_preference_data"),
        ("`tools`", "test_trl test_rows_with_arguments_of_the_template"),
        ("`max_length`", "test_trl test_packed_data"),
        ("DPO and KTO: `precompute", "test_trl_training test_log_probabilities_of_the_reference_model "
         "test_trl_rejects_streams_for_the_reference_model"),
        ("streams", "test_trl_streams test_kto test_preference_data test_messages_with_other_keys "
         "test_a_row_that_trl_rejects test_a_stream_is_resumed_where_it_was"),
        ("a processor", "test_trl_processors test_text_with_a_processor test_processors_that_trl_calls_itself"),
        ("GRPO", "test_trl_prompts test_prompts_of_a_stream test_losses_of_a_stream"),
        ("a processor, and conversations", "test_trl_processors test_conversations_without_images "
         "test_losses_of_conversations_without_images test_data_that_the_collator_of_trl_prepares"),
        ("a column `images`", "test_trl test_a_column_of_images_is_a_further_column"),
        ("images", "test_trl_fallbacks test_data_that_trl_prepares_itself"),
        ("several kinds", "test_trl_fallbacks test_data_that_trl_prepares_itself"),
        ("a format", "test_trl_fallbacks test_data_that_trl_prepares_itself"),
        ("a dataset with a row", "test_trl_fallbacks test_a_row_that_cannot_be_tokenized "
         "test_rows_that_differ_from_those_of_trl"),
    ],
    "slime": [
        ("`--loss-mask-type`", "test_slime_rollout test_sft test_sft_of_whole_conversations"),
        ("tools", "test_slime_rollout test_sft_of_rows_with_their_own_tools "
         "test_sft_with_tools_that_are_no_list_of_objects"),
        ("conversations without messages", "test_slime_rollout test_sft_of_single_rows_that_differ"),
        ("answers that are not", "test_slime_rollout test_sft_of_rows_without_markers"),
        ("turns shorter", "test_slime_rollout test_sft_of_turns_that_are_shorter_than_a_generation_prompt"),
        ("tokenizers that trim", "test_slime_rollout test_sft_with_offsets_that_are_trimmed"),
        ("tokenizer classes", "test_slime_rollout test_sft_with_a_tokenizer_that_changes_how_texts_are_encoded"),
        ("JSON lines", "test_slime_rollout test_sft_that_falls_back"),
    ],
    "nemo-rl": [
        ("SFT: messages with text", "test_nemo_rl test_rows_for_sft_are_those_of_nemo_rl"),
        ("SFT: tools", "test_nemo_rl_contract test_rows_that_nemo_rl_tokenizes_itself"),
        ("SFT: content", "test_nemo_rl_contract test_rows_that_nemo_rl_tokenizes_itself "
         "test_values_that_are_not_json_are_nemo_rls"),
        ("SFT: a conversation", "test_nemo_rl test_single_rows_that_nemo_rl_tokenizes "
         "test_rows_that_nemo_rl_tokenizes_all"),
        ("prompts with text", "test_nemo_rl_contract test_rows_are_those_of_the_processor test_what_is_rejected"),
        ("prompts whose content", "test_nemo_rl_contract test_prompts_whose_content_is_not_text"),
        ("processors other", "test_nemo_rl test_other_processors_fall_back"),
        ("tokenizers that", "test_nemo_rl_contract test_a_tokenizer_that_is_not_supported_falls_back"),
        ("a function or module", "test_nemo_rl_contract test_a_part_that_has_moved_falls_back "
         "test_code_that_is_not_known_is_compared"),
    ],
    "automodel": [
        ("messages, ShareGPT", "test_automodel test_rows_are_those_of_automodel"),
        ("tools", "test_automodel test_rows_are_those_of_automodel"),
        ("rows for which", "test_automodel_contract test_rows_that_automodel_prepares_itself"),
        ("conversations that begin", "test_automodel_contract test_masks_of_any_conversation"),
        ("rows without any token", "test_automodel_contract test_rows_that_automodel_prepares_itself"),
        ("several system", "test_automodel test_rows_are_those_of_automodel"),
        ("`reasoning_content`", "test_automodel test_settings_keep_their_meaning"),
        ("rows that are truncated", "test_automodel test_sides_and_padding_tokens"),
        ("`mask_generation_prompt`", "test_automodel_contract test_what_is_not_supported_falls_back "
         "test_several_chat_templates"),
        ("tokenizers that", "test_automodel test_a_tokenizer_that_is_not_supported_falls_back"),
        ("a private function", "test_automodel_contract test_a_private_part_that_has_moved_falls_back "
         "test_a_sample_that_differs_falls_back"),
    ],
    "verl": [
        ("prompts: messages", "verl/test_rlhf_same test_wild_data test_json test_files_with_different_columns"),
        ("prompts: tools", "verl/test_rlhf_same test_tools_change_the_length "
         "test_unsupported_template_arguments_fall_back"),
        ("prompts: a processor", "verl/test_rlhf test_text_with_a_processor test_processor_that_overrides_rendering"),
        ("prompts: plain", "verl/test_rlhf test_files_without_messages"),
        ("prompts: images", "verl/test_images test_the_same_rows"),
        ("prompts: videos or audio", "verl/test_rlhf test_images"),
        ("prompts: subclasses", "verl/test_rlhf test_subclass_that_overrides_the_filter"),
        ("rollouts: the first prompt of text", "verl/test_agent_loop test_reused_ids_give_the_same_rollout "
         "test_changed_messages_fall_back test_loops_of_older_versions_are_used_unchanged "
         "test_code_that_is_not_known_builds_its_own_prompts"),
        ("rollouts: the first prompt with images", "verl/test_image_ids test_samples_of_a_prompt_share_its_ids "
         "test_what_is_not_known_is_made_by_verl"),
        ("SFT: messages", "verl/test_sft test_templates"),
        ("SFT: tools", "verl/test_sft test_tools_of_each_row test_enable_thinking"),
        ("SFT: `apply", "verl/test_sft test_arguments_of_the_template"),
        ("SFT: rows", "verl/test_sft test_contents_that_are_not_text test_tools_as_json_text_raise_as_in_verl"),
        ("SFT: a processor", "verl/test_sft test_text_with_a_processor test_processors_that_verl_calls_itself"),
        ("SFT: a column", "verl/test_sft test_fallback_to_verl"),
        ("SFT: a sample", "verl/test_sft test_wrong_mask_falls_back_to_verl"),
    ],
}  # fmt: skip
"""Page → how each line of its table begins, and the tests that show it: their file, and their names. Most of them need
that trainer."""


def lines_of(page: str) -> list[list[str]]:
    """The cells of the table whose first column is called "data"."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| data \| by columns \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


@cache
def names_in(file: str) -> set[str]:
    module = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {each.name for each in ast.walk(module) if isinstance(each, ast.FunctionDef)}


def test_every_table_is_here() -> None:
    found = {page.stem for page in PAGES.glob("*.md") if "| data | by columns |" in page.read_text(encoding="utf-8")}
    assert found == set(PROOFS)


@pytest.mark.parametrize("page", PROOFS)
def test_each_line_has_tests(page: str) -> None:
    lines = lines_of(page)
    assert len(lines) == len(PROOFS[page])
    for cells, (begin, proof) in zip(lines, PROOFS[page], strict=True):
        assert cells[0].startswith(begin)
        assert any(cells[1:]), "the line says nothing"
        file, *tests = proof.split()
        assert tests
        assert names_in(f"{file}.py").issuperset(tests), begin
