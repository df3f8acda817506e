"""Methods that release statistics in one training round.

Each record has a vector, such as a one in the record's cell of a histogram. In training, a privacy
unit's update is the change of the model. Here, it is the mean of the unit's vectors.

The "model" of such a run has one parameter: the mean of all units' updates, which is zero before
the round. Sums, noise, masks, weights, the ledger, guarantees and resumption work as in every other
method.

* `ClientStatistics`: the unit is a client. Use a `ReleasePlan` in which all clients take part.
* `UserStatistics`: the unit is a person with records in several silos. Use a plan that protects
  users. With weights by records, each person counts as one. With equal weights, each silo has the
  same weight, so a person with records in only one of four silos counts as a quarter. To protect
  records instead of people, give every record a different user number.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from flower_ext.algorithms.uldp.averaging import UldpAvg, users_of_round
from flower_ext.algorithms.uldp.silo_answers import answer_server
from flower_ext.data import ClientData
from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    Arrays,
    ClientMethod,
    ClientWork,
    LocalResult,
    Memory,
    Method,
    Question,
    Released,
    State,
)
from flower_ext.federation.client.assignment import NO_DATA
from flower_ext.privacy import FullParticipation, Guarantee, PrivacyPlan, ReleasePlan
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems.uldp_theorem import Weighting
from flower_ext.training import LocalTraining, Params, Task
from flower_ext_consortium.statistics.statistic import Estimate, JointStatistics, Statistic

RELEASED = "released"
"""Name of the parameter that stores the released mean."""
_USERS_AT_A_TIME = 256


class _Released(nn.Module):
    """A model without layers. Its only parameter stores the released mean."""

    def __init__(self, joint: JointStatistics) -> None:
        super().__init__()
        self.joint = joint
        self.released = nn.Parameter(torch.zeros(joint.size))


def statistics_task(joint: JointStatistics, data: Callable[[int], ClientData]) -> Task:
    """Return the task of a run that releases statistics of the training examples in ``data``."""
    return Task(model=partial(_Released, joint), data=data, metrics={})


def _check_columns(task: Task, data: ClientData) -> JointStatistics:
    """Return the statistics of the task; raise an error if the client's data lack a column.

    The error depends on the columns only, so it does not show whose records are present.
    """
    model = task.model()
    if not isinstance(model, _Released):
        raise InvalidValue(
            f"task with the model {type(model).__name__}: expected the Task that `statistics_task` "
            "returns"
        )
    if data is not NO_DATA:  # data that could not be loaded count as no examples
        model.joint.require_columns(data.train)
    return model.joint


def answer_with_columns(question: Question) -> Params:
    """Answer the question that the server asks each silo before the round.

    Raise an error if the silo's data lack a column. The run then ends before it spends any ε.
    """
    _check_columns(question.task, question.data)
    return answer_server(question)


def client_part(work: ClientWork) -> LocalResult:
    """Return the mean of the vectors of the client's examples; zeros if it has no example."""
    joint, examples = _check_columns(work.task, work.data), work.data.train
    part = joint.part(examples) if len(examples) else np.zeros(joint.size)
    return LocalResult(update={RELEASED: torch.from_numpy(part).float()})


def users_parts(work: ClientWork) -> LocalResult:
    """Return the weighted sum of the silo's users' updates, each with a norm of at most 1."""
    joint = _check_columns(work.task, work.data)
    users, total = users_of_round(work)
    numbers = list(users)
    for start in range(0, len(numbers), _USERS_AT_A_TIME):
        chosen = numbers[start : start + _USERS_AT_A_TIME]
        rows = joint.parts([users[user] for user in chosen])
        total.add(chosen, {RELEASED: torch.from_numpy(rows)})
    return LocalResult(update=total.value)


def _check_plan(plan: PrivacyPlan) -> None:
    """Refuse a plan that samples units, has several rounds, or has a clipping norm other than 1."""
    if not isinstance(plan, ReleasePlan):
        raise InvalidValue(f"plan={type(plan).__name__}: expected a ReleasePlan")
    if not isinstance(plan.sampling, FullParticipation):
        raise InvalidValue(
            "sampling of the plan: expected FullParticipation, because sampling would make every "
            "statistic less exact"
        )
    if plan.clipping_norm != 1.0:
        raise InvalidValue(
            f"clipping_norm={plan.clipping_norm!r} of the plan: expected 1, the largest norm of a "
            "unit's vector"
        )
    if plan.rounds != 1:
        raise InvalidValue(
            f"rounds={plan.rounds!r} of the plan: expected 1, because one round releases all "
            "statistics"
        )


@dataclass(frozen=True, kw_only=True)
class ClientStatistics(Method):
    """Statistics over clients: each client counts as one, whatever its number of records."""

    client = ClientMethod(name="client_statistics", local_update=client_part, memory=Memory.NONE)

    def check(self, plan: PrivacyPlan) -> None:
        """Refuse a plan that cannot release statistics."""
        _check_plan(plan)

    def step(self, model: Arrays, released: Released, state: State) -> tuple[Arrays, State]:
        """Return the released mean."""
        return dict(released.mean), state


@dataclass(frozen=True, kw_only=True)
class UserStatistics(UldpAvg):
    """Statistics over people with records in several silos.

    Parameters
    ----------
    num_silos : int
    weighting : {"by-records", "equal"}
        See `UldpAvg`. Only "by-records" counts every person as one.
    """

    client = ClientMethod(
        name="user_statistics",
        local_update=users_parts,
        answer=answer_with_columns,
        memory=Memory.NONE,
        takes_weighted_sums=True,
    )

    weighting: Weighting = "by-records"

    @property
    def training(self) -> Mapping[str, LocalTraining]:
        """An empty mapping, because statistics need no training."""
        return {}

    def check(self, plan: PrivacyPlan) -> None:
        """Refuse a plan that cannot release statistics of users."""
        super().check(plan)
        _check_plan(plan)

    def step(self, model: Arrays, released: Released, state: State) -> tuple[Arrays, State]:
        """Return the released mean over users."""
        return dict(released.mean), state

    def mean_noise(self, mechanism: RoundMechanism) -> float:
        """Return the standard deviation of the noise in an element of the released mean."""
        return mechanism.mean_noise_stddev

    def claims(self, run: RunSummary, mechanism: RoundMechanism) -> list[Guarantee]:
        """Return the provable guarantees only, because ULDP-AVG's theorem is about training."""
        claims = super().claims(run, mechanism)
        return [claim for claim in claims if claim.basis == "provable"]


def estimates(
    joint: JointStatistics,
    model: Mapping[str, Any],
    *,
    method: Method,
    plan: PrivacyPlan,
    rng: np.random.Generator,
) -> dict[Statistic, list[Estimate]]:
    """Return the estimates of a finished run, from the model that it released.

    ``method`` and ``plan`` are those of the run.

    Parameters
    ----------
    model : Mapping[str, ndarray or Tensor]
        The arrays of the released model.
    rng : numpy.random.Generator
        Draws noise again to find standard errors; see `Statistic.estimates`.
    """
    mean, mechanism = np.asarray(model[RELEASED]), method.mechanism(plan)
    units = mechanism.sampling.population
    # The released model is a mean over all units. The sum has ``units`` times its value and noise.
    stddev = units * method.mean_noise(mechanism)
    return joint.estimates(units * mean.astype(np.float64), stddev, rng)
