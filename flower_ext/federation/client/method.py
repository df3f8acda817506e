"""A method on the client: two functions of one client's work, and what they are given.

Bounding and noising come after them and before anything is sent, so no method can forget either,
and what a method returns as memory cannot reach a reply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flower_ext.data import ClientData
from flower_ext.errors import InvalidValue, tellable
from flower_ext.federation import records
from flower_ext.federation.protection import HiddenSum
from flower_ext.federation.state.memory import ClientVault
from flower_ext.privacy import NoiseSource, SecureNoise
from flower_ext.privacy.bounds import BoundedSum
from flower_ext.training import (
    Job,
    LocalTraining,
    Params,
    StepNoise,
    Task,
    Term,
    difference,
)
from flower_ext.training.side_by_side import Steps, Training, check_yielded, local_training


@dataclass(frozen=True, kw_only=True)
class ClientWork:
    """All that a method needs on one client in one round.

    ``round`` counts training rounds, ``settings`` are the method's own numbers, ``state`` the
    server's other array records by name, ``terms`` what the plan adds to every local objective
    (objective perturbation), ``step_noise`` by phase what it does in every local step, ``noise`` is
    for methods that noise while they train, ``vault`` for those that have secret keys, ``config``
    what the user passed to ``start``. ``steady`` asks that no bit of what the client trains depends
    on the trainings beside it (see `train_groups`).
    """

    task: Task
    data: ClientData
    received: Params
    memory: Params | None
    vault: ClientVault
    training: Mapping[str, LocalTraining]
    round: int
    seed: int
    generator: torch.Generator
    settings: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, Params] = field(default_factory=dict)
    terms: Sequence[Term] = ()
    noise: NoiseSource = field(default_factory=SecureNoise)
    step_noise: Mapping[str, StepNoise] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    steady: bool = False

    def initial_params(self) -> Params:
        """The whole model before training; the same on every client."""
        return self.task.initial_params(self.seed)

    def train(
        self,
        phase: str,
        params: Mapping[str, torch.Tensor],
        trained: Callable[[str], bool] = lambda name: True,
        *,
        terms: Sequence[Term] = (),
    ) -> Training:
        """Part of a model, trained as the server's settings for ``phase`` say: to be yielded.

        What is sent back is not to be changed in place: parts that were not trained may be those
        of other clients as well. A client without examples is sent back what it had: that it has
        none shows only where it tells its size.
        """
        job = Job(
            params=params,
            examples=self.data.train,
            training=self.training[phase],
            generator=self.generator,
            terms=[*self.terms, *terms],
        )
        noise = self.step_noise.get(phase)
        return local_training(self.task, job, trained, noise=noise, steady=self.steady)


@dataclass(frozen=True, kw_only=True)
class LocalResult:
    """The result of a client's work: its upload before bound and noise, and its ``memory``.

    The memory never leaves the client. The upload is either a ``model``, whose difference to the
    received one is sent, or another ``update``. Where the plan's units are not the clients, that
    is a sum over them that says how far one can move it; a `HiddenSum` is encrypted together with
    its noise. Where the server renews the counterpart of ``memory`` from the update as it left the
    client, so does the client: then it is a function of that. ``metrics`` leave the client as they
    are, and only under a plan that is not a `ReleasePlan`: they must say nothing of the data beyond
    its size.

    Raises
    ------
    ValueError
        The model is a training that was not waited for.
    """

    model: Params | None = field(default=None, repr=False)  # not for logs
    update: Params | BoundedSum | HiddenSum | None = field(default=None, repr=False)
    memory: Params | Callable[[Params], Params] | None = field(default=None, repr=False)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_yielded(self.model)
        check_yielded(self.update)

    def bounded(
        self, received: Params, *, whole: bool, room: Params | None = None
    ) -> Params | BoundedSum | HiddenSum:
        """Return the part that a plan bounds: the update, or the ``whole`` model.

        A difference is written to ``room``, if there is any (see `difference`).

        Raises
        ------
        ValueError
            There is none, or two.
        """
        if (self.model is None) == (self.update is None):
            raise tellable(InvalidValue("LocalResult: expected either a model or an update"))
        if self.model is not None:
            return self.model if whole else difference(self.model, received, room)
        if whole or self.update is None:
            raise tellable(
                InvalidValue(
                    "the plan clips and noises whole models, and the method returns none: return "
                    "LocalResult(model=...) in place of an update"
                )
            )
        return self.update


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question of the server before the first round, and the data to answer it with.

    ``asked`` are plain values, ``arrays`` the server's array records by name, ``may_simulate``
    whether this client takes part in what protects nobody.
    """

    data: ClientData
    partition: int
    asked: Mapping[str, Any]
    arrays: Mapping[str, records.Arrays]
    vault: ClientVault
    may_simulate: bool


@dataclass(frozen=True, kw_only=True)
class ClientMethod:
    """The client side of a method: two functions of one client's work.

    Both may yield `ClientWork.train` as often as they like. They must not depend on anything but
    their argument, since they run side by side with those of other clients.

    Parameters
    ----------
    name : str
        Names the messages (``train.<name>``) and the client memory.
    local_update : Callable[[ClientWork], LocalResult | Steps[LocalResult]]
    local_model : Callable[[ClientWork], Params | Steps[Params]]
        The model that this client would use: evaluated on its test examples, then forgotten.
    memoryless : bool
        Whether updates depend on no client memory; record-level guarantees ask.
    answer : Callable[[Question], Mapping[str, array]], optional
        What the client tells, un-noised, when the server asks a question before the first round
        (``query.<name>``).
    keeps_memory : bool
        Whether updates leave something in the client's memory, and read it: a run without it
        cannot go on.
    mirrored : bool
        Whether the server holds the counterpart of what clients remember, as SCAFFOLD's c and
        FedDyn's h: what a reply left that the server did not use is then forgotten.
    upload_phase : str, optional
        The phase of training that alone leads from the received model to the update, with terms
        that depend on no record: where it is noised, the update is. None where there is none.
    """

    name: str
    local_update: Callable[[ClientWork], LocalResult | Steps[LocalResult]]
    local_model: Callable[[ClientWork], Params | Steps[Params]]
    memoryless: bool = False
    answer: Callable[[Question], Mapping[str, Any]] | None = None
    keeps_memory: bool = True
    mirrored: bool = False
    upload_phase: str | None = None
