"""A method on the client: two functions, and the types of their arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch

from flower_ext.data import ClientData, Examples
from flower_ext.errors import InvalidValue
from flower_ext.federation.sums.summation import UsersTotal
from flower_ext.privacy import DpSgd, NoiseSource, PoissonSampling, SecureNoise
from flower_ext.privacy.mechanisms.bounds import UnitSum
from flower_ext.privacy.mechanisms.protections import Protection
from flower_ext.training import Job, LocalTraining, Params, StepNoise, Task, Term, untagged
from flower_ext.training.batched.many import train_each, train_invariantly
from flower_ext.training.isolation import draws_seed, seeded
from flower_ext.training.models.validation import RUNNING_STATISTICS
from flower_ext.training.side_by_side import Steps, Training, check_yielded

Contribution = Params | UnitSum
"""A client's update, or its whole model, before clipping and noise."""


@dataclass(kw_only=True)
class ClientWork:
    """The input of a method on one client in one round; the method must not change the input.

    Attributes
    ----------
    received : Params
        The model that the server sent.
    state : Mapping[str, Params]
        The server's array records other than the model, by name.
    training : Mapping[str, LocalTraining]
        The phases of training by name.
    settings : Mapping[str, float]
        The method's own numbers by name, such as a regularisation weight.
    config : Mapping[str, object]
        The ``train_config`` or ``evaluate_config`` that the user passed to ``start``.
    protection : Protection
        The plan's protection of the upload. A method that bounds the update of each privacy unit
        adds up these updates by `ClipAndNoise.sum_units`. The client side applies all other parts
        of the protection.
    round, seed : int
        Number of the training round, and the run's seed.
    method : ClientMethod
    task, data
        The task and this client's data.
    generator
        Random generator for this client and round.
    memory : Params or None
        What the method stored on this client; None before it stored anything.
    terms : Sequence[Term]
        Terms that the plan adds to every local objective (objective perturbation).
    noise : NoiseSource
        Source of noise for methods that add noise while they train.
    step_noise : Mapping[str, StepNoise]
        Clipping and noise that the plan requires in every local step, by the phase of training.
    batch_invariant : bool
        True if no bit of this client's result may depend on the other trainings in its batch (see
        `train_groups`).
    hidden_sum : Callable[[int, float], UsersTotal or None]
        Begins and returns this silo's contribution to a `weighted_sum`, such as a `HiddenSum`;
        returns None if the server asks for no such sum. The arguments are the number of users in
        all silos together, and the clipping norm of a user's update.
    draw_users : Callable[[PoissonSampling], list[int]]
        Returns the users that all silos draw for this round, the same at every call.
    """

    method: ClientMethod
    task: Task
    data: ClientData
    received: Params
    training: Mapping[str, LocalTraining]
    generator: torch.Generator
    state: Mapping[str, Params] = field(default_factory=dict)
    settings: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    protection: Protection = field(default_factory=Protection)
    round: int = 1
    seed: int = 0
    memory: Params | None = None
    terms: Sequence[Term] = ()
    noise: NoiseSource = field(default_factory=SecureNoise)
    step_noise: Mapping[str, StepNoise] = field(default_factory=dict)
    batch_invariant: bool = False
    hidden_sum: Callable[[int, float], UsersTotal | None] = lambda users, bound: None
    draw_users: Callable[[PoissonSampling], list[int]] = lambda sampling: []

    @property
    def num_examples(self) -> int:
        """The plan's agreed number of training examples, or the client's own without such a plan.

        A client reports this number. A client that could not load its data knows only the agreed
        number.
        """
        agreed = self.protection.num_examples
        return len(self.data.train) if agreed is None else agreed

    def initial_params(self) -> Params:
        """Return the whole model before training. All clients have the same one."""
        return self.task.initial_params(self.seed)

    def train(
        self,
        phase: str,
        params: Mapping[str, torch.Tensor],
        trained: Callable[[str], bool] = lambda name: True,
        *,
        terms: Sequence[Term] = (),
        examples: Examples | None = None,
        solve: Callable[[Job], Any] | None = None,
        returns_params: bool = True,
    ) -> Training:
        """Return a training of ``params`` with the settings of ``phase``, for the method to yield.

        The training changes only the parameters for whose names ``trained`` returns True. The
        method yields the training, and the result of that ``yield`` is the trained model. Do not
        change this model in place, because clients may share the parts that were not trained. A
        client without examples gets ``params`` back, so that its upload does not reveal that there
        are no examples.

        The training adds ``terms`` to the loss. It uses ``examples``, by default all training
        examples of the client. ``solve`` trains the client's job in place of SGD; the ``yield``
        returns the result of ``solve``. If a training fails, the method usually gets ``params`` in
        place of the result. Set ``returns_params=False`` if ``params`` cannot replace the result;
        if a training then fails, the method fails, too.
        """
        job = Job(
            params=params,
            examples=self.data.train if examples is None else examples,
            training=self.training[phase],
            generator=self.generator,
            terms=[*self.terms, *terms],
            noise=self.step_noise.get(phase),
        )
        solve_each: Callable[..., Iterable[Any]]
        solve_each = train_invariantly if self.batch_invariant else train_each
        if solve is not None:
            solve_each = partial(_one_by_one, solve)
        return Training(
            task=self.task,
            job=job,
            trained=trained,
            solve=solve_each,
            returns_params=returns_params,
        )


