"""Prepare a client's work: from the server's request to the input of the method."""

from dataclasses import dataclass
from functools import cache, partial

import torch

from flower_ext.data import ClientData, Examples, SiloData
from flower_ext.errors import InvalidValue, is_tellable, knowing_no_data, tellable
from flower_ext.federation.client.client_method import ClientMethod, ClientWork, Memory
from flower_ext.federation.client.hidden_errors import hide_errors, log_once
from flower_ext.federation.client.node import NodePolicy
from flower_ext.federation.client.requests import ClientRequest
from flower_ext.federation.client.user_draws import draw_users, draws_vault
from flower_ext.federation.storage.memory import ClientMemory
from flower_ext.federation.sums.summation import ClientSum
from flower_ext.privacy import NoiseSource
from flower_ext.privacy.guarantee import PreconditionFailed
from flower_ext.privacy.mechanisms.protections import (
    ClipSteps,
    ObjectivePerturbation,
    Protection,
    Unprotected,
)
from flower_ext.privacy.randomness import derived_seed
from flower_ext.training import Linear, Params, StepNoise, Task, train
from flower_ext.training.isolation import isolated
from flower_ext.training.trials.trainings import why_state_is_shared

_NONE = Examples(features=torch.empty(0), targets=torch.empty(0))
NO_DATA = SiloData(train=_NONE, test=_NONE, owners=torch.empty(0, dtype=torch.int64))
"""Data of a client without examples, which every method accepts."""


@dataclass(kw_only=True)
class Assignment:
    """One client's work, with everything that the client side needs but no method may see."""

    work: ClientWork
    """The input of the method."""
    request: ClientRequest
    """The server's request, which says how the client's answer leaves the client."""
    policy: NodePolicy
    """The client's node, and limits that its owner sets."""
    sum: ClientSum
    """The client's end of the round's sum, which seals its contribution."""
    store: ClientMemory | None
    """The store for the memory that the method returns; None if the method keeps no memory."""


def assign(
    method: ClientMethod, task: Task, policy: NodePolicy, request: ClientRequest, *, alone: bool
) -> Assignment:
    """Return a client's assignment, if the owner of its node permits the request.

    ``alone`` means that the node trains no other client at the same time.
    """
    of_round, protection = request.round, request.round.protection
    with knowing_no_data():
        partition, noise = policy.partition, policy.admit(request, method)
        step_noise = _step_noise(method, protection, noise)
        client_sum = request.sum_type(request.sum_message, policy.context, method.name)
        client_sum.check(protection)
    # Batches of examples differ between clients and rounds, and are equal in a repeated round.
    seed = derived_seed(of_round.seed, "client", request.kind, partition, of_round.number)
    data = checked_data(task, request, partition)
    context, keeps = policy.context, method.keeps_memory
    store = ClientMemory(context, method.name, of_round.run) if keeps else None
    run, draws = (of_round.run, context.run_id), draws_vault(context, method.name)
    work = ClientWork(
        method=method,
        task=task,
        data=data,
        received=request.received,
        training=request.training,
        state=request.state,
        settings=request.settings,
        config=request.config,
        protection=protection,
        round=of_round.number,
        seed=of_round.seed,
        memory=None if store is None else _load(store, method, request),
        generator=torch.Generator().manual_seed(seed),
        terms=objective_terms(request.received, len(data.train), protection, noise),
        noise=policy.noise(of_round, "training-noise"),
        step_noise=step_noise,
        # Libraries may round differently if clients train in one batch, but no bit of an upload may
        # depend on the other clients.
        batch_invariant=not alone and protection.bounds_uploads,
        hidden_sum=partial(client_sum.hidden_sum, of_round.number, request.received),
        # Cached, because a silo repeats failed work without data, for the same users.
        draw_users=cache(partial(draw_users, task, draws, run, of_round.number)),
    )
    return Assignment(work=work, request=request, policy=policy, sum=client_sum, store=store)


