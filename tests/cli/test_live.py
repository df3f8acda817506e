"""The panel of a run in progress."""

import io
import os
import sys

from rich.console import Console

from flower_ext.cli.live import RunView, details
from flower_ext.runs import RunDirectory


def shown(run):
    console = Console(width=120, file=(written := io.StringIO()))
    console.print(details(run.metrics(), run.config))
    return written.getvalue()


def test_a_plain_mean_is_shown_with_the_worst_tenth(tmp_path):
    run = RunDirectory.create(tmp_path / "run", {"rounds": 3})
    run.log(2, accuracy_mean=0.7, accuracy_worst_decile=0.25)
    assert "0.700 mean, 0.250 worst tenth (round 2)" in shown(run)


def test_a_noised_mean_is_shown_with_its_error_and_claims_no_worst_tenth(tmp_path):
    run = RunDirectory.create(tmp_path / "run", {"rounds": 3})
    run.log(2, accuracy_mean=0.7, accuracy_mean_error=0.06, scored_clients=8.25)
    text = shown(run)
    assert "0.700 ± 0.06 by noise (round 2)" in text
    assert "worst tenth" not in text


def test_an_interruption_while_a_program_starts_is_not_lost():
    """An error that a signal raises in a callback of a fork is ignored, so there is no callback."""
    called, watching = [], True
    os.register_at_fork(before=lambda: called.append(1) if watching else None)
    program = RunView(None, {}).follow([sys.executable, "-c", "import os; print(os.getpgrp())"])
    program.tell()
    assert program.wait() == 0
    watching = False
    assert called == []


def test_a_program_is_in_a_process_group_that_no_terminal_signals(capfd):
    program = RunView(None, {}).follow([sys.executable, "-c", "import os; print(os.getpgrp())"])
    program.tell()
    assert program.wait() == 0
    assert capfd.readouterr().out.strip() == str(program.process.pid)
