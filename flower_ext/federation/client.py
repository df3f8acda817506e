"""The client side that every method shares: unpack, train, bound, noise, reply.

A method supplies two functions (`ClientMethod`), written for one client. Bounding and noising
happen here, after them and before anything is sent, so no method can forget either, and what a
method returns as memory cannot reach a reply.

Where many clients live in one process, the same functions run `side_by_side`: whenever all of them
wait for a local training, these trainings are one batch (`training.train_each`). Where the plan
protects, no bit of what one of them sends depends on the others: not on their data, not on their
errors, and not on whether they are there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from logging import getLogger
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict

from flower_ext.data import ClientData, Examples
from flower_ext.federation import records
from flower_ext.federation._flower_private import record_of
from flower_ext.federation.cohort import PARTITION, check_addressee, partition_of, tell_partition
from flower_ext.federation.engines.virtual import CohortApp
from flower_ext.federation.failures import each, is_tellable, knowing_no_data, tellable
from flower_ext.federation.protection import (
    HiddenSum,
    bounds_models,
    check_noise,
    check_size,
    may_simulate,
    noise_source,
    objective_terms,
    protected,
    protects,
    step_noise,
)
from flower_ext.federation.requests import Asked, reader
from flower_ext.federation.side_by_side import Steps, Training, side_by_side
from flower_ext.federation.state.memory import ClientMemory, ClientVault
from flower_ext.privacy import (
    BoundedSum,
    NoiseSource,
    NonFiniteUpdate,
    SecureNoise,
    derived_seed,
    l2_norm,
)
from flower_ext.training import (
    MEMORY_LIMIT,
    ClippedJob,
    Job,
    LocalTraining,
    Params,
    StepNoise,
    Task,
    Term,
    difference,
    evaluate_each,
    train_clipped_steps,
    train_each,
    trains_apart,
)

log = getLogger("flwr")

_LOSSES = ("loss", "training_loss")


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
        asked: dict[str, Any] = {
            "params": params,
            "examples": self.data.train,
            "training": self.training[phase],
            "generator": self.generator,
            "terms": [*self.terms, *terms],
        }
        noise = self.step_noise.get(phase)
        if len(self.data.train) == 0:
            return Training(task=self.task, job=Job(**asked), trained=trained, solve=_untrained)
        if noise is None:
            solve = _train_steadily if self.steady else train_each
            return Training(task=self.task, job=Job(**asked), trained=trained, solve=solve)
        job = ClippedJob(noise=noise, **asked)
        return Training(task=self.task, job=job, trained=trained, solve=train_clipped_steps)


def _train_steadily(task: Task, jobs: Sequence[Job], **settings: Any) -> Iterator[Params]:
    return train_each(task, jobs, steady=True, **settings)


_UPDATES = (train_each, _train_steadily)
"""Trainings without noise of their own."""


def _untrained(task: Task, jobs: Sequence[Job], **settings: Any) -> list[Params]:
    return [dict(job.params) for job in jobs]


@dataclass(frozen=True, kw_only=True)
class LocalResult:
    """What a client uploads, once it is bounded and noised; ``memory`` never leaves it.

    Either a ``model``, whose difference to the received one is uploaded, or another ``update``.
    Where the plan's units are not the clients, that is a sum over them that says how far one
    can move it; a `HiddenSum` is encrypted together with its noise. Where the server renews the
    counterpart of ``memory`` from the update as it left the client, so does the client: then it is
    a function of that. ``metrics`` leave the client as they are, and only under a plan that is not
    a `ReleasePlan`: they must say nothing of the data beyond its size.
    """

    model: Params | None = None
    update: Params | BoundedSum | HiddenSum | None = None
    memory: Params | Callable[[Params], Params] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def bounded(self, received: Params, *, whole: bool) -> Params | BoundedSum | HiddenSum:
        """What a plan bounds: the update, or the ``whole`` model.

        Raises
        ------
        ValueError
            There is none, or two.
        """
        if (self.model is None) == (self.update is None):
            raise ValueError("LocalResult: expected either a model or an update")
        if self.model is not None:
            return self.model if whole else difference(self.model, received)
        if whole or self.update is None:
            raise ValueError(
                "the plan clips and noises whole models, and the method returns none: return "
                "LocalResult(model=...) in place of an update"
            )
        return self.update


_Made = tuple[
    Params | BoundedSum | HiddenSum,
    Params | Callable[[Params], Params] | None,
    Mapping[str, float],
]
"""Of a `LocalResult`: what the plan bounds, memory and metrics; the model may be forgotten."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the server asks before the first round, and what a client has to answer it with.

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


