"""Real data sets, where there are any: tests that need them are skipped without."""

import os
from pathlib import Path

REAL = Path(os.environ.get("FLOWER_EXT_DATA") or Path(__file__).parents[3] / "shared" / "data")
