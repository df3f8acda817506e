"""The client side that every method shares: unpack, train, bound, noise, reply.

A method supplies two functions (`ClientMethod`), written for one client. `ClientSide` bounds and
noises their results before it sends anything, so no method can forget either. The memory that a
method returns cannot reach a reply.

If many clients live in one process, their functions run `side_by_side`: whenever all of them wait
for a local training, these trainings form one batch (`training.train_each`). Under a plan that
protects, no bit that one client sends depends on the other clients: not on their data, their errors
or their presence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from flwr.app import Context, Message, RecordDict

from flower_ext.data import ClientData
from flower_ext.errors import InvalidValue, is_tellable, knowing_no_data, tellable
from flower_ext.federation import records
from flower_ext.federation.arrays import arrays_of
from flower_ext.federation.client.client_method import (
    ClientMethod,
    ClientWork,
    LocalResult,
    Memory,
)
from flower_ext.federation.client.protecting import (
    OF_UPLOADS,
    Contribution,
    NodePolicy,
    Protected,
    Unprotected,
    check_size,
    objective_terms,
    protected,
    step_noise,
)
from flower_ext.federation.client.requests import Request, reader
from flower_ext.federation.client.scores import scores_of, scores_record
from flower_ext.federation.client.unmoved import (
    NO_DATA,
    check_finite,
    data_of,
    log_unmoved,
    unmoved_by_errors,
)
from flower_ext.federation.client.vector_answers import WorkView, masked_vector, query_of
from flower_ext.federation.failures import each, in_turn
from flower_ext.federation.roster import PARTITION, check_addressee, partition_of
from flower_ext.federation.state.memory import ClientMemory, ClientVault
from flower_ext.federation.sums import masked, weighted_silo
from flower_ext.federation.sums.weighted_silo import HiddenSum
from flower_ext.federation.uploads import Update
from flower_ext.privacy.mechanisms.bounds import BoundedSum
from flower_ext.privacy.mechanisms.protections import ClipToCells
from flower_ext.privacy.mechanisms.updates import l2_norm
from flower_ext.privacy.mechanisms.vector_query import VectorQuery
from flower_ext.privacy.randomness import derived_seed
from flower_ext.training import MEMORY_LIMIT, Params, Task, difference
from flower_ext.training.between_trainings import refuse_state_between_trainings
from flower_ext.training.isolation import attempted
from flower_ext.training.side_by_side import Steps, check_whole, side_by_side


class Turn(NamedTuple):
    """One client's turn in a round: its node, the server's request, and the method's input."""

    context: Context
    request: Request
    work: ClientWork


