"""verl's RLHFDataset with a length filter that does not decode images: for data with images, whose rows stay verl's."""

import logging
from typing import Any

from verl.utils.dataset.rl_dataset import RLHFDataset as VerlDataset

logger = logging.getLogger("gpuload.integrations.verl")


class FilteredByHeaders(VerlDataset):  # type: ignore[misc]
    """verl's RLHFDataset, whose filter for long prompts looks at the headers of images. The rows are the same."""

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """The rows within the limit, as verl's own method returns them."""
        if not self.filter_overlong_prompts or self.processor is None or dataframe is None or not len(dataframe):
            return super().maybe_filter_out_long_prompts(dataframe)
        from gpuload.integrations.verl.image_lengths import filtered  # only for data with images

        found = filtered(self, dataframe)
        if isinstance(found, str):
            logger.warning("gpuload: verl's own filter runs the processor for every prompt: %s", found)
            return super().maybe_filter_out_long_prompts(dataframe)
        return found
