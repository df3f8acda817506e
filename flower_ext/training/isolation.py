"""Keep other code of the process from changing a training: settings, random draws, rounding.

A client's code may change a setting of the process because of the client's data. It might leave
gradients switched off, for example. That would change what other clients send, and clipping each
update does not bound such a change.
"""

import ctypes
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

R = TypeVar("R")

_MKL_AUTO, _MKL_OFF, _MKL_ALL = 2, 1, -1


class ClientCrashed(RuntimeError):
    """A client's code raised a BaseException such as SystemExit; see ``__cause__``."""


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
)
"""Functions that read a setting of the process, and that change it."""


class isolated:
    """Restore grad mode, the default type and the number of threads after one client's code.

    Code usually changes only these settings, and reading them takes less than a microsecond. A task
    that changes another setting of its process, such as the default device, must set it for every
    client.

    Raises
    ------
    ClientCrashed
        The client's code raises a BaseException that is not an Exception, such as SystemExit. A
        KeyboardInterrupt by the user passes unchanged.
    """

    # No generator, which Python would end with a printed error if an interrupt skips `__exit__`.
    def __enter__(self) -> None:
        self._before = [read() for read, _ in _SETTINGS]

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for (read, change), before in zip(_SETTINGS, self._before, strict=True):
            if read() != before:
                change(before)
        if error is not None and not isinstance(error, Exception | KeyboardInterrupt):
            raise ClientCrashed(f"the client's code raised {type(error).__name__}") from error


def attempted(step: Callable[..., R], *arguments: Any) -> R | Exception:
    """Call one client's ``step``; return its result or its error, so that others continue."""
    try:
        with isolated():
            return step(*arguments)
    except Exception as error:  # data, models and methods may raise anything
        return error


def default_device() -> torch.device:
    """Return the accelerator if there is one, and the CPU otherwise."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's own generators in this context, for draws such as those of dropout.

    Afterwards, the generators of the CPU and of ``device`` have the state from before. If
    ``device`` is the CPU, accelerators are not seeded: seeding them takes ten times as long.
    """
    if device.type != "cpu":
        with torch.random.fork_rng([device], device_type=device.type):
            torch.manual_seed(seed)
            yield
        return
    former = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(former)


def draws_generator(generator: torch.Generator) -> torch.Generator:
    """Return a new generator with the seed `draws_seed`.

    Torch's own generator draws the same numbers if `seeded` gives it this seed.
    """
    return torch.Generator().manual_seed(draws_seed(generator))


def draws_seed(generator: torch.Generator) -> int:
    """Compute a seed for a model's own draws from the generator that draws its mini-batches."""
    digest = hashlib.sha256(generator.get_state().numpy().tobytes()).digest()
    return int.from_bytes(digest[:8]) >> 1


@cache
def products_are_reproducible() -> bool:
    """Switch on MKL's reproducible mode for the rest of this process; return True if it is on.

    By default the rounding of MKL's batched matrix product depends on the address of each matrix
    modulo 64 bytes, so a model's numbers depend on its position in a batch. The mode can be chosen
    only before MKL's first call, so this package chooses it on import. The environment variable
    ``MKL_CBWR`` takes precedence. The result is False if MKL was used before, or if this PyTorch
    comes without MKL.
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
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = settings.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires this for cuBLAS
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    settings.fill_uninitialized_memory = False  # filling new memory takes time
    try:
        with torch.backends.cudnn.flags(benchmark=False, deterministic=True):
            yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
        settings.fill_uninitialized_memory = filled
