"""Settings under which rounding does not depend on an array's address or on threads."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

_MKL_AUTO, _MKL_OFF, _MKL_ALL = 2, 1, -1


@cache
def products_are_reproducible() -> bool:
    """Switch on MKL's reproducible mode for the rest of this process; return True if it is on.

    By default the rounding of MKL's batched matrix product depends on the address of each matrix
    modulo 64 bytes, so a model's numbers depend on its position in a batch. The mode can be chosen
    only before MKL's first call, so this package chooses it on import. The environment variable
    ``MKL_CBWR`` takes precedence.

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


@contextmanager
def deterministic_kernels(device: torch.device, *, strict: bool = True) -> Iterator[None]:
    """Compute on one thread of a CPU, or by deterministic kernels on an accelerator.

    On an accelerator, an operation without a deterministic kernel raises RuntimeError. If
    ``strict`` is false, the operation runs as usual instead.
    """
    if device.type == "cpu":
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
        return
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires this for cuBLAS
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    settings.fill_uninitialized_memory = False  # filling takes time
    try:
        with torch.backends.cudnn.flags(benchmark=False, deterministic=True):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]
