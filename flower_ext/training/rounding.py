"""Matrix products that round alike wherever a matrix lies in memory."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import torch

_MKL_AUTO, _MKL_OFF, _MKL_ALL = 2, 1, -1


@cache
def products_are_reproducible() -> bool:
    """Switch on MKL's reproducible mode for the rest of this process; True if it is on.

    By default MKL's batched product of matrices rounds by the address of each matrix modulo 64
    bytes, so a model's numbers depend on its position in a batch. The mode can be chosen only
    before MKL's first call: this package does so on import. A mode that the environment variable
    ``MKL_CBWR`` names is left as it is.

    Returns
    -------
    bool
        False if MKL was used before, or if this PyTorch comes without MKL.
    """
    try:
        mkl = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        if "MKL_CBWR" not in os.environ:
            mkl.mkl_serv_cbwr_set(_MKL_AUTO)
        return int(mkl.mkl_serv_cbwr_get(_MKL_ALL)) != _MKL_OFF
    except (OSError, AttributeError):
        return False
