"""A client's turn in a round: from the server's message to the input of the method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from flwr.app import Context, Message

from flower_ext.data import ClientData, SiloData
from flower_ext.errors import InvalidValue, is_tellable, knowing_no_data, tellable
from flower_ext.federation import records
from flower_ext.federation.client.client_method import ClientMethod, ClientWork, Memory
from flower_ext.federation.client.hidden_failures import NO_DATA, data_of, log_hidden
from flower_ext.federation.client.node import OF_UPLOADS, NodePolicy, device_of, task_on
from flower_ext.federation.client.requests import Request, reader
from flower_ext.federation.client.user_draws import draw_users
from flower_ext.federation.failures import attempt_each
from flower_ext.federation.protection import Unprotected
from flower_ext.federation.roster import check_addressee, partition_of
from flower_ext.federation.state.memory import ClientMemory, ClientVault
from flower_ext.federation.sums import weighted_silo
from flower_ext.privacy import NoiseSource
from flower_ext.privacy.guarantee import PreconditionFailed
from flower_ext.privacy.mechanisms.protections import (
    ClipSteps,
    ClipToCells,
    ObjectivePerturbation,
    Protection,
)
from flower_ext.privacy.randomness import derived_seed
from flower_ext.training import Linear, Params, StepNoise, Task
from flower_ext.training.between_trainings import refuse_state_between_trainings


class Turn(NamedTuple):
    """One client's turn in a round.

    Attributes
    ----------
    method : ClientMethod
    context : Context
        The client's node and state.
    policy : NodePolicy
        Limits that the owner of the node sets.
    request : Request
        The server's request.
    memory : ClientMemory or None
        The memory of the method on this client; None if the method keeps none.
    work : ClientWork
        The method's input.
    """

    method: ClientMethod
    context: Context
    policy: NodePolicy
    request: Request
    memory: ClientMemory | None
    work: ClientWork


_IN_THE_CLEAR = ("report-size", "diagnostics", "training-loss")
"""Entries of a request for numbers about the client's data beside its update."""


@dataclass(frozen=True)
class ServedMethod:
    """A method as a ClientApp serves it: it prepares each client's turn.

    Parameters
    ----------
    method : ClientMethod
    task : Task | Callable[[Context], Task]
    allow_seeded_noise : bool
        As in `client_app`.
    """

    method: ClientMethod
    task: Task | Callable[[Context], Task]
    allow_seeded_noise: bool

    def turns(
        self, messages: Sequence[Message], contexts: Sequence[Context], *, alone: bool
    ) -> list[Turn | Exception]:
        """Return each client's turn, or its error; all share one task.

        ``alone`` means that the node trains no other client at the same time.
        """
        task = task_on(self.task, contexts)
        read = reader(task)

        def turn(message: Message, context: Context) -> Turn:
            device_of(context)  # refuses an unknown one
            check_addressee(message, context)
            request = read(message)
            # Libraries may round differently in a batch, and a batch must not show in the bits of
            # an upload.
            batch_invariant = not alone and request.protection.bounds_uploads
            return self._turn(request, context, task, batch_invariant=batch_invariant)

        return attempt_each(turn, messages, contexts)

    def policy(self, context: Context) -> NodePolicy:
        """Return what the node's owner permits."""
        return NodePolicy(context, self.allow_seeded_noise)

    def _turn(
        self, request: Request, context: Context, task: Task, *, batch_invariant: bool
    ) -> Turn:
        method, policy, phase = self.method, self.policy(context), self.method.upload_phase
        with knowing_no_data():
            if request.kind == "train":
                policy.check(request.protection)
            policy.check_way_out("an update or scores", in_sum=_is_summed(request))
            partition = partition_of(context.node_config)
            upload_noise = policy.noise(request.entries, OF_UPLOADS)
            in_steps = step_noise(request.protection, upload_noise)
            if in_steps is not None and phase is None:
                raise InvalidValue(
                    f"{method.name} has no upload_phase: noise in local steps needs one phase "
                    "of training that makes the whole update; take a plan that noises uploads"
                )
        # Batches differ between clients and rounds, and are the same in a repeated round.
        seed = derived_seed(request.seed, "client", request.kind, partition, request.round)
        data = _data(task, request, partition)
        memory = None
        if method.keeps_memory:
            memory = ClientMemory(context, method.name, request.run)
        work = ClientWork(
            task=task,
            data=data,
            received=request.model,
            memory=None if memory is None else _load(memory, method, request),
            weighted_part=partial(
                weighted_silo.open_part,
                request.sums.get(records.WEIGHTED_SUM),
                ClientVault(context, method.name),
                request.round,
            ),
            draw_users=partial(
                draw_users,
                task,
                ClientVault(context, f"{method.name}-draws"),
                (request.run, context.run_id),
                request.round,
            ),
            protection=request.protection,
            training=request.training,
            round=request.round,
            seed=request.seed,
            generator=torch.Generator().manual_seed(seed),
            settings=request.settings,
            state=request.state,
            terms=objective_terms(request.model, len(data.train), request.protection, upload_noise),
            noise=policy.noise(request.entries, "training-noise"),
            step_noise={} if in_steps is None or phase is None else {phase: in_steps},
            config=request.config,
            batch_invariant=batch_invariant,
        )
        return Turn(method, context, policy, request, memory, work)