def client_app(
    *methods: ClientMethod,
    task: Task | Callable[[Context], Task],
    allow_seeded_noise: bool = False,
) -> CohortApp:
    """A ClientApp that answers for one or several methods.

    Parameters
    ----------
    task : Task | Callable[[Context], Task]
        The task, or how to build it from the run's configuration: one for all clients. What is a
        client's own is its data, which the task is asked for by the client's partition.
    allow_seeded_noise : bool
        Whether the server may ask for reproducible noise. For simulation only: whoever knows the
        seed can take the noise off again. The owner of a SuperNode forbids it in any case with
        ``--node-config "require-secure-noise=true"``.
    """
    app = CohortApp()

    @app.query("identity")
    def _(message: Message, context: Context) -> Message:
        return tell_partition(message, context.node_config.get(PARTITION))

    for method in methods:
        side = _ClientSide(method, task, allow_seeded_noise)
        app.together |= {f"train.{method.name}": side.train, f"evaluate.{method.name}": side.score}

        @app.train(method.name)
        def _(message: Message, context: Context, side: _ClientSide = side) -> Message:
            return _own_reply(message, side.train([message], [context], alone=True))

        @app.evaluate(method.name)
        def _(message: Message, context: Context, side: _ClientSide = side) -> Message:
            return _own_reply(message, side.score([message], [context]))

        @app.query(method.name)
        def _(message: Message, context: Context, side: _ClientSide = side) -> Message:
            if records.QUESTION in message.content:
                return side.tell(message, context)
            if records.COMPANY in message.content:
                return side.tell_company(message, context)
            return side.tell_state(message, context)

    return app


def _own_reply(message: Message, made: Sequence[RecordDict | Exception]) -> Message:
    (own,) = made
    if isinstance(own, Exception):
        raise own
    return Message(own, reply_to=message)


def _built(task: Callable[[Context], Task], context: Context) -> Task:
    """The task of all clients: those of one process share it, so it must know none of them."""
    rest = {name: value for name, value in context.node_config.items() if name != PARTITION}
    try:
        return task(replace(context, node_config=rest))
    except KeyError as error:
        if error.args != (PARTITION,):
            raise
        raise tellable(
            ValueError(
                f"the task is built from the node's {PARTITION!r}, but is one for all clients: "
                "what is a client's own belongs to its data (Task.data is given the partition)"
            )
        ) from None


def _device_of(context: Context) -> str | None:
    """The device that the node config names, if any."""
    if (named := context.node_config.get("device")) is None:
        return None
    name = str(named)
    try:
        torch.device(name)
    except RuntimeError:
        error = ValueError(f"node config device={name!r}: expected cpu, cuda or cuda:N")
        raise tellable(error) from None
    return name


