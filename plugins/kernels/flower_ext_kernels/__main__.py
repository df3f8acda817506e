"""``python -m flower_ext_kernels``: compile the machine code, once per machine.

Runs never wait for the machine code. Without it, networks train as without this plug-in.
"""

import sys

from flower_ext_kernels.native import NotCompiled, compile_and_store

if __name__ == "__main__":
    try:
        print(f"Compiled, in {compile_and_store()}")
    except NotCompiled as error:
        sys.exit(f"Not compiled: {error}")
