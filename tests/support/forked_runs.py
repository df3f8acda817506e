"""Runs of commands as forks of the test's process, which has imported everything already.

A new Python imports for four seconds of the processor before it runs an app. Commands and runs that
a signal ends, in `tests.cli.test_ending`, are new processes.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence

from flower_ext.federation.engines import run_app


class Fork:
    """The part of `subprocess.Popen` that `flower_ext.cli.processes.Followed` uses."""

    def __init__(self, command: Sequence[str], **_: object) -> None:
        assert list(command[:3]) == [sys.executable, "-m", run_app.__name__]
        pipes = [os.pipe() for _ in range(3)]
        (stdin, self_stdin), (self_stdout, stdout), (self_stderr, stderr) = pipes
        self.pid = os.fork()
        if not self.pid:
            for place, stream in enumerate((stdin, stdout, stderr)):
                os.dup2(stream, place)
            for end in sum(pipes, ()):
                os.close(end)
            os._exit(_status_of_run(command[2:]))
        for end in (stdin, stdout, stderr):
            os.close(end)
        self.stdin = os.fdopen(self_stdin, "w", encoding="utf-8")
        self.stdout, self.stderr = (
            os.fdopen(end, encoding="utf-8", errors="replace") for end in (self_stdout, self_stderr)
        )

    def wait(self, seconds: float | None = None) -> int:
        """Return the exit status, negative if a signal ended the process."""
        assert seconds is None  # only an interrupted command has a deadline
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _status_of_run(words: Sequence[str]) -> int:
    """Do what a new process does with these words; return its exit status."""
    try:
        os.setpgid(0, 0)
        sys.argv = [*words]
        # Streams and handlers of pytest lead elsewhere.
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(place, mode, encoding="utf-8") for place, mode in enumerate("rww")
        )
        for handler in logging.getLogger("flwr").handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(sys.stderr)
        run_app.main()
        return 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
