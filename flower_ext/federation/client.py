"""The client side that every method shares: unpack, train, bound, noise, reply.

A method supplies two pure functions (`ClientMethod`). Bounding and noising happen here, after
them and before anything is sent, so no method can forget either, and what a method returns as
memory cannot reach a reply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_ext.data import ClientData
from flower_ext.federation import records
from flower_ext.federation.cohort import partition_of, tell_partition
from flower_ext.federation.memory import ClientMemory
from flower_ext.federation.protection import objective_terms, protected
from flower_ext.privacy import l2_norm, seeded_generator
from flower_ext.training import LocalTraining, Params, Task, Term, evaluate, train


@dataclass(frozen=True, kw_only=True)
class ClientWork:
    """All that a method needs on one client in one round.

    ``settings`` are the method's own numbers, ``state`` the server's other array records by name,
    ``terms`` what the plan adds to every local objective (objective perturbation), ``config`` what
    the user passed to ``start``.
    """

    task: Task
    data: ClientData
    received: Params
    memory: Params | None
    training: Mapping[str, LocalTraining]
    round: int
    seed: int
    generator: torch.Generator
    settings: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, Params] = field(default_factory=dict)
    terms: Sequence[Term] = ()
    config: Mapping[str, object] = field(default_factory=dict)

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
    ) -> Params:
        """Train part of a model as the server's settings for ``phase`` say."""
        return train(
            self.task,
            params,
            self.data.train,
            self.training[phase],
            trained=trained,
            terms=[*self.terms, *terms],
            generator=self.generator,
        )


@dataclass(frozen=True, kw_only=True)
class LocalResult:
    """``update`` leaves the client, bounded and noised; ``memory`` never leaves it.

    ``metrics`` leave it as they are, and only under a plan that is not a `ReleasePlan`: they must
    say nothing of the data beyond its size.
    """

    update: Params
    memory: Params | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClientMethod:
    """The client side of a method: two pure functions.

    Parameters
    ----------
    name : str
        Names the messages (``train.<name>``) and the client memory.
    local_update : Callable[[ClientWork], LocalResult]
    local_model : Callable[[ClientWork], Params]
        The model that this client would use: evaluated on its test examples, then forgotten.
    memoryless : bool
        Whether updates depend on no client memory; record-level guarantees ask.
    """

    name: str
    local_update: Callable[[ClientWork], LocalResult]
    local_model: Callable[[ClientWork], Params]
    memoryless: bool = False


def client_app(
    *methods: ClientMethod,
    task: Task | Callable[[Context], Task],
    allow_seeded_noise: bool = False,
) -> ClientApp:
    """A ClientApp that answers for one or several methods.

    Parameters
    ----------
    task : Task | Callable[[Context], Task]
        The task, or how to build it from the run's configuration.
    allow_seeded_noise : bool
        Whether the server may ask for reproducible noise. For simulation only: whoever knows the
        seed can take the noise off again. The owner of a SuperNode forbids it in any case with
        ``--node-config "require-secure-noise=true"``.
    """
    app = ClientApp()

    @app.query("identity")
    def _(message: Message, context: Context) -> Message:
        return tell_partition(message, partition_of(context.node_config))

    for method in methods:

        @app.train(method.name)
        def _(message: Message, context: Context, method: ClientMethod = method) -> Message:
            work = _unpack(message, context, method, task, allow_seeded_noise)
            result = method.local_update(work)
            facts = message.content.config_records[records.ROUND]
            update = protected(
                result.update,
                work.received,
                facts,
                context,
                allow_seeded_noise=allow_seeded_noise,
            )
            if result.memory is not None:
                ClientMemory(context, method.name).store(result.memory)
            content = RecordDict({records.UPDATE: records.to_record(update)})
            metrics: dict[str, float] = {}
            if facts.get("report-size"):
                metrics |= {"num-examples": len(work.data.train), **result.metrics}
            if facts.get("diagnostics"):
                metrics["update-norm"] = l2_norm(result.update)
            if metrics:
                content[records.METRICS] = records.metrics_record(metrics)
            return Message(content, reply_to=message)

        @app.evaluate(method.name)
        def _(message: Message, context: Context, method: ClientMethod = method) -> Message:
            work = _unpack(message, context, method, task, allow_seeded_noise)
            scores = evaluate(work.task, method.local_model(work), work.data.test)
            scores["num-examples"] = float(len(work.data.test))
            content = RecordDict({records.METRICS: records.metrics_record(scores)})
            return Message(content, reply_to=message)

    return app


def _unpack(
    message: Message,
    context: Context,
    method: ClientMethod,
    task: Task | Callable[[Context], Task],
    allow_seeded_noise: bool,
) -> ClientWork:
    task = task if isinstance(task, Task) else task(context)
    content = message.content
    facts = content.config_records[records.ROUND]
    partition = partition_of(context.node_config)
    number, seed = int(facts["number"]), int(facts["seed"])  # type: ignore[arg-type]
    kind = message.metadata.message_type.partition(".")[0]
    numbers = seeded_generator(seed, "client", kind, partition, number)
    received = {name: records.to_params(record) for name, record in content.array_records.items()}
    model, data = received.pop(records.MODEL), task.data(partition)
    return ClientWork(
        task=task,
        data=data,
        received=model,
        memory=ClientMemory(context, method.name).load(),
        training=records.read_trainings(content),
        round=number,
        seed=seed,
        generator=torch.Generator().manual_seed(int(numbers.integers(2**63))),
        settings=dict(content.config_records.get(records.SETTINGS, {})),  # type: ignore[arg-type]
        state=received,
        terms=objective_terms(
            model, len(data.train), facts, context, allow_seeded_noise=allow_seeded_noise
        ),
        config=dict(content.config_records.get(records.CONFIG, {})),
    )
