"""The log of a run: programs that are followed."""

import os
import sys

from flower_ext.cli.processes import Followed, RunLog

PRINT_GROUP = [sys.executable, "-c", "import os; print(os.getpgrp())"]


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
