"""The former name of `flower_ext.runs`, for one release."""

import sys
import warnings

from flower_ext.runs import (
    NotARun,
    RunDirectory,
    new_run_path,
    settings,
    write_comparison,
    write_report,
)

__all__ = [
    "NotARun",
    "RunDirectory",
    "new_run_path",
    "settings",
    "write_comparison",
    "write_report",
]

warnings.warn(
    "flower_ext.reporting has moved to flower_ext.runs; import from there",
    DeprecationWarning,
    stacklevel=2,
)
sys.modules["flower_ext.reporting.settings"] = settings