@dataclass(frozen=True)
class _ClientSide:
    """Answers for one method, for as many clients as there are messages."""

    method: ClientMethod
    task: Task | Callable[[Context], Task]
    allow_seeded_noise: bool

    def train(
        self,
        messages: Sequence[Message],
        contexts: Sequence[Context],
        *,
        memory_limit: int = MEMORY_LIMIT,
        alone: bool = False,
    ) -> list[RecordDict | Exception]:
        """Train, protect, remember, reply: in this order, so an error leaves memory as it was.

        An error takes the place of its client's reply alone. A client that is ``alone`` on its node
        has no company that its model could depend on.
        """
        asked, works = self._unpack(messages, contexts, alone=alone)

        def finish(index: int, result: LocalResult) -> _Made:
            one, work = asked[index], works[index]
            assert isinstance(one, Asked)
            assert isinstance(work, ClientWork)
            own = result.bounded(work.received, whole=bounds_models(one.facts))
            return own, result.memory, result.metrics

        def begin(one: Asked, work: ClientWork) -> LocalResult | Steps[LocalResult]:
            if bounds_models(one.facts):
                return unmoved_by_errors(self.method.local_update, work, one.facts)
            return self.method.local_update(work)

        runs = each(begin, asked, works)
        made = side_by_side(runs, finish, memory_limit=memory_limit)
        # Stored before any reply is out of this function: what was released is remembered.
        return each(self._remembering, contexts, asked, works, made)

    def score(
        self,
        messages: Sequence[Message],
        contexts: Sequence[Context],
        *,
        memory_limit: int = MEMORY_LIMIT,
    ) -> list[RecordDict | Exception]:
        """Evaluate the model that each client would use; or its error."""
        asked, works = self._unpack(messages, contexts, alone=True)
        runs = each(self.method.local_model, works)
        models = side_by_side(runs, lambda _, model: model, memory_limit=memory_limit)
        tests = each(lambda work: work.data.test, works)
        every = _scores(works, models, tests, memory_limit=memory_limit)
        wanted = each(lambda one: bool(one.facts.get("training-loss")), asked)
        if True in wanted:
            own = each(lambda work: work.data.train, works)
            trained = _scores(works, models, own, memory_limit=memory_limit)
            every = each(_with_training_loss, every, trained)
        return each(_scores_record, works, every)

    def tell(self, message: Message, context: Context) -> Message:
        """Answer a question of the method."""
        check_addressee(message, context)
        if self.method.answer is None:
            raise tellable(ValueError(f"{self.method.name} answers no questions"))
        partition, content = partition_of(context.node_config), message.content
        question = Question(
            data=self._task(context).data(partition),
            partition=partition,
            asked=dict(content.config_records[records.QUESTION]),
            arrays={name: records.to_arrays(r) for name, r in content.array_records.items()},
            vault=ClientVault(context, self.method.name),
            may_simulate=may_simulate(context, allow_seeded_noise=self.allow_seeded_noise),
        )
        told = records.to_record(self.method.answer(question))
        return Message(RecordDict({records.ANSWER: told}), reply_to=message)

    def tell_state(self, message: Message, context: Context) -> Message:
        """Which training round left what this client remembers, read to see whether it can be.

        With ``report-size`` the number of its examples as well, as in a reply to a training.
        """
        check_addressee(message, context)
        facts = message.content.config_records[records.ROUND]
        before = int(facts["number"]) + 1  # type: ignore[arg-type]
        memory = ClientMemory(context, self.method.name, str(facts["run"]))
        told = {"version": memory.newest(before) if memory.load(before) is not None else 0}
        if facts.get("report-size"):
            data = self._task(context).data(partition_of(context.node_config))
            told["num-examples"] = len(data.train)
        answer = records.to_record({n: np.array(v, dtype=np.int64) for n, v in told.items()})
        return Message(RecordDict({records.ANSWER: answer}), reply_to=message)

    def tell_company(self, message: Message, context: Context) -> Message:
        """Answer whether the trainings that the message describes run one by one on this machine.

        Says nothing of the data but their shape.
        """
        check_addressee(message, context)
        task = self._task(context)
        data = task.data(partition_of(context.node_config)).train
        trainings = records.read_trainings(message.content).values()
        apart = len(data) > 0 and any(trains_apart(task, data, each) for each in trainings)
        answer = records.to_record({records.COMPANY: np.array(apart, dtype=np.int64)})
        return Message(RecordDict({records.ANSWER: answer}), reply_to=message)

    def _task(self, context: Context) -> Task:
        task = self.task if isinstance(self.task, Task) else _built(self.task, context)
        device = _device_of(context)  # the node's owner has the last word
        return task if device is None else replace(task, device=device)

    def _unpack(
        self, messages: Sequence[Message], contexts: Sequence[Context], *, alone: bool
    ) -> tuple[list[Asked | Exception], list[ClientWork | Exception]]:
        devices = each(_device_of, contexts)
        errors = [device for device in devices if isinstance(device, Exception)]
        if len(errors) == len(devices):
            return [*errors], [*errors]
        # All in one process have one task: that of the first with a device is good for all.
        sound = [not isinstance(device, Exception) for device in devices]
        task = self._task(contexts[sound.index(True)])
        read = reader(task)

        def own(message: Message, context: Context, device: str | None) -> Asked:
            check_addressee(message, context)
            return read(message)

        asked = each(own, messages, contexts, devices)
        # What is protected of one client is so of all: they are asked by one server.
        steady = not alone and any(protects(a.facts) for a in asked if isinstance(a, Asked))
        return asked, each(partial(self._work, task=task, steady=steady), asked, contexts)

    def _remembering(
        self, context: Context, asked: Asked, work: ClientWork, made: _Made
    ) -> RecordDict:
        """What leaves the client, once what it is to remember of it is stored."""
        reply, memory = self._reply(context, asked, work, made)
        _check_memory(memory)
        if memory is not None:
            if not self.method.keeps_memory:
                error = ValueError(f"{self.method.name} returns memory: set keeps_memory=True")
                raise tellable(error)
            kept = ClientMemory(context, self.method.name, asked.run)
            kept.store(memory, asked.round, and_before=self.method.mirrored)
        return reply

    def _reply(
        self, context: Context, asked: Asked, work: ClientWork, made: _Made
    ) -> tuple[RecordDict, Params | None]:
        """What leaves the client, and what it is to remember."""
        own, memory, told = made
        update = protected(
            own,
            work.received,
            asked.facts,
            context,
            allow_seeded_noise=self.allow_seeded_noise,
        )
        content: dict[str, object] = {records.UPDATE: records.to_record(update)}
        metrics: dict[str, float] = {}
        if asked.facts.get("report-size"):
            metrics |= {"num-examples": len(work.data.train), **told}
        if asked.facts.get("diagnostics"):
            if isinstance(own, HiddenSum):
                raise tellable(ValueError("diagnostics: the norm of a hidden sum stays hidden"))
            moved = own.value if isinstance(own, BoundedSum) else own
            if bounds_models(asked.facts):
                moved = difference(moved, work.received)
            metrics["update-norm"] = l2_norm(moved)
        if metrics:
            content[records.METRICS] = records.metrics_record(metrics)
        if callable(memory):
            memory = memory(_as_params(update, work.received))
        return record_of(RecordDict, content), memory

    def _work(self, asked: Asked, context: Context, task: Task, *, steady: bool) -> ClientWork:
        noise: NoiseSource = SecureNoise()
        phase = self.method.upload_phase
        with knowing_no_data():
            check_noise(asked.facts, context, kind=asked.kind)
            partition = partition_of(context.node_config)
            if "seeded-noise" in asked.facts:
                noise = noise_source(
                    asked.facts,
                    context,
                    allow_seeded_noise=self.allow_seeded_noise,
                    purpose="training-noise",
                )
            in_steps = step_noise(asked.facts, context, allow_seeded_noise=self.allow_seeded_noise)
            if in_steps is not None and phase is None:
                raise ValueError(f"{self.method.name}: no phase of training is all of its update")
        seed = derived_seed(asked.seed, "client", asked.kind, partition, asked.round)
        data = task.data(partition)
        if not isinstance(data, ClientData):
            raise tellable(TypeError("data(partition) of the Task: expected ClientData"))
        check_size(len(data.train), asked.facts)
        return ClientWork(
            task=task,
            data=data,
            received=asked.model,
            memory=self._remembered(asked, context) if self.method.keeps_memory else None,
            vault=ClientVault(context, self.method.name),
            training=asked.training,
            round=asked.round,
            seed=asked.seed,
            generator=torch.Generator().manual_seed(seed),
            settings=asked.settings,
            state=asked.state,
            terms=objective_terms(
                asked.model,
                len(data.train),
                asked.facts,
                context,
                allow_seeded_noise=self.allow_seeded_noise,
            ),
            noise=noise,
            step_noise={} if in_steps is None or phase is None else {phase: in_steps},
            config=asked.config,
            steady=steady,
        )

    def _remembered(self, asked: Asked, context: Context) -> Params | None:
        """What a training begins with is what was before it; an evaluation sees what it left."""
        memory = ClientMemory(context, self.method.name, asked.run)
        if self.method.mirrored and asked.kind == "train" and "remembered" in asked.facts:
            _go_back(memory, asked.facts["remembered"])
        return memory.load(before=asked.round + (asked.kind == "evaluate"))