def _one_by_one(
    solve: Callable[[Job], Any], task: Task, jobs: Iterable[Job], **options: Any
) -> Iterator[Any]:
    def solved(job: Job) -> Any:
        # The model's own draws, such as dropout, must not depend on other clients' jobs.
        with seeded(draws_seed(job.generator), task.torch_device()):
            return solve(job)

    return map(solved, jobs)


@dataclass(kw_only=True)
class LocalResult:
    """The result of a client's work: its upload before clipping and noise, and its new memory.

    Attributes
    ----------
    model : Params, optional
        The trained model; the client sends its difference to the received model.
    update : Params, BoundedSum or another UnitSum, optional
        The update, for a method that returns no model. If the plan's units are not the clients, the
        update is a sum over units, to which each unit contributes a bounded update. A `HiddenSum`
        encrypts the sum together with its noise.
    memory : Params or Callable, optional
        The client's new memory, which never leaves the client. If the server computes a counterpart
        of the memory from the update that it receives, give a function: the client calls the
        function with that update, and stores the memory that the function returns.

    Raises
    ------
    InvalidValue
        The model or the update is a `Training`: the method must yield a training to get its result.
    """

    model: Params | None = field(default=None, repr=False)  # not for logs
    update: Contribution | None = field(default=None, repr=False)
    memory: Params | Callable[[Params], Params] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_yielded(self.model)
        check_yielded(self.update)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question that the server asks outside the rounds, and the data to answer it with.

    ``values`` are the settings in the question, by name. ``draw_fingerprint`` returns the
    fingerprint of the key with which silos draw users (see `user_draws`).
    """

    task: Task
    data: ClientData
    values: Mapping[str, Any]
    draw_fingerprint: Callable[[], bytes]


class Memory(Enum):
    """Kinds of memory between rounds. They differ in whether updates depend on the memory."""

    NONE = "none"
    BESIDE_UPDATES = "beside updates"
    """Updates do not depend on the memory. An example is the personal model of Ditto."""
    IN_UPDATES = "in updates"
    """Updates depend on the memory. An example is the personal head of DP²-FedSAM."""
    MIRRORED = "mirrored"
    """Updates depend on the memory, and the server holds a counterpart of it. Examples are
    SCAFFOLD's c and FedDyn's h. A training message names the last round whose reply the server
    used; the client forgets the memory that it stored in later rounds.
    """


def shared_model(work: ClientWork) -> Params:
    """Return the shared model as the server sent it."""
    return work.received


@dataclass(frozen=True, kw_only=True)
class ClientMethod:
    """The client side of a method: two functions, each of which takes one client's `ClientWork`.

    Each function may yield `ClientWork.train` any number of times. It must depend on its argument
    only, because it runs side by side with the functions of other clients.

    Parameters
    ----------
    name : str
        Name in messages (``train.<name>``) and of the client memory.
    local_update : Callable[[ClientWork], LocalResult | Steps[LocalResult]]
        Trains on the client, and returns the upload and the memory.
    local_model : Callable[[ClientWork], Params | Steps[Params]]
        Returns the model that this client uses for predictions. The client evaluates this model on
        its test examples and then discards it. By default, it is the shared model.
    memory : Memory
        The memory that the client keeps between rounds.
    metrics : Callable[[Mapping[str, LocalTraining], int], Mapping[str, float]], optional
        Returns numbers that leave the client without noise, from the round's phases of training and
        the number of examples that the client reports. A client whose training or data fails
        therefore sends the same numbers as any other client of that size. Under a plan that hides
        how many examples a client has (``tells_sizes=False``), such as a `ReleasePlan` or a
        `GroupPlan`, clients send no ``metrics``. A method that needs them sets ``needs_metrics``.
    answer : Callable[[Question], Mapping[str, array]], optional
        Answers, without noise, a question that the server asks in a message ``query.<name>``.
    upload_phase : str, optional
        Name of the phase of training whose result is the whole update. No other phase may change
        the uploaded model. The ``terms`` that the method adds to the loss of this phase must not
        depend on a record. Noise in the steps of this phase then protects the update. None if there
        is no such phase.
    takes_weighted_sums : bool
        True if ``local_update`` calls `ClientWork.hidden_sum`. Clients of other methods refuse
        to set up a weighted sum, because the set-up counts the records of each user.
    dp_sgd : Callable[[Mapping[str, float]], DpSgd], optional
        Returns the DP-SGD of ``local_update`` under given settings, for the owner's least noise.
    """

    name: str
    local_update: Callable[[ClientWork], LocalResult | Steps[LocalResult]]
    local_model: Callable[[ClientWork], Params | Steps[Params]] = shared_model
    memory: Memory = Memory.IN_UPDATES
    metrics: Callable[[Mapping[str, LocalTraining], int], Mapping[str, float]] | None = None
    answer: Callable[[Question], Mapping[str, Any]] | None = None
    upload_phase: str | None = None
    takes_weighted_sums: bool = False
    dp_sgd: Callable[[Mapping[str, float]], DpSgd] | None = None

    @property
    def keeps_memory(self) -> bool:
        """True if clients store memory; a run can resume only if the memory still exists."""
        return self.memory is not Memory.NONE

    @property
    def updates_ignore_memory(self) -> bool:
        """True if no update depends on a client's memory; record-level guarantees require this."""
        return self.memory in (Memory.NONE, Memory.BESIDE_UPDATES)


