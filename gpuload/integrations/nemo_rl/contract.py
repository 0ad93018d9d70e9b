"""What the datasets here use of NeMo-RL that may move, and which releases of it are known."""

from gpuload.integrations.known_code import Table

KNOWN: Table = {
    "nemo_rl.data.processors:math_hf_data_processor": {"69ff4b0b7ddf232c": "0.7.0"},
    "nemo_rl.data.processors:sft_processor": {"69b2e4956586d6c7": "0.7.0"},
}
"""`python -m gpuload.integrations.known_code nemo_rl` prints the digests of the installed NeMo-RL."""

NAMES = {
    "nemo_rl.algorithms.utils": ("get_tokenizer",),
    "nemo_rl.data.processors": ("math_hf_data_processor", "sft_processor"),
}
"""Module → what is used of it."""
