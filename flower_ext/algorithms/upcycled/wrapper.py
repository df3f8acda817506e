"""Upcycled-FL (Algorithm 1) around any Flower strategy.

Odd rounds are the base strategy's own. In even rounds the server moves on along the last step:
no client is asked, no data is touched, so nothing is sent and no privacy is spent (Lemma 6.1:
post-processing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Protocol, runtime_checkable

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvgM, Result, Strategy

from flower_ext.algorithms.upcycled.coefficients import Coefficient, Constant
from flower_ext.errors import InvalidValue
from flower_ext.federation import FederatedStrategy
from flower_ext.federation.arrays import Arrays, to_arrays, to_record
from flower_ext.federation.uploads import payload_bytes

log = getLogger("flwr")

_BEFORE = "upcycled.before"


@runtime_checkable
class Extrapolates(Protocol):
    """A strategy with server state that moves along in even rounds, as SCAFFOLD's control does."""

    def extrapolate(self, coefficient: float) -> None:
        """s ← s + coefficient (s − s before the last training round)."""
        ...


@dataclass
class Traffic:
    """Training messages of a round, both ways, and the bytes of the arrays in them."""

    messages: int = 0
    bytes: int = 0

    def count(self, messages: Sequence[Message]) -> None:
        """Add messages."""
        self.messages += len(messages)
        self.bytes += payload_bytes(messages)