@dataclass(frozen=True)
class ClientSide:
    """One method's answers, for any number of clients at a time: one client per message."""

    method: ClientMethod
    task: Task | Callable[[Context], Task]
    allow_seeded_noise: bool
    queries: Mapping[str, type[VectorQuery]] = field(default_factory=dict)

    def train(
        self,
        messages: Sequence[Message],
        contexts: Sequence[Context],
        *,
        memory_limit: int = MEMORY_LIMIT,
        alone: bool = False,
    ) -> list[Update | Exception]:
        """Train, protect, store memory and reply, in this order, so an error changes no memory.

        An error replaces the reply of its client only. ``alone`` means that the node trains no
        other client at the same time.
        """
        turns = self._turns(messages, contexts, alone=alone)

        def begin(turn: Turn) -> LocalResult | Steps[LocalResult]:
            protection = turn.request.protection
            # Under noise, a missing upload would tell more than an unmoved model does.
            if protection.hides_failures or protection.bounds_models:
                return unmoved_by_errors(self.method.local_update, turn.work, protection)
            return self.method.local_update(turn.work)

        def finish(index: int, result: LocalResult) -> Update:
            turn = turns[index]
            assert isinstance(turn, Turn)
            return self._finished(turn, result)

        return side_by_side(in_turn(begin, turns), finish, memory_limit=memory_limit)

    def _turns(
        self, messages: Sequence[Message], contexts: Sequence[Context], *, alone: bool
    ) -> list[Turn | Exception]:
        """Return each client's request and work, or its error; all share one task."""
        task = self.task_of(next(filter(_has_device, contexts), contexts[0]))
        read = reader(task)

        def turn_of(message: Message, context: Context) -> Turn:
            _device_of(context)
            check_addressee(message, context)
            request = read(message)
            # Beside others, libraries may round differently: a batch must not show in the bits.
            batch_invariant = not alone and request.protection.bounds_uploads
            return Turn(
                context,
                request,
                self._work(request, context, task, batch_invariant=batch_invariant),
            )

        return each(turn_of, messages, contexts)

    def _work(
        self, request: Request, context: Context, task: Task, *, batch_invariant: bool
    ) -> ClientWork:
        policy, phase = self.policy(context), self.method.upload_phase
        with knowing_no_data():
            if request.kind == "train":
                policy.check(request.protection)
            partition = partition_of(context.node_config)
            own_noise = policy.noise(request.entries, OF_UPLOADS)
            in_steps = step_noise(request.protection, own_noise)
            if in_steps is not None and phase is None:
                raise InvalidValue(
                    f"{self.method.name} has no upload_phase: noise in local steps needs one phase "
                    "of training that makes the whole update"
                )
        seed = derived_seed(request.seed, "client", request.kind, partition, request.round)
        data = _data(task, request, partition)
        return ClientWork(
            task=task,
            data=data,
            received=request.model,
            memory=self._load_memory(request, context) if self.method.keeps_memory else None,
            weighted_part=partial(
                weighted_silo.open_part,
                request.sums.get(records.WEIGHTED_SUM),
                ClientVault(context, self.method.name),
                request.round,
            ),
            training=request.training,
            round=request.round,
            seed=request.seed,
            generator=torch.Generator().manual_seed(seed),
            settings=request.settings,
            state=request.state,
            terms=objective_terms(request.model, len(data.train), request.protection, own_noise),
            noise=policy.noise(request.entries, "training-noise"),
            step_noise={} if in_steps is None or phase is None else {phase: in_steps},
            config=request.config,
            batch_invariant=batch_invariant,
        )

    def _load_memory(self, request: Request, context: Context) -> Params | None:
        """Load the memory from before this training round; an evaluation includes this round's."""
        memory = ClientMemory(context, self.method.name, request.run)
        mirrored = self.method.memory is Memory.MIRRORED
        if mirrored and request.kind == "train" and "remembered" in request.entries:
            _go_back(memory, request.entries["remembered"])
        return memory.load(before=request.round + (request.kind == "evaluate"))

    def _finished(self, turn: Turn, result: LocalResult) -> Update:
        """Protect the client's update and store its memory, then return its reply."""
        request, protection = turn.request, turn.request.protection
        contribution, update = self._protected(turn, result)
        metrics, sent = _metrics(turn, result, contribution), arrays_of(update)
        if isinstance(protection, ClipToCells):
            update = {name: value * protection.cell for name, value in sent.items()}
            # The client's end of `MaskedSum`: from here the server sees the cohort's sum alone.
            of_sum = request.sums[records.SECURE_SUM]
            sent = masked.seal(sent, of_sum, turn.context, self.method.name)
        self._store_memory(turn, result, update)
        return Update(sent, metrics)

    def _protected(self, turn: Turn, result: LocalResult) -> tuple[Contribution, Protected]:
        """Return the client's update before and after its protection."""
        request, received = turn.request, turn.work.received
        protection = request.protection

        def protect(result: LocalResult) -> tuple[Contribution, Protected]:
            contribution = contribution_of(result, received, whole=protection.bounds_models)
            noise = self.policy(turn.context).noise(request.entries, OF_UPLOADS)
            return contribution, protected(contribution, received, protection, noise)

        try:
            return protect(result)
        except Exception as error:  # a difference of two finite models may overflow
            if is_tellable(error) or not (protection.hides_failures and protection.takes_models):
                raise
            log_unmoved(error)
            return protect(LocalResult(model=received))

    def _store_memory(self, turn: Turn, result: LocalResult, update: Protected) -> None:
        """Store the client's new memory, which may depend on the ``update`` that it sends."""
        memory = result.memory
        try:
            if callable(memory):
                released = {name: torch.as_tensor(value) for name, value in update.items()}
                received = turn.work.received
                memory = memory({n: v.to(received[n].dtype) for n, v in released.items()})
            check_finite(memory)
        except Exception as error:  # the upload is on its way: a missing one would reveal the error
            if not turn.request.protection.hides_failures:
                raise
            log_unmoved(error)
            memory = turn.work.memory
        if memory is None:
            return
        if not self.method.keeps_memory:
            reason = f"{self.method.name} returns memory, but declares memory=Memory.NONE"
            raise tellable(InvalidValue(f"{reason}: declare another Memory"))
        kept = ClientMemory(turn.context, self.method.name, turn.request.run)
        kept.store(memory, turn.request.round, and_before=self.method.memory is Memory.MIRRORED)

    def score(
        self,
        messages: Sequence[Message],
        contexts: Sequence[Context],
        *,
        memory_limit: int = MEMORY_LIMIT,
    ) -> list[RecordDict | Exception]:
        """Return each client's scores of the model that it would use, or its error.

        If a query is answered by a noised sum, each client is evaluated by itself, so that no bit
        of its part depends on the other clients.
        """
        turns = self._turns(messages, contexts, alone=True)
        if any(isinstance(turn, Turn) and turn.request.query for turn in turns):
            return each(self._masked_vector, turns)
        works = each(lambda turn: turn.work, turns)
        models = self._used(works, memory_limit)
        wanted = each(lambda turn: bool(turn.request.entries.get("training-loss")), turns)
        scores = scores_of(works, models, also_training=True in wanted)
        return each(scores_record, works, scores)

    def _masked_vector(self, turn: Turn) -> RecordDict:
        query = query_of(turn.request, self.queries)
        view = WorkView(turn.work, lambda: self._used([turn.work], MEMORY_LIMIT)[0])
        policy = self.policy(turn.context)
        return masked_vector(query, view, turn.request, turn.context, self.method.name, policy)

    def used(self, message: Message, context: Context) -> Params:
        """Return the model that this client would use, which is the one that `score` evaluates.

        Raises
        ------
        Exception
            The error that `score` would return.
        """
        (turn,) = self._turns([message], [context], alone=True)
        (model,) = self._used(each(lambda turn: turn.work, [turn]), MEMORY_LIMIT)
        if isinstance(model, Exception):
            raise model
        return model

    def _used(
        self, works: Sequence[ClientWork | Exception], memory_limit: int
    ) -> list[Params | Exception]:
        """Return the whole model that each client would use, or its error."""

        def finish(index: int, model: Params) -> Params:
            work = works[index]
            assert isinstance(work, ClientWork)
            check_whole(model, work.task)
            return model

        runs = in_turn(self.method.local_model, works)
        return side_by_side(runs, finish, memory_limit=memory_limit)

    def policy(self, context: Context) -> NodePolicy:
        """Return what the node's owner permits."""
        return NodePolicy(context, self.allow_seeded_noise)

    def task_of(self, context: Context) -> Task:
        """Return the task, on the device that the node's owner names."""
        task = self.task if isinstance(self.task, Task) else _built(self.task, context)
        device = _device_of(context)  # the node's owner decides
        return task if device is None else replace(task, device=device)