def _scores(
    works: Sequence[ClientWork | Exception],
    models: Sequence[Params | Exception],
    examples: Sequence[Examples | Exception],
    *,
    memory_limit: int,
) -> list[dict[str, float] | Exception]:
    """What `evaluate_each` returns; nothing for a model without examples."""
    scores: list[dict[str, float] | Exception] = each(lambda *row: {}, works, models, examples)
    some: list[tuple[int, Params, Examples]] = []
    task: Task | None = None
    for index, (work, model, own) in enumerate(zip(works, models, examples, strict=True)):
        if isinstance(work, Exception) or isinstance(model, Exception):
            continue
        if not isinstance(own, Exception) and len(own):
            task = work.task
            some.append((index, model, own))
    if task is not None:
        places, chosen, tests = zip(*some, strict=True)
        found = evaluate_each(task, chosen, tests, memory_limit=memory_limit)
        for index, one in zip(places, found, strict=True):
            scores[index] = one
    return scores


def _with_training_loss(scores: dict[str, float], trained: dict[str, float]) -> dict[str, float]:
    return {**scores, "training_loss": trained["loss"]} if trained else scores


def _scores_record(work: ClientWork, scores: dict[str, float]) -> RecordDict:
    # A metric may be undefined for these examples; a loss that is no number has diverged.
    told = {n: v for n, v in scores.items() if n in _LOSSES or not math.isnan(v)}
    told["num-examples"] = float(len(work.data.test))
    return RecordDict({records.METRICS: records.metrics_record(told)})