def _load(memory: ClientMemory, method: ClientMethod, request: Request) -> Params | None:
    """Load the newest memory from before this training round, or for an evaluation, of this one."""
    used = request.entries.get("remembered")
    if method.memory is Memory.MIRRORED and request.kind == "train" and used is not None:
        _go_back(memory, used)
    return memory.load(before=request.round + (request.kind == "evaluate"))


def _go_back(memory: ClientMemory, used: int) -> None:
    """Forget memory of training rounds after ``used``, whose replies the server did not use."""
    memory.forget(after=used)
    if (newest := memory.newest()) < used:
        raise tellable(
            InvalidValue(
                f"this client lost its memory of training round {used} (newest: "
                f"{newest or 'none'}), which the server still counts on, so it cannot take part: "
                "name a state-folder in the node config, so that memory outlives the SuperNode"
            )
        )


def _data(task: Task, request: Request, partition: int) -> ClientData:
    """Return a client's checked data, or no examples if an error in them must stay hidden."""
    hide_errors = _hides_missing_data(request)
    data = data_of(task, partition, hide_errors=hide_errors)
    if isinstance(data, SiloData) and data is not NO_DATA:
        data = data.without(request.entries.get("withdrawn", ()))
    if data is NO_DATA or isinstance(request.protection, Unprotected):
        return data
    num_examples = len(data.train)
    check_size(num_examples, request.protection)
    if request.kind != "train" or num_examples == 0:
        return data
    try:  # a trial of the model may be impossible with examples of this kind
        refuse_state_between_trainings(task, data.train)
    except Exception as error:
        if is_tellable(error) or not hide_errors:
            raise
        log_hidden(error)
        return NO_DATA
    return data


def _hides_missing_data(request: Request) -> bool:
    """Return True if the server must not learn that this client could not load its data."""
    if request.kind == "evaluate":
        return bool(request.query)  # summed under noise
    return request.protection.hides_missing_data


def check_size(num_examples: int, protection: Protection) -> None:
    """Refuse to train on another number of examples than the guarantee assumes.

    Raises
    ------
    PreconditionFailed
        The server's plan assumes another number.
    """
    agreed = protection.num_examples
    if agreed is not None and num_examples != agreed:
        raise tellable(
            PreconditionFailed(
                f"this client trains on another number of examples than the plan's num_examples="
                f"{agreed}, which holds for all clients: give every client that many, or change "
                "the plan"
            )
        )


def _is_summed(request: Request) -> bool:
    """Return True if the answer to a request is masked, with nothing in the clear beside it."""
    beside = [name for name in _IN_THE_CLEAR if request.entries.get(name)]
    is_masked = records.SECURE_SUM in request.sums and isinstance(request.protection, ClipToCells)
    return is_masked and not beside and (request.kind == "train" or bool(request.query))


def step_noise(protection: Protection, noise: NoiseSource) -> StepNoise | None:
    """Return the clipping and noise of each local step, if the server asks for them."""
    if not isinstance(protection, ClipSteps):
        return None
    return StepNoise(
        clipping_norm=protection.gradient_clipping_norm,
        stddev=protection.noise_stddev,
        source=noise,
    )


def objective_terms(
    params: Params, num_examples: int, protection: Protection, noise: NoiseSource
) -> tuple[Linear, ...]:
    """Return ⟨n, w⟩ with fresh noise n if the server asks for objective perturbation.

    Raises
    ------
    PreconditionFailed
        This client has too few examples for the noise to protect one of them.
    """
    if not isinstance(protection, ObjectivePerturbation):
        return ()
    if num_examples < protection.least_examples:
        raise tellable(
            PreconditionFailed(
                "this client trains on too few examples: objective perturbation needs at least "
                f"{protection.least_examples:.0f} = 2u₂/μ of them (Theorem 6.3); take a larger "
                "proximal_weight"
            )
        )
    arrays = {name: p.detach().cpu().numpy() for name, p in params.items()}
    direction = protection.direction(arrays, noise)
    return (Linear(direction={n: torch.from_numpy(d).to(params[n]) for n, d in direction.items()}),)
