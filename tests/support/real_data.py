"""Folder of the real data sets; tests skip the sets that it lacks."""

import os
from pathlib import Path

REAL = Path(os.environ.get("FLOWER_EXT_DATA") or Path(__file__).parents[3] / "shared" / "data")
