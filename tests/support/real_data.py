"""Skip tests that need a real data set if it is not on this machine."""

import os
from pathlib import Path

REAL = Path(os.environ.get("FLOWER_EXT_DATA") or Path(__file__).parents[3] / "shared" / "data")
