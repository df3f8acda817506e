"""Code that imports the package anew, in a fork of the test's process.

A new Python would import PyTorch and Flower for two seconds of the processor. Where a test needs
other than the package itself to be new, such as the seed of hashes, start a process.
"""

from __future__ import annotations

import os
import sys
import traceback
from subprocess import CompletedProcess
from tempfile import TemporaryFile


def run_anew(code: str, *packages: str) -> CompletedProcess[str]:
    """Run code as ``python -c`` does, without the package, its tests and ``packages`` imported."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as errors:
        pid = os.fork()
        if not pid:
            status = 1
            try:
                _forget("flower_ext", "tests", *packages)
                status = _status_of(code, out.fileno(), errors.fileno())
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        errors.seek(0)
        return CompletedProcess(code, status, out.read(), errors.read())


def _forget(*packages: str) -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] in packages:
            del sys.modules[name]


def _status_of(code: str, out: int, errors: int) -> int:
    """Run code in this process with other streams, and return its exit status."""
    sys.stdout, sys.stderr = (os.fdopen(place, "w") for place in (out, errors))
    status = 0
    try:
        exec(code, {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status
