"""``python -m flower_ext_kernels``: compile the machine code, once per machine.

Compiling takes half a minute on a free processor, and up to a minute and a half on a busy one. Runs
never wait for the machine code. Without the code, networks train as without this plug-in.
"""

from __future__ import annotations

import sys

from flower_ext_kernels.native import NotCompiled, compile_and_keep

if __name__ == "__main__":
    try:
        print(f"Compiled, in {compile_and_keep()}")
    except NotCompiled as error:
        sys.exit(f"Not compiled: {error}")
