"""Optimizers by which the server moves the shared model, and averages of the models of a run.

Sources: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated
Optimization" (ICLR 2021), Algorithm 2; Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data
Distribution for Federated Visual Classification" (2019), for momentum; Polyak and Juditsky,
"Acceleration of Stochastic Approximation by Averaging" (1992), for averages.

====================  =====================================================
paper                 here
====================  =====================================================
x, Δ_t                the shared model, the mean update
m_t, v_t              ``moments["mean"]``, ``moments["square"]``
η                     ``learning_rate``
β₁, β₂, τ             ``beta1``, ``beta2``, ``tau``
====================  =====================================================

Optimizers and averages use only what the round has already released, so they spend no privacy.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flower_ext.checks import Checked, Count, FractionBelowOne, Positive, ProperFraction
from flower_ext.errors import InvalidValue
from flower_ext.federation.messages.records import Arrays

Moments = Mapping[str, Arrays]
"""Groups of arrays that an optimizer or an average keeps between two rounds, by name."""


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(Checked, ABC):
    """A step of the server, by which the mean update of a round moves the shared model.

    Parameters
    ----------
    learning_rate : float
        Factor η > 0 of the step.

    Raises
    ------
    InvalidValue
        A field is out of range.
    """

    learning_rate: Positive = 1.0

    def advice(self, noise: float) -> str:
        """Return a warning if the fields do not suit the noise; empty if they do.

        ``noise`` is the stddev of the noise in each coordinate of the mean update.
        """
        return ""

    @abstractmethod
    def init(self, model: Arrays) -> Moments:
        """Return the moments before the first step, for a model with the shapes of ``model``."""

    @abstractmethod
    def step(self, model: Arrays, mean: Arrays, moments: Moments) -> tuple[Arrays, Moments]:
        """Return the next model and the next moments.

        Parameters
        ----------
        model, mean : Mapping[str, ndarray]
            The model, and the mean update: arrays of equal shapes.
        moments : Mapping[str, Mapping[str, ndarray]]
            As `init` or the previous step returned them.
        """


@dataclass(frozen=True, kw_only=True)
class Sgd(ServerOptimizer):
    """Gradient descent: the next model is x + η Δ_t; with momentum it is x + η b_t.

    The momentum is b_t = μ b_{t−1} + Δ_t, as in FedAvgM.

    Parameters
    ----------
    momentum : float
        Factor μ in [0, 1).
    nesterov : bool
        If True, the next model is x + η (Δ_t + μ b_t).
    """

    momentum: FractionBelowOne = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise InvalidValue("nesterov=True: expected a momentum > 0 as well")

    def init(self, model: Arrays) -> Moments:
        """Return the momentum b = 0; return nothing if μ is 0."""
        return {"momentum": _zeros(model)} if self.momentum else {}

    def step(self, model: Arrays, mean: Arrays, moments: Moments) -> tuple[Arrays, Moments]:
        """Return the next model and the next b, by the formulas of the class."""
        if not self.momentum:
            return _moved(model, mean, self.learning_rate), {}
        buffer = {n: self.momentum * b + mean[n] for n, b in moments["momentum"].items()}
        direction = buffer
        if self.nesterov:
            direction = {name: mean[name] + self.momentum * b for name, b in buffer.items()}
        return _moved(model, direction, self.learning_rate), {"momentum": buffer}


MEAN = Sgd()
"""The default step: add the whole mean update to the model."""


@dataclass(frozen=True, kw_only=True)
class _Adaptive(ServerOptimizer):
    """Adaptive step: the next model is x + η m_t / (√v_t + τ), and a subclass defines v_t.

    The first moment is m_t = β₁ m_{t−1} + (1 − β₁) Δ_t.

    Parameters
    ----------
    beta1 : float
        β₁ in [0, 1).
    tau : float
        τ > 0, the degree of adaptivity: a coordinate with √v far below τ moves in proportion to m.
        A coordinate with √v far above τ moves by about η, whatever its scale. Under privacy, √v is
        at least about the stddev of the noise in a coordinate of the mean. If τ is smaller, noise
        is divided by its own size, and all coordinates move about equally far.
    """

    learning_rate: Positive = 0.1
    beta1: FractionBelowOne = 0.9
    tau: Positive = 1e-3

    def advice(self, noise: float) -> str:
        """Return a warning if τ is too small for the noise; empty if it is not."""
        if self.tau >= noise:
            return ""
        return (
            f"server={self!r}: tau is below {noise:.3g}, the noise of a coordinate of the mean, so "
            f"noise is divided by itself, and each coordinate moves by up to {self.learning_rate:g}"
            f" a round whether it has a signal or not; with tau={noise:.1g} or more, a coordinate "
            "moves in proportion to its update"
        )

    def init(self, model: Arrays) -> Moments:
        """Return m = v = 0."""
        return {"mean": _zeros(model), "square": _zeros(model)}

    def step(self, model: Arrays, mean: Arrays, moments: Moments) -> tuple[Arrays, Moments]:
        """Return x + η m / (√v + τ)."""
        m = {n: self.beta1 * m + (1 - self.beta1) * mean[n] for n, m in moments["mean"].items()}
        v = {name: self._square(v, mean[name] ** 2) for name, v in moments["square"].items()}
        direction = {name: m[name] / (np.sqrt(v[name]) + self.tau) for name in m}
        return _moved(model, direction, self.learning_rate), {"mean": m, "square": v}

    @abstractmethod
    def _square(self, v: np.ndarray, square: np.ndarray) -> np.ndarray:
        """Return v_t from v_{t−1} and Δ_t²."""


@dataclass(frozen=True, kw_only=True)
class Adagrad(_Adaptive):
    """FedAdagrad: v_t = v_{t−1} + Δ_t². Reddi et al. set β₁ = 0."""

    beta1: FractionBelowOne = 0.0

    def _square(self, v: np.ndarray, square: np.ndarray) -> np.ndarray:
        return np.asarray(v + square)


@dataclass(frozen=True, kw_only=True)
class Adam(_Adaptive):
    """FedAdam: v_t = β₂ v_{t−1} + (1 − β₂) Δ_t², without correction of the bias, as in Reddi et al.

    Parameters
    ----------
    beta2 : float
        β₂ in [0, 1).
    """

    beta2: FractionBelowOne = 0.99

    def _square(self, v: np.ndarray, square: np.ndarray) -> np.ndarray:
        return np.asarray(self.beta2 * v + (1 - self.beta2) * square)


@dataclass(frozen=True, kw_only=True)
class Yogi(Adam):
    """FedYogi: v_t = v_{t−1} − (1 − β₂) Δ_t² sign(v_{t−1} − Δ_t²)."""

    learning_rate: Positive = 0.01

    def _square(self, v: np.ndarray, square: np.ndarray) -> np.ndarray:
        return np.asarray(v - (1 - self.beta2) * square * np.sign(v - square))


@dataclass(frozen=True, kw_only=True)
class ExponentialAverage(Checked):
    """Average of the models so far; each round multiplies the weights of older models by ``decay``.

    The weights are then divided by their sum, so that the first model has no extra weight.

    Parameters
    ----------
    decay : float
        In (0, 1): the average looks back over about 1 / (1 − decay) rounds.

    Raises
    ------
    InvalidValue
        ``decay`` is out of range.
    """

    decay: ProperFraction = 0.9

    def add(self, model: Arrays, stored: Moments) -> Moments:
        """Return ``stored`` with ``model`` added; ``stored`` is empty before the first model."""
        weight = {"total": np.array(0.0)} if not stored else stored["weight"]
        before = stored.get("sum") or _zeros(model)
        total = self.decay * weight["total"] + 1
        return {
            "sum": {name: self.decay * before[name] + x for name, x in model.items()},
            "weight": {"total": total},
        }

    def average(self, stored: Moments) -> Arrays:
        """Return the average of the models that were added."""
        total = stored["weight"]["total"]
        return {name: (s / total).astype(s.dtype) for name, s in stored["sum"].items()}


@dataclass(frozen=True, kw_only=True)
class TailAverage(Checked):
    """Mean of the ``last`` newest models, all of which are kept.

    Parameters
    ----------
    last : int
        Number of rounds >= 1.

    Raises
    ------
    InvalidValue
        ``last`` is out of range.
    """

    last: Count = 5

    def add(self, model: Arrays, stored: Moments) -> Moments:
        """Return ``stored`` with ``model`` added; ``stored`` is empty before the first model."""
        models = [*stored.values(), model][-self.last :]
        return {str(number): dict(one) for number, one in enumerate(models)}

    def average(self, stored: Moments) -> Arrays:
        """Return the mean of the models that are kept."""
        models = list(stored.values())
        return {
            name: np.mean([model[name] for model in models], axis=0).astype(x.dtype)
            for name, x in models[0].items()
        }


ModelAverage = ExponentialAverage | TailAverage
"""An average of the models of a run."""


def _zeros(model: Arrays) -> dict[str, np.ndarray]:
    return {name: np.zeros_like(x) for name, x in model.items()}


def _moved(model: Arrays, direction: Arrays, rate: float) -> Arrays:
    return {name: x + rate * direction[name] for name, x in model.items()}
