"""The log of a run: programs that are followed, and tracebacks that explain themselves."""

import os
import sys

import pytest

from flower_ext.cli.run_log import Followed, RunLog, Tracebacks

PRINT_GROUP = [sys.executable, "-c", "import os; print(os.getpgrp())"]
FRAMES = [
    "Traceback (most recent call last):",
    '  File "server_app.py", line 33, in main',
    "    plan = plan_of(config)",
    "           ^^^^^^^^^^^^^^^",
]
CHAINED = ["", "The above exception was the direct cause of the following exception:", ""]
OWN = "flower_ext.errors.InvalidValue: epsilon=-1.0: expected a finite number > 0"
MISSING = "ModuleNotFoundError: flower_ext.secure needs phe: pip install 'flower-ext[weighting]'"
FOREIGN = "KeyError: 'label'"


def shown(*lines):
    tracebacks = Tracebacks()
    told = [one for line in lines for one in tracebacks.shown(line)]
    return told + tracebacks.rest()


@pytest.mark.parametrize("error", [OWN, MISSING])
@pytest.mark.parametrize("cause", [[], [*FRAMES, FOREIGN, *CHAINED]], ids=["alone", "caused"])
@pytest.mark.parametrize("after", [[], ["ERROR: exit code 700", "", "  more"]], ids=["end", "more"])
def test_the_traceback_of_an_explained_error_is_left_out_with_its_causes(error, cause, after):
    before = ["INFO: round 1", "", "  indented"]
    assert shown(*before, *cause, *FRAMES, error, *after) == [*before, *after]


@pytest.mark.parametrize(
    "log",
    [
        [*FRAMES, FOREIGN],
        [*FRAMES, FOREIGN, "INFO: round 2"],
        [*FRAMES, OWN, *CHAINED, *FRAMES, FOREIGN, "INFO: round 2"],
        [*FRAMES, FOREIGN, *FRAMES, FOREIGN, ""],
        FRAMES,
    ],
)
def test_every_other_line_is_shown_once_and_in_its_order(log):
    assert shown("INFO: round 1", *log) == ["INFO: round 1", *log]


def test_an_explained_error_hides_no_other_traceback():
    found = shown(*FRAMES, FOREIGN, "", "INFO: round 2", *FRAMES, OWN)
    assert found == [*FRAMES, FOREIGN, "", "INFO: round 2"]


def test_colours_of_a_log_do_not_matter():
    assert shown(f"\x1b[91m{FRAMES[0]}\x1b[0m", *FRAMES[1:], OWN) == []


def test_an_interruption_while_a_program_starts_is_not_lost():
    """An error that a signal raises in a callback of a fork is ignored, so there is no callback."""
    called, watching = [], True
    os.register_at_fork(before=lambda: called.append(1) if watching else None)
    program = Followed(PRINT_GROUP, RunLog())
    program.tell()
    assert program.wait() == 0
    watching = False
    assert called == []


def test_a_program_is_in_a_process_group_that_no_terminal_signals(capfd):
    program = Followed(PRINT_GROUP, RunLog())
    program.tell()
    assert program.wait() == 0
    assert capfd.readouterr().out.strip() == str(program.process.pid)