def _data(task: Task, request: Request, partition: int) -> ClientData:
    """Return a client's data, checked; no data if none can be used and the server may not know."""
    hidden = _hides_missing_data(request)
    data = data_of(task, partition, hidden=hidden)
    if data is NO_DATA or isinstance(request.protection, Unprotected):
        return data
    num_examples = len(data.train)
    check_size(num_examples, request.protection)
    if request.kind != "train" or num_examples == 0:
        return data
    try:  # a trial of the model may be impossible with examples of this kind
        refuse_state_between_trainings(task, data.train)
    except Exception as error:
        if is_tellable(error) or not hidden:
            raise
        log_unmoved(error)
        return NO_DATA
    return data


def contribution_of(result: LocalResult, received: Params, *, whole: bool) -> Contribution:
    """Return the part of a result that the plan bounds: the update, or the ``whole`` model.

    Raises
    ------
    InvalidValue
        The result has neither or both of them, or no model where the plan needs one.
    """
    if (result.model is None) == (result.update is None):
        raise tellable(InvalidValue("LocalResult: expected either a model or an update"))
    if result.model is not None:
        return result.model if whole else difference(result.model, received)
    if whole or result.update is None:
        raise tellable(
            InvalidValue(
                "the plan clips and noises whole models, but the method returns an update: "
                "return LocalResult(model=...)"
            )
        )
    return result.update


def _hides_missing_data(request: Request) -> bool:
    """Return True if the server must not learn that this client could not load its data."""
    if request.kind == "evaluate":
        return bool(request.query)  # summed under noise
    return request.protection.hides_missing_data


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


def _metrics(turn: Turn, result: LocalResult, contribution: Contribution) -> dict[str, float]:
    """Return the numbers that leave the client beside its update."""
    entries, protection = turn.request.entries, turn.request.protection
    metrics: dict[str, float] = {}
    if entries.get("report-size"):
        # Of a client without its data, the agreed number.
        agreed = protection.num_examples
        size = len(turn.work.data.train) if agreed is None else agreed
        metrics |= {"num-examples": size, **result.metrics}
    if entries.get("diagnostics"):
        if isinstance(contribution, HiddenSum):
            raise tellable(InvalidValue("diagnostics=True with a hidden sum: expected False"))
        moved: Mapping[str, Any]
        if isinstance(contribution, BoundedSum):
            moved = contribution.in_numbers()
        elif protection.bounds_models:
            moved = difference(contribution, turn.work.received)
        else:
            moved = contribution
        metrics["update-norm"] = l2_norm(moved)
    return metrics


def _built(task: Callable[[Context], Task], context: Context) -> Task:
    """Build the task, without the partition, because all clients of a process share the task."""
    rest = {name: value for name, value in context.node_config.items() if name != PARTITION}
    try:
        return task(replace(context, node_config=rest))
    except KeyError as error:
        if error.args != (PARTITION,):
            raise
        raise tellable(
            InvalidValue(
                f"the task reads the node's {PARTITION!r}, but all clients of a process share one "
                "task: load a client's own data in Task.data, which gets the partition"
            )
        ) from None


def _device_of(context: Context) -> str | None:
    """Return the device that the node config names, or None."""
    if (named := context.node_config.get("device")) is None:
        return None
    name = str(named)
    try:
        torch.device(name)
    except RuntimeError:
        error = InvalidValue(f"node config device={name!r}: expected cpu, cuda or cuda:N")
        raise tellable(error) from None
    return name


def _has_device(context: Context) -> bool:
    return not isinstance(attempted(_device_of, context), Exception)
