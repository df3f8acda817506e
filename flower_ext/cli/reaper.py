"""A process that ends all other processes of a command once the command has ended.

A command cannot clean up after SIGKILL or a crash: its run would continue unseen and spend the rest
of its ε. The command therefore starts this file as a process of its own and holds the only write
end of that process's standard input. The system closes that end when the command ends, in whatever
way.

The reaper finds processes by a variable that all of them inherit, and by their parents. A signal
that follows a parent's death (``PR_SET_PDEATHSIG``) would reach direct children only, and only on
Linux; Ray's daemons and a SuperLink's ServerApp are grandchildren.

The file runs by itself: it imports nothing of the package, so that it starts within milliseconds.
"""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

_MARK = "FLOWER_EXT_COMMAND"
"""Variable in the environment of all processes of a command."""

_PATIENCE = 30
"""Seconds after which the reaper gives up: nothing ends a process that is stuck in the kernel."""


@contextmanager
def reaped() -> Iterator[None]:
    """When the block or this process ends, end every process that was started in the block.

    The reaper finds only processes that inherit the block's environment, and their descendants.
    """
    mark, former = f"{os.getpid()}-{secrets.token_hex(8)}", os.environ.get(_MARK)
    # A session of its own keeps signals to the command's terminal and process group away.
    reaper = subprocess.Popen(
        # -P keeps modules beside this file from shadowing those of libraries. -I would also hide a
        # psutil that is installed for this user only.
        [sys.executable, "-P", __file__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.environ[_MARK] = mark
    try:
        yield
    finally:
        if former is None:
            del os.environ[_MARK]
        else:
            os.environ[_MARK] = former
        reaper.communicate()


def _reap(mark: str) -> None:
    # A process may hide its environment, as Ray's workers do, but not its parent. Use SIGKILL,
    # because it leaves no time to begin another round; run directories and ledgers survive it.
    deadline, doomed = time.monotonic() + _PATIENCE, set[psutil.Process]()
    while time.monotonic() < deadline:
        table = [*psutil.process_iter(["ppid", "environ", "status"])]
        marked = {each for each in table if (each.info["environ"] or {}).get(_MARK) == mark}
        doomed |= _family(marked, table)
        alive = {each for each in table if each.info["status"] != psutil.STATUS_ZOMBIE}
        running = doomed & alive
        if not running:
            return
        for process in running:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
        time.sleep(0.1)


def _family(roots: set[psutil.Process], table: list[psutil.Process]) -> set[psutil.Process]:
    family, generation = set[psutil.Process](), roots
    while generation:
        family |= generation
        parents = {process.pid for process in generation}
        generation = {each for each in table if each.info["ppid"] in parents} - family
    return family


if __name__ == "__main__":
    sys.stdin.buffer.read()  # returns when the command has ended
    _reap(sys.argv[1])
