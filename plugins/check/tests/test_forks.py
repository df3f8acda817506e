"""Forks in which the check runs an app."""

import os
import signal
import sys
import time
from contextlib import suppress
from subprocess import PIPE, Popen

import psutil

from flower_ext_check.forks import in_fork

NESTED = """
import os, time
import psutil
from flower_ext_check.forks import in_fork

def inner():
    print(os.getpid(), flush=True)
    time.sleep(300)

in_fork(lambda: in_fork(inner))
"""


def is_running(number: int) -> bool:
    """Return False for a process that has ended, even if nobody has asked for its exit status."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    return False


def test_a_fork_that_dies_or_times_out_returns_none():
    assert in_fork(lambda: os.getpid()) != os.getpid()
    assert in_fork(lambda: os._exit(0)) is None
    assert in_fork(lambda: time.sleep(300), seconds=0.1) is None


def test_forks_of_forks_end_with_a_check_that_is_killed():
    with Popen([sys.executable, "-c", NESTED], stdout=PIPE, text=True) as check:
        innermost = int(check.stdout.readline())
        assert is_running(innermost)
        check.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while is_running(innermost) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(innermost)
