"""Base class of methods that train one model in one phase, and helpers for client sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from flower_ext.errors import InvalidValue
from flower_ext.federation import ClientWork, Method
from flower_ext.training import Job, LocalTraining, Params, Task

Work = TypeVar("Work", bound=Job)
Solved = TypeVar("Solved")


def shared_model(work: ClientWork) -> Params:
    """Return the shared model."""
    return work.received


def own_model(work: ClientWork) -> Params:
    """Return the client's own model, or the shared model if the client never took part."""
    return work.memory or work.received


def one_by_one(
    solve: Callable[[Task, Work, Callable[[str], bool]], Solved],
) -> Callable[..., list[Solved]]:
    """Turn a function that solves one job into one that solves a `Training`'s jobs in sequence."""

    def each(
        task: Task, jobs: Sequence[Work], *, trained: Callable[[str], bool], memory_limit: int
    ) -> list[Solved]:
        return [solve(task, job, trained) for job in jobs]

    return each


@dataclass(frozen=True, kw_only=True)
class OnePhase(Method):
    """A method whose clients train the whole model in one phase, ``local``.

    Parameters
    ----------
    local : LocalTraining
    **options
        Fields of `Method`.
    """

    local: LocalTraining = LocalTraining()

    @property
    def training(self) -> Mapping[str, LocalTraining]:
        """The one phase of local training: the whole model."""
        return {"local": self.local}


def require_unit_rate(method: Method, because: str) -> None:
    """Refuse a ``server_learning_rate`` other than 1, which would have no effect.

    Parameters
    ----------
    method : Method
    because : str
        The reason, for the message.

    Raises
    ------
    InvalidValue
        The rate is not 1.
    """
    if method.server_learning_rate != 1.0:
        raise InvalidValue(
            f"server_learning_rate={method.server_learning_rate!r}: expected 1.0, because {because}"
        )