def _as_params(
    released: Mapping[str, torch.Tensor] | Mapping[str, np.ndarray], like: Params
) -> Params:
    """What leaves the client, as tensors of the model's types."""
    return {name: torch.as_tensor(v).to(like[name].dtype) for name, v in released.items()}


def _go_back(memory: ClientMemory, used: int) -> None:
    """Forget what training rounds after ``used`` left, whose replies the server did not use."""
    memory.forget(after=used)
    if (newest := memory.newest()) < used:
        raise tellable(
            ValueError(
                f"what training round {used} left is not remembered any more (newest: "
                f"{newest or 'none'}), but still counts on the server: without it this client "
                "cannot take part. Memory outlives a SuperNode whose node config names a "
                "state-folder"
            )
        )


def _check_memory(params: Params | None) -> None:
    for name, value in (params or {}).items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise NonFiniteUpdate(f"{name!r} is not finite after training: nothing is kept or sent")


def unmoved_by_errors(
    local_update: Callable[[ClientWork], LocalResult | Steps[LocalResult]],
    work: ClientWork,
    facts: Mapping[str, Any] | None = None,
) -> Steps[LocalResult]:
    """Let a training that raises or diverges leave its model as it was; all else too, if need be.

    For models that leave the client under noise: an error in place of one would tell of a record.
    Where each step is noised instead (by ``facts``), no record makes these steps fail; what else
    does is an error. So is what the server's message lacks (see `tellable`).
    """
    steps_noised = "step-noise-stddev" in (facts or {})
    trained: Any = None
    try:
        run = local_update(work)
        while isinstance(run, Generator):
            try:
                wanted = run.send(trained)
            except StopIteration as end:
                run = end.value
                break
            try:
                trained = yield wanted
                if wanted.solve in _UPDATES:
                    _check_memory(trained)
            except Exception as error:  # whatever a model or a loss makes of a record
                if wanted.solve not in _UPDATES:
                    raise
                _log_unmoved(error)
                trained = dict(wanted.job.params)
        result: LocalResult = run
        for part in (result.model, result.update, result.memory):
            if isinstance(part, Mapping):
                _check_memory(part)
    except Exception as error:
        if steps_noised or is_tellable(error):
            raise
        _log_unmoved(error)
        return LocalResult(model=work.received)
    return result


def _log_unmoved(error: Exception) -> None:
    """Tell who runs the client; the server gets a model as usual."""
    log.warning(
        "a local training fails (%s), and its model stays as it was: look into this client's data, "
        "or into the task if no client trains",
        type(error).__name__,
    )
    log.debug("a local training fails", exc_info=error)
