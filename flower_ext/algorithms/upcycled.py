"""Upcycled-FL: in every even round the server reuses earlier models and contacts no client.

Source: Yin, Tan, Zhang, Khalili, Liu, "Federated Learning with Reduced Information Leakage and
Computation" (TMLR 2024), Algorithm 1.

`Upcycled` wraps any Flower strategy. In odd rounds this base strategy trains. In an even round the
server extrapolates the last step, sends nothing and uses no data, so the round spends no privacy
(Lemma 6.1: post-processing).

The m-th even round moves on by c_m times the last step: w̄²ᵐ = w̄²ᵐ⁻¹ + c_m (w̄²ᵐ⁻¹ − w̄²ᵐ⁻²), where
w̄ᵗ is the model after round t. The paper writes c_m in two ways (Eq. 6, and Algorithm 1), and its
theory assumes `proximal_ratio`, where μ is ``proximal_weight`` and λ is ``penalty``. A number is
the coefficient of every even round. With 0, an even round returns the model unchanged.

====================  ==================================  ================================
coefficient           c_m                                 source
====================  ==================================  ================================
a number c            c                                   the experiments' tuned parameter
``proximal_ratio``    μ / (μ + λ)                         Eq. 6
a number λ / 2        λ / 2                               Algorithm 1, line 6
``Decaying(c)``       c / √m, i.e. λ_m = μ (√m / c − 1)   Corollary 5.8: increasing λ_m
====================  ==================================  ================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvgM, Result, Strategy

from flower_ext.checks import Checked, NotNegative, require_not_negative, require_positive
from flower_ext.federation import FederatedStrategy
from flower_ext.federation.messages.records import Arrays, to_arrays, to_record
from flower_ext.privacy.mechanisms.updates import require_finite

log = getLogger("flwr")

_MODEL, _STATE = "model", "state."
"""Groups that an even round extrapolates: the model, and other arrays that the server sends."""

Coefficient = Callable[[int], float]
"""A function from m = 1, 2, … to c_m, which is finite and not negative."""


@dataclass(frozen=True)
class Decaying(Checked):
    """The coefficient c / √m of the m-th even round: the penalties λ_m increase with m.

    Corollary 5.8 proves the rate O(1/√M) for such penalties.
    """

    first: NotNegative

    def __call__(self, m: int) -> float:
        """Return c / √m."""
        return self.first / math.sqrt(m)


def proximal_ratio(*, proximal_weight: float, penalty: float) -> float:
    """Return μ / (μ + λ): the extrapolation that FedProx's first-order condition gives (Eq. 6)."""
    require_positive("proximal_weight", proximal_weight)
    require_not_negative("penalty", penalty)
    return proximal_weight / (proximal_weight + penalty)


class _FlowerBase:
    """A base strategy of Flower. Its clients receive the model alone."""

    def __init__(self, strategy: Strategy) -> None:
        if type(strategy).start is not Strategy.start:
            raise TypeError(
                f"base={type(strategy).__name__}: expected a strategy that inherits Flower's "
                "start(), because Upcycled would not run the strategy's own start()"
            )
        self.before: Mapping[str, Arrays] = {}
        """The groups before the last odd round."""

    def number(self, server_round: int) -> int:
        """Return the number under which the base sees an odd round."""
        return (server_round + 1) // 2

    def replies(self, replies: Iterable[Message]) -> Iterable[Message]:
        """Return a list, because some of Flower's strategies read the replies twice."""
        return list(replies)

    def groups(self, arrays: ArrayRecord) -> Mapping[str, Arrays]:
        """Return all groups that an even round extrapolates."""
        return {_MODEL: to_arrays(arrays)}

    def restore(self, groups: Mapping[str, Arrays]) -> None:
        """Do nothing, because the clients of a Flower strategy receive no group but the model."""

    def start(self, upcycled: Upcycled, *arguments: Any, **options: Any) -> Result:
        """Run the rounds of ``upcycled``."""
        return Strategy.start(upcycled, *arguments, **options)


class _PackageBase:
    """A base strategy of this package.

    Besides the model, its clients may receive other arrays, such as SCAFFOLD's c. In their
    experiments, the authors of Upcycled-FL extrapolate the model and c.
    """

    def __init__(self, strategy: FederatedStrategy) -> None:
        if not strategy.method.one_model:
            raise TypeError(
                f"base={strategy.method.name}: expected a strategy with one shared model; this one "
                "sends each client a model of its own, so no client would receive the shared model "
                "that an even round extrapolates"
            )
        self._strategy = strategy

    @property
    def before(self) -> Mapping[str, Arrays]:
        """The groups before the last odd round. The run's checkpoint includes them."""
        return self._strategy.run.companions

    @before.setter
    def before(self, groups: Mapping[str, Arrays]) -> None:
        self._strategy.run.companions = {**groups}

    def number(self, server_round: int) -> int:
        return server_round

    def replies(self, replies: Iterable[Message]) -> Iterable[Message]:
        return replies  # which are added up as they arrive

    def groups(self, arrays: ArrayRecord) -> Mapping[str, Arrays]:
        sent = self._strategy.run.method_state.everyone
        return {_MODEL: to_arrays(arrays), **{_STATE + n: {**group} for n, group in sent.items()}}

    def restore(self, groups: Mapping[str, Arrays]) -> None:
        run, sent = self._strategy.run, {n.removeprefix(_STATE): g for n, g in groups.items()}
        run.state = replace(run.method_state, everyone=sent)

    def start(self, upcycled: Upcycled, *arguments: Any, **options: Any) -> Result:
        return self._strategy.start(*arguments, **options, player=upcycled)