class Upcycled(Strategy):
    """Any strategy, asking its clients in odd rounds only.

    The base strategy sees the odd rounds numbered by training rounds (1, 2, 3, …), as FedAdam's
    bias correction needs; so do its clients, in the ``server-round`` that Flower's strategies tell.
    Strategies of this package count training rounds themselves: they see 1, 3, 5, …, under which
    these are in their records. The base evaluates in every round, as it would alone. Whatever else
    it offers (``guarantees()``, ``stopped``, …) is found here as well. Its server optimiser's state
    is left alone in even rounds; the copy that Flower's FedAvgM keeps of the global model follows
    the extrapolation. A strategy of your own that keeps one has to take the ``arrays`` of every
    `configure_train` instead.

    Clients count in the mean as they do in ``base``.

    Parameters
    ----------
    base : Strategy
        Any Flower strategy, or one of this package that sends all clients one model (FedAMP and
        APPLE do not).
    coefficient : float | Coefficient
        c_m of the m-th even round; a number is a constant. The experiments of the paper tune it
        in {0.1, 0.3, 0.5, 0.7, 0.9}.
    """

    def __init__(self, base: Strategy, coefficient: float | Coefficient = 0.5) -> None:
        if not isinstance(base, Strategy):
            raise TypeError(f"base={base!r}: expected a flwr.serverapp strategy")
        if isinstance(base, Upcycled):
            raise TypeError("base is upcycled already")
        if not getattr(base, "one_model", True):
            raise TypeError(
                f"base={type(base).__name__}: it sends each client a model of its own, and an "
                "upcycled round moves the one model that all clients share, which nobody would "
                "receive: expected a strategy with one shared model"
            )
        self.base = base
        if not callable(coefficient) and not isinstance(coefficient, int | float):
            raise TypeError(f"coefficient={coefficient!r}: expected a number or a function of m")
        self.coefficient: Coefficient = (
            coefficient if callable(coefficient) else Constant(coefficient)
        )
        self.traffic: dict[int, Traffic] = {}
        self._before = self._after = ArrayRecord()
        # Bound now: while the base runs its own loop, these names lead to this wrapper.
        self._base_configure = base.configure_train
        self._base_aggregate = base.aggregate_train
        self._base_state = getattr(base, "state", dict)  # other strategies do not go on
        self._base_restore = getattr(base, "restore", lambda state: None)

    def __getattr__(self, name: str) -> Any:
        if name == "base" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.base, name)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The base's messages in odd rounds; none in even ones."""
        messages: list[Message] = []
        if server_round % 2 == 0:
            self._after = arrays
        else:
            self._before = arrays
            _follow(self.base, arrays)
            number = self._base_round(server_round)
            messages = list(self._base_configure(number, arrays, config, grid))
        self.traffic[server_round] = Traffic()
        self.traffic[server_round].count(messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The base's aggregate in odd rounds; the extrapolation in even ones."""
        replies = list(replies)
        self.traffic[server_round].count(replies)
        if server_round % 2 == 1:
            return self._base_aggregate(self._base_round(server_round), replies)
        coefficient = self.coefficient(server_round // 2)
        if not 0 <= coefficient < float("inf"):
            raise InvalidValue(
                f"coefficient({server_round // 2}) is {coefficient!r}: expected a finite number "
                ">= 0"
            )
        metrics = MetricRecord({"upcycling-coefficient": float(coefficient)})
        if not _differ(self._before, self._after):  # the odd round was lost: nothing to reuse
            return None, metrics
        if isinstance(self.base, Extrapolates):
            self.base.extrapolate(coefficient)
        return extrapolated(self._before, self._after, coefficient), metrics

    def state(self) -> Mapping[str, Arrays]:
        """The base's, and the model before its last training round."""
        return {**self._base_state(), _BEFORE: to_arrays(self._before)}

    def restore(self, state: Mapping[str, Arrays]) -> None:
        """Take both back."""
        self._before = to_record(state[_BEFORE])
        self._base_restore({name: group for name, group in state.items() if name != _BEFORE})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the base does, in odd and even rounds."""
        return self.base.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """As the base does."""
        return self.base.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the coefficient, then what the base says of itself."""
        log.info("Upcycled · coefficient %s", self.coefficient)
        self.base.summary()

    def start(self, *arguments: Any, **options: Any) -> Result:
        """Run ``num_rounds`` visible rounds in the base's own loop; every second asks nobody.

        Parameters
        ----------
        *arguments, **options
            Those of `flwr.serverapp.strategy.Strategy.start`.
        """
        log.info("Upcycled · coefficient %s", self.coefficient)
        with _routed(
            self.base,
            configure_train=self.configure_train,
            aggregate_train=self.aggregate_train,
            state=self.state,
            restore=self.restore,
        ):
            result = self.base.start(*arguments, **options)
        asked = [traffic for traffic in self.traffic.values() if traffic.messages]
        log.info(
            "Upcycled: %d rounds, %d of them without training; %d training messages, %.2f MB",
            len(self.traffic),
            len(self.traffic) - len(asked),
            sum(traffic.messages for traffic in asked),
            sum(traffic.bytes for traffic in asked) / 1e6,
        )
        return result

    def _base_round(self, server_round: int) -> int:
        """Number under which the base sees an odd round."""
        if isinstance(self.base, FederatedStrategy):
            return server_round
        return (server_round + 1) // 2


def extrapolated(before: ArrayRecord, after: ArrayRecord, coefficient: float) -> ArrayRecord:
    """after + coefficient (after − before), each array in its own type; integers as they are."""
    moved = {}
    for name, array in after.items():
        new = array.numpy()
        if np.issubdtype(new.dtype, np.floating):
            old = before[name].numpy().astype(np.float64)
            wide = new.astype(np.float64)
            new = np.asarray(wide + coefficient * (wide - old)).astype(new.dtype)
        moved[name] = Array(np.asarray(new, order="C"))
    return ArrayRecord(moved)


def _differ(one: ArrayRecord, other: ArrayRecord) -> bool:
    return any(not np.array_equal(one[name].numpy(), other[name].numpy()) for name in other)


def _follow(base: Strategy, arrays: ArrayRecord) -> None:
    """Let a base that keeps its own copy of the global model take the extrapolated one.

    Flower's FedAvgM reads the model it is given in its first round only; Flower's own wrappers
    (differential privacy) keep the strategy that they wrap as ``strategy``.
    """
    if isinstance(base, FedAvgM) and base.current_arrays is not None:
        base.current_arrays = arrays.copy()
    if isinstance(inner := getattr(base, "strategy", None), Strategy):
        _follow(inner, arrays)


@contextmanager
def _routed(base: Strategy, **methods: Callable[..., Any]) -> Iterator[None]:
    """Lead calls of ``base``'s own loop to the wrapper's methods, for as long as it runs."""
    own = {name: vars(base)[name] for name in methods if name in vars(base)}
    vars(base).update(methods)
    try:
        yield
    finally:
        for name in methods:
            vars(base).pop(name)
        vars(base).update(own)