def personal_model(work: ClientWork) -> Params:
    """Return the client's personal model, or the shared one if the client never took part."""
    return work.memory or work.received


def last_trained(work: ClientWork, tag: str) -> Params:
    """Return the model that the client stored under ``tag``, or the received one before that."""
    return untagged(work.memory or {}, tag) or work.received


def personal_part(work: ClientWork) -> Params:
    """Return the client's personal parameters, which the server does not send.

    They come from the client's memory. A client without memory returns their initial values.

    Raises
    ------
    InvalidValue
        The server sent every parameter, a running statistic, or a parameter that it did not send
        in earlier rounds. The client refuses, so that its own parameters stay on the client.
    """
    for name in work.received:
        if name.rpartition(".")[2] in RUNNING_STATISTICS:
            raise InvalidValue.tellable(
                f"the server's model has {name!r}, a running statistic of clients' data: expected "
                "the method's personal= to name its layer"
            )
    names = set(work.task.shapes) - set(work.received)
    if work.memory is None:
        if not names:
            raise InvalidValue.tellable(
                "the server sent every parameter of the client's model, so none is personal: "
                f"expected the method's personal= to name at least one of {sorted(work.received)}"
            )
        return {n: p for n, p in work.initial_params().items() if n in names}
    if set(work.memory) != names:
        raise InvalidValue.tellable(
            f"the server's model lacks {sorted(names)}: expected it to lack the personal "
            f"parameters of earlier rounds, {sorted(work.memory)}; do not change the method's "
            "personal= during a run"
        )
    return work.memory
