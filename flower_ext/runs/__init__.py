"""Run directories, their settings, reports, comparisons and figures."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flower_ext.runs.directory import NotARun, RunDirectory, new_run_path

if TYPE_CHECKING:
    from flower_ext.runs.comparison import write_comparison
    from flower_ext.runs.report import write_report

__all__ = ["NotARun", "RunDirectory", "new_run_path", "write_comparison", "write_report"]

_LATER = {"write_comparison": "comparison", "write_report": "report"}
"""Names that a client's process never needs, and their modules."""


def __getattr__(name: str) -> Any:
    """Import the modules that write reports when a caller first asks for them."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
