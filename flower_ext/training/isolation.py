"""Undo what one client's code leaves behind in the process before another client's code runs.

A client's code may change a setting of the process because of the client's data. It might leave
gradients switched off, for example. That would change what other clients send, and clipping each
update does not bound such a change.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

R = TypeVar("R")


class ClientCrashed(RuntimeError):
    """A client's code raised a BaseException such as SystemExit; see ``__cause__``."""


def _settings() -> tuple[Any, ...]:
    return torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()


_RESTORE: tuple[Callable[[Any], object], ...] = (
    torch.set_grad_enabled,
    torch.set_default_dtype,
    torch.set_num_threads,
)
"""Functions that restore the settings, in their order."""


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
        if (after := _settings()) != self._before:
            for restore, before, now in zip(_RESTORE, self._before, after, strict=True):
                if now != before:
                    restore(before)
        if error is not None and not isinstance(error, Exception | KeyboardInterrupt):
            raise ClientCrashed(f"the client's code raised {type(error).__name__}") from error


def attempted(step: Callable[..., R], *arguments: Any) -> R | Exception:
    """Call one client's ``step``; return its result. If it raises an error, return the error.

    The caller can then go on with other clients.
    """
    try:
        with isolated():
            return step(*arguments)
    except Exception as error:  # data, models and methods may raise anything
        return error
