"""Run directories, their settings, reports, comparisons and figures."""

from flower_ext.runs.comparison import write_comparison
from flower_ext.runs.directory import NotARun, RunDirectory, RunWriter, new_run_path
from flower_ext.runs.report import write_report

__all__ = [
    "NotARun",
    "RunDirectory",
    "RunWriter",
    "new_run_path",
    "write_comparison",
    "write_report",
]
