"""Keep what one client's code changes in the process from every other client.

Code that reads a client's data may leave PyTorch without gradients, or raise what is no `Exception`
(`sys.exit`, or a panic of a library in Rust). Through either, one record would change what other
clients send, which no clipping of each update bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import _C
from torch.overrides import _pop_mode as _pop_function_mode
from torch.utils import _device
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode

_SMALL = 2.3e-308
"""Half of this number is zero where a processor flushes numbers below the normal ones."""
_OF_ALL, _OF_PRODUCTS = ("generic", "all"), ("mkldnn", "matmul")
_held: list[Any] = []
"""Guards that took the place of an inference mode which a client entered and left to others."""


class ClientCrashed(RuntimeError):
    """A client's code raised what is no `Exception`, such as SystemExit; the cause is chained."""


def _settings() -> tuple[Any, ...]:
    """Return the settings of this thread, in the order of `_SETTERS`, by the fastest reads."""
    return (
        torch.get_num_threads(),
        _C._get_deterministic_algorithms(),
        _C._get_deterministic_algorithms_warn_only(),
        _C._get_deterministic_fill_uninitialized_memory(),
        _C._get_fp32_precision_getter(*_OF_ALL),
        _C._get_fp32_precision_getter(*_OF_PRODUCTS),
        _C._get_mkldnn_enabled(),
        _SMALL * 0.5,
        torch.is_anomaly_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled(),
        torch._GLOBAL_DEVICE_CONTEXT.__dict__.get("device_context"),
        _C._len_torch_function_stack(),
        _C._len_torch_dispatch_stack(),
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
    )


def _set_autocast(device: str, enabled: bool) -> None:
    torch.set_autocast_enabled(device, enabled)
    torch.clear_autocast_cache()


def _set_default_device(context: Any) -> None:
    torch.set_default_device(None if context is None else context.device)


def _pop_function_modes(left: int) -> None:
    while _C._len_torch_function_stack() > left:
        mode = _pop_function_mode()  # type: ignore[no-untyped-call]
        if isinstance(mode, _device.DeviceContext) and "old_device" in vars(mode):
            _device.CURRENT_DEVICE = mode.old_device


def _pop_dispatch_modes(left: int) -> None:
    while _C._len_torch_dispatch_stack() > left:
        _pop_dispatch_mode()


def _set_inference_mode(enabled: bool) -> None:
    guard = _C._InferenceMode(enabled)
    guard.__enter__()  # type: ignore[no-untyped-call]
    _held.append(guard)  # its end would restore the client's mode


_SETTERS: tuple[Callable[[Any], object], ...] = (
    torch.set_num_threads,
    _C._set_deterministic_algorithms,
    lambda only: _C._set_deterministic_algorithms(
        _C._get_deterministic_algorithms(), warn_only=only
    ),
    _C._set_deterministic_fill_uninitialized_memory,
    lambda precision: _C._set_fp32_precision_setter(*_OF_ALL, precision),
    lambda precision: _C._set_fp32_precision_setter(*_OF_PRODUCTS, precision),
    _C._set_mkldnn_enabled,
    lambda half: torch.set_flush_denormal(half == 0.0),
    torch.autograd.set_detect_anomaly,
    lambda enabled: _set_autocast("cpu", enabled),
    lambda enabled: _set_autocast("cuda", enabled),
    _set_default_device,
    _pop_function_modes,
    _pop_dispatch_modes,
    torch.set_default_dtype,
    _set_inference_mode,
    torch.set_grad_enabled,  # the last one, because inference mode sets it as well
)
"""Functions that restore the settings, in an order in which none undoes an earlier one."""


class isolated:
    """Restore PyTorch's settings after a block of one client's code.

    These are gradients, inference mode, default type and device, modes of functions, autocast,
    threads, deterministic algorithms, precision of products, denormal numbers and anomalies. To
    read them all takes about a microsecond.

    Raises
    ------
    ClientCrashed
        The block raises a BaseException that is no Exception. The user's KeyboardInterrupt passes.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> Self:
        self._before = _settings()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _settings() != self._before:
            self._restore()
        if error is not None and not isinstance(error, Exception | KeyboardInterrupt):
            raise ClientCrashed(f"the client's code raised {type(error).__name__}") from error

    def _restore(self) -> None:
        for place, (restore, value) in enumerate(zip(_SETTERS, self._before, strict=True)):
            if _settings()[place] != value:  # an earlier setter may have changed it
                restore(value)
