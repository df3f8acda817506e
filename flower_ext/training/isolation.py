"""Keep what one client's code changes in the process from every other client.

Code that reads a client's data may leave PyTorch without gradients, or raise what is no `Exception`
(`sys.exit`, or a panic of a library in Rust). Through either, one record would change what other
clients send, which no clipping of each update bounds.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch


class ClientCrashed(RuntimeError):
    """A client's code raised what is no `Exception`, such as SystemExit; the cause is chained."""


class isolated:
    """Restore gradients and the default type after a block of one client's code.

    These are what code usually changes, and reading them takes less than a microsecond.

    Raises
    ------
    ClientCrashed
        The block raises a BaseException that is no Exception. The user's KeyboardInterrupt passes.
    """

    __slots__ = ("_dtype", "_gradients")

    def __enter__(self) -> Self:
        self._gradients, self._dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if torch.is_grad_enabled() != self._gradients:
            torch.set_grad_enabled(self._gradients)
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
        if error is not None and not isinstance(error, Exception | KeyboardInterrupt):
            raise ClientCrashed(f"the client's code raised {type(error).__name__}") from error
