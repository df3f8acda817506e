"""A process that forks guards, each of which serves one message or kills itself at a given point.

    python -m dying_guard

reads one line of JSON for each guard: policy, address, and either null or a point [name, when,
number]. The guard dies when the function of this name begins ("before") or has returned ("after")
for the number-th time. The process prints how the guard ended. It imports everything once, and
forks while it has only one thread.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

from flower_ext.privacy.accounting.accountant import privacy_loss_of
from flower_ext.privacy.ledger import LedgerFile
from flower_ext_guard import app_process, flower_runtime, service
from flower_ext_guard.flower_runtime import Runtime, RuntimeHttpClient, RuntimeTask
from flower_ext_guard.policy import read_policy
from flower_ext_guard.service import Guard, Pending

PLACES = {
    "pull": (RuntimeTask, "pull"),
    "check the budget": (service, "check_affordable"),
    "start the app": (app_process.subprocess, "Popen"),
    "run the app": (service, "answer_of"),
    "noise": (service, "released"),
    "make the reply": (service, "reply_bytes"),
    "store the reply": (service, "write_whole"),
    "read the reply": (Pending, "from_bytes"),
    "charge": (service, "charge"),
    "write the ledger": (LedgerFile, "append"),
    "push": (RuntimeHttpClient, "PushMessages"),
    "push an array": (RuntimeHttpClient, "PushObject"),
    "finish": (RuntimeHttpClient, "PushTaskOutput"),
}


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def plant(name: str, when: str, number: int) -> None:
    """Let this process die at a point."""
    owner, attribute = PLACES[name]
    real, calls, lock = getattr(owner, attribute), 0, threading.Lock()

    def dying(*arguments, **named):
        nonlocal calls
        with lock:  # Flower pushes arrays in several threads
            calls += 1
            call = calls
        if call == number and when == "before":
            _die()
        result = real(*arguments, **named)
        if call == number:
            _die()
        return result

    setattr(owner, attribute, dying)


def main() -> None:
    import dp_accounting  # noqa: F401 - before the forks

    assert flower_runtime
    assert privacy_loss_of
    for line in sys.stdin:
        order = json.loads(line)
        if process := os.fork():
            _, status = os.waitpid(process, 0)
            print(f"ended {os.waitstatus_to_exitcode(status)}", flush=True)
            continue
        os.dup2(2, 1)
        if order["point"] is not None:
            plant(*order["point"])
        runtime = Runtime(order["address"], root_certificates=None, secret=b"secret")
        Guard(read_policy(Path(order["policy"])), runtime).serve_one()
        os._exit(0)


if __name__ == "__main__":
    main()
