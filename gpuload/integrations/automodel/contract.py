"""What the dataset here uses of Automodel that is private, and which releases of it are known."""

from gpuload.integrations.known_code import Table

KNOWN: Table = {
    "nemo_automodel.components.datasets.llm.chat_dataset:ChatDataset.__getitem__": {"a13892d6ff01a410": "0.7.0"},
}
"""`python -m gpuload.integrations.known_code automodel` prints the digests of the installed Automodel."""

NAMES = {
    "nemo_automodel._transformers.tokenization.nemo_auto_tokenizer": ("NeMoAutoTokenizerWithBosEosEnforced",),
    "nemo_automodel.components.datasets.llm.chat_dataset": ("_conversations_to_messages", "_normalize_messages"),
    "nemo_automodel.components.datasets.llm.formatting_utils": ("GENERATION_REGEX", "_package_tokenized_example"),
}
"""Module → what is used of it."""
