"""The process that ends what a command started: also after SIGKILL, and nothing else."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from flower_ext.cli.reaper import reaped

SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]

FAMILY = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
hidden = subprocess.Popen(sleep, env={}, start_new_session=True)  # as Ray's workers hide theirs
orphan = int(subprocess.check_output([sys.executable, "-c", '''
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"],
    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    start_new_session=True)
print(child.pid)
''']))  # its parent has ended already, as a daemon's
print(os.getpid(), hidden.pid, orphan, flush=True)
time.sleep(300)
"""
"""A process with a child and an orphaned grandchild, each in a session of its own."""

COMMAND = f"""
import subprocess, sys
from flower_ext.cli.reaper import reaped
with reaped():
    subprocess.run([sys.executable, "-c", {FAMILY!r}])
"""


def left(pids, *, seconds=20):
    """Return those of the processes that still run after so many seconds."""
    end = time.monotonic() + seconds
    while (running := [pid for pid in pids if _runs(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return running


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_s_whole_family_ends_with_it(number):
    bystander = subprocess.Popen(SLEEP)
    with subprocess.Popen([sys.executable, "-c", COMMAND], stdout=subprocess.PIPE) as command:
        family = [int(pid) for pid in command.stdout.readline().split()]
        assert len(family) == 3
        command.send_signal(number)
        command.wait()
        assert left(family) == []
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_what_a_block_leaves_running_ends_with_the_block():
    before = dict(os.environ)
    with reaped():
        process = subprocess.Popen(SLEEP)
    assert process.wait(20) == -signal.SIGKILL
    assert dict(os.environ) == before
