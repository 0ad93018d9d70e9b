"""What a GPU record measures and compares. A rehearsal without a GPU uses what the tests simulate a device with."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests"))  # `simulator`
