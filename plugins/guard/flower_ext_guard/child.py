"""The process of an app: ``python -m flower_ext_guard.child``, which the guard starts.

It confines itself, reads a request from its standard input, and writes the app's answer to its
standard output. Whatever the app prints goes to standard error.
"""

import json
import os
import sys

from flower_ext_guard.confinement import confine
from flower_ext_guard.flower_runtime import run_app

CONFINEMENT = "FLOWER_EXT_GUARD_CONFINEMENT"
"""Environment variable with the arguments of `confine` as JSON; without it nothing is confined."""


def main() -> None:
    """Run an app on one message."""
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if (confinement := os.environ.pop(CONFINEMENT, None)) is not None:
        confine(*json.loads(confinement), answer_fd=answer)
    with sys.stdin.buffer as stream:
        request = stream.read()
    with os.fdopen(answer, "wb") as pipe:
        pipe.write(run_app(request))
    os._exit(0)  # threads of the app may never end


if __name__ == "__main__":
    main()
