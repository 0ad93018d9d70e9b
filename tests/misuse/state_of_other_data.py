"""The state of a loader of other data."""

import gpuload

one = gpuload.load("prompts.parquet", "tokenizer").loader(batch_size=2)
other = gpuload.load("prompts.parquet", "tokenizer", max_samples=3).loader(batch_size=2)
other.load_state_dict(one.state_dict())

# ResumeError: the state was saved for other data: options: max_samples was -1, is 3. Load what
# was loaded then, or begin an epoch with set_epoch()
