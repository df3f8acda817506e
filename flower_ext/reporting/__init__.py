"""Run directory, report, figures and the command line."""

from flower_ext.reporting.comparison import write_comparison
from flower_ext.reporting.report import write_report
from flower_ext.reporting.run import NotARun, RunDirectory, new_run_path

__all__ = ["NotARun", "RunDirectory", "new_run_path", "write_comparison", "write_report"]