class Upcycled(Strategy):
    """A strategy that trains like its base strategy in odd rounds and extrapolates in even rounds.

    A base strategy of Flower sees the odd rounds numbered 1, 2, 3, …, because FedAdam's bias
    correction needs consecutive numbers. Its clients see the same numbers in ``server-round``. A
    base strategy of this package sees the run's own numbers 1, 3, 5, …

    The base evaluates in every round, and weights clients in the mean as it does without this
    wrapper. All other attributes of the base (``guarantees()``, ``stopped``, …) are available here.

    Even rounds do not change the state of the base's server optimizer. If you write a base
    strategy, let it begin each round from the ``arrays`` that `configure_train` receives. A copy
    of the model that it keeps from an earlier round would lack the extrapolation. (FedAvgM keeps
    such a copy; this class replaces it.)

    Parameters
    ----------
    base : Strategy
        Any Flower strategy, or one of this package that sends the same model to all clients (not
        FedAMP or APPLE).
    coefficient : float | Coefficient
        c_m of the m-th even round; a number stands for a constant. The paper's experiments tune it
        in {0.1, 0.3, 0.5, 0.7, 0.9}.

    Raises
    ------
    TypeError
        ``base`` is not a strategy that can be upcycled, or ``coefficient`` is neither a number nor
        a function.
    InvalidValue
        ``coefficient`` is negative or not finite.
    """

    def __init__(self, base: Strategy, coefficient: float | Coefficient = 0.5) -> None:
        if not isinstance(base, Strategy):
            raise TypeError(f"base={base!r}: expected a flwr.serverapp strategy")
        if isinstance(base, Upcycled):
            raise TypeError("base=Upcycled: expected a strategy that is not upcycled already")
        self._adapter = (
            _PackageBase(base) if isinstance(base, FederatedStrategy) else _FlowerBase(base)
        )
        if not callable(coefficient):
            if not isinstance(coefficient, int | float):
                raise TypeError(
                    f"coefficient={coefficient!r}: expected a number, or a function that takes m "
                    "and returns the coefficient of the m-th even round"
                )
            require_not_negative("coefficient", coefficient)
        self.base, self.coefficient = base, coefficient
        self._after: Mapping[str, Arrays] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "base" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.base, name)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the base's messages in odd rounds, and no messages in even rounds."""
        if server_round % 2 == 0:
            self._after = self._adapter.groups(arrays)
            return []
        _follow(self.base, arrays)
        number = self._adapter.number(server_round)
        messages = self.base.configure_train(number, arrays, config, grid)
        self._adapter.before = self._adapter.groups(arrays)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the base's aggregate in odd rounds, and the extrapolated model in even rounds."""
        if server_round % 2 == 1:
            number = self._adapter.number(server_round)
            return self.base.aggregate_train(number, self._adapter.replies(replies))
        coefficient = self.coefficient
        if callable(coefficient):
            coefficient = coefficient(server_round // 2)
        require_not_negative(f"coefficient({server_round // 2})", coefficient)
        metrics = MetricRecord({"upcycling-coefficient": float(coefficient)})
        before, after = self._adapter.before, self._after
        if all(np.array_equal(before[_MODEL][n], array) for n, array in after[_MODEL].items()):
            return None, metrics  # the odd round failed: there is no step to reuse
        moved = {n: extrapolated(before[n], group, coefficient) for n, group in after.items()}
        model = moved.pop(_MODEL)
        require_finite(
            model,
            f"in the model after the extrapolation of Upcycled in round {server_round}",
            f"take smaller coefficients than {coefficient:g}",
        )
        self._adapter.restore(moved)
        return to_record(model), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the base's evaluation messages, in odd and even rounds."""
        return self.base.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the base's aggregate of the evaluation."""
        return self.base.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the coefficient and which rounds release anything, then the base's own summary."""
        rounds = "even rounds reuse models: N rounds spend N/2 releases, so plan for N/2"
        log.info("Upcycled · coefficient %s · %s", self.coefficient, rounds)
        self.base.summary()

    def start(self, *arguments: Any, **options: Any) -> Result:
        """Run ``num_rounds`` rounds; the arguments are those of Flower's ``start``."""
        return self._adapter.start(self, *arguments, **options)


def extrapolated(before: Arrays, after: Arrays, coefficient: float) -> Arrays:
    """Return after + coefficient (after − before), each array in its own dtype.

    Arrays of integers are returned as they are in ``after``.
    """
    moved = dict(after)
    for name, array in after.items():
        if np.issubdtype(array.dtype, np.floating):
            wide, old = array.astype(np.float64), before[name].astype(np.float64)
            moved[name] = np.asarray(wide + coefficient * (wide - old)).astype(array.dtype)
    return moved


def _follow(base: Strategy, arrays: ArrayRecord) -> None:
    """If the base keeps a copy of the global model, replace the copy by the extrapolated model.

    FedAvgM keeps such a copy, because only in its first round does it read the model that the
    server passes to it. The function also looks inside Flower's wrappers for differential privacy:
    their attribute ``strategy`` is the wrapped strategy.
    """
    if isinstance(base, FedAvgM) and base.current_arrays is not None:
        base.current_arrays = arrays.copy()
    if isinstance(inner := getattr(base, "strategy", None), Strategy):
        _follow(inner, arrays)
