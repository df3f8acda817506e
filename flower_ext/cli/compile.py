"""``flower-ext compile``: make the machine code that trains networks, before the first run."""

from __future__ import annotations

from importlib.util import find_spec

from flower_ext.cli.screen import console
from flower_ext.errors import InvalidValue


def compile() -> None:
    """Compile the training of dense and convolutional networks, once per machine: half a minute.

    Runs never wait for it. Without it, such networks train by PyTorch alone, more slowly.
    """
    if find_spec("numba") is None:
        raise InvalidValue("compiling needs Numba: pip install 'flower-ext[fast]'")
    from flower_ext.training.batched.native import compile_and_keep

    console.print(f"Compiled, in {compile_and_keep()}", highlight=False, soft_wrap=True)