def checked_data(task: Task, request: ClientRequest, partition: int) -> ClientData:
    """Return a client's checked data, or `NO_DATA` if an error in the data must stay hidden.

    The check refuses data with a different number of examples than the plan assumes. It also
    refuses a task whose training would change later trainings in the same process (see
    `why_state_is_shared`).
    """
    may_hide, protection = request.hides_missing_data, request.round.protection
    data = data_of(task, partition, hide_errors=may_hide)
    if data is not NO_DATA and (withdrawn := request.round.withdrawn):
        if not isinstance(data, SiloData):
            raise PreconditionFailed.tellable(
                "data of the Task: expected SiloData, because users withdrew, and the field owners "
                "of SiloData says which records to leave out"
            )
        data = data.without(withdrawn)
    if data is NO_DATA or isinstance(protection, Unprotected):
        return data
    num_examples, agreed = len(data.train), protection.num_examples
    if agreed is not None and num_examples != agreed:
        raise PreconditionFailed.tellable(
            f"this client has a different number of training examples than the plan's "
            f"num_examples={agreed}: give every client that many examples, or change the plan"
        )
    if request.kind != "train" or num_examples == 0:
        return data
    with hide_errors(may_hide):  # the model may fail on examples of this kind
        if reason := why_state_is_shared(task, data.train, train):
            raise InvalidValue.tellable(reason)
        return data
    return NO_DATA  # the error was hidden


def data_of(task: Task, partition: int, *, hide_errors: bool) -> ClientData:
    """Return a client's data, or `NO_DATA` if loading fails and ``hide_errors`` is True.

    A `tellable` error is raised nevertheless; all others are written to the client's log.
    """
    try:
        with isolated():
            data = task.data(partition)
        if isinstance(data, ClientData):
            return data
        error: Exception = TypeError("data(partition) of the Task: expected ClientData")
        if not hide_errors:
            raise tellable(error)
    except Exception as raised:
        if not hide_errors or is_tellable(raised):
            raise
        error = raised
    log_once(
        "the data of this client could not be loaded (%s), so it counts as a client without "
        "examples: check Task.data",
        error,
    )
    return NO_DATA


def _load(store: ClientMemory, method: ClientMethod, request: ClientRequest) -> Params | None:
    """Return the newest memory that the request may use; None if there is none.

    A training may use the memory of earlier rounds. An evaluation may also use the memory that the
    client stored in the request's own round.
    """
    # The last round whose reply from this client the server used; 0 if there is none.
    used = request.round.remembered
    if method.memory is Memory.MIRRORED and request.kind == "train" and used is not None:
        store.forget(after=used)
        if (newest := store.newest()) < used:
            raise InvalidValue.tellable(
                f"this client cannot take part: it lost the memory that it stored in training "
                f"round {used}, and the server's state depends on this memory (newest: "
                f"{newest or 'none'}): "
                "name a state-folder in the node config, so that memory outlives the SuperNode"
            )
    # Mirrored memory is empty if no training of this client has succeeded yet.
    return store.load(before=request.round.number + (request.kind == "evaluate")) or None


def _step_noise(
    method: ClientMethod, protection: Protection, noise: NoiseSource
) -> dict[str, StepNoise]:
    """Return the clipping and noise of local steps by phase; empty if the server asks for none."""
    if not isinstance(protection, ClipSteps):
        return {}
    if method.upload_phase is None:
        raise InvalidValue(
            f"{method.name} has no upload_phase, but the plan adds noise in local steps. Such "
            "noise protects an update only if one phase of training makes the whole update: take a "
            "plan that adds noise to uploads"
        )
    in_steps = StepNoise(
        clipping_norm=protection.gradient_clipping_norm,
        stddev=protection.noise_stddev,
        source=noise,
    )
    return {method.upload_phase: in_steps}


def objective_terms(
    params: Params, num_examples: int, protection: Protection, noise: NoiseSource
) -> tuple[Linear, ...]:
    """Return the term that objective perturbation adds to the loss.

    The term is ⟨n, w⟩, where w are the trained parameters and n is fresh noise. Return no term if
    the server does not ask for objective perturbation.
    """
    if not isinstance(protection, ObjectivePerturbation):
        return ()
    if num_examples < protection.least_examples:
        raise PreconditionFailed.tellable(
            "this client trains on too few examples: objective perturbation needs at least "
            f"{protection.least_examples:.0f}, which is 2u₂/μ (Upcycled-FL, Theorem 6.3), where u₂ "
            "bounds the curvature of the loss, and μ is the proximal_weight: give this client more "
            "examples, or take a larger proximal_weight"
        )
    arrays = {name: p.detach().cpu().numpy() for name, p in params.items()}
    direction = protection.direction(arrays, noise)
    return (Linear(direction={n: torch.from_numpy(d).to(params[n]) for n, d in direction.items()}),)
