"""The client side that every method shares: unpack, train, bound, noise, reply.

A method supplies two pure functions (`ClientMethod`). Bounding and noising happen here, after
them and before anything is sent, so no method can forget either, and what a method returns as
memory cannot reach a reply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_ext.data import ClientData
from flower_ext.federation import records
from flower_ext.federation.cohort import partition_of, tell_partition
from flower_ext.federation.memory import ClientMemory
from flower_ext.privacy import (
    NoiseSource,
    SecureNoise,
    SeededNoise,
    clip,
    l2_norm,
    seeded_generator,
)
from flower_ext.training import LocalTraining, Params, Task, evaluate, train


@dataclass(frozen=True, kw_only=True)
class ClientWork:
    """All that a method needs on one client in one round."""

    task: Task
    data: ClientData
    received: Params
    memory: Params | None
    training: Mapping[str, LocalTraining]
    round: int
    seed: int
    generator: torch.Generator

    def initial_params(self) -> Params:
        """The whole model before training; the same on every client."""
        return self.task.initial_params(self.seed)

    def train(
        self, phase: str, params: Mapping[str, torch.Tensor], trained: Callable[[str], bool]
    ) -> Params:
        """Train part of a model as the server's settings for ``phase`` say."""
        return train(
            self.task,
            params,
            self.data.train,
            self.training[phase],
            trained=trained,
            generator=self.generator,
        )


@dataclass(frozen=True, kw_only=True)
class LocalResult:
    """``update`` leaves the client, bounded and noised; ``memory`` never leaves it."""

    update: Params
    memory: Params | None = None


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
    """

    name: str
    local_update: Callable[[ClientWork], LocalResult]
    local_model: Callable[[ClientWork], Params]


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
            work = _unpack(message, context, method, task)
            result = method.local_update(work)
            norm = l2_norm(result.update)
            update = _released(result.update, message, context, allow_seeded_noise)
            if result.memory is not None:
                ClientMemory(context, method.name).store(result.memory)
            content = RecordDict({records.UPDATE: records.to_record(update)})
            if message.content.config_records[records.ROUND].get("diagnostics"):
                content[records.METRICS] = records.metrics_record({"update-norm": norm})
            return Message(content, reply_to=message)

        @app.evaluate(method.name)
        def _(message: Message, context: Context, method: ClientMethod = method) -> Message:
            work = _unpack(message, context, method, task)
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
) -> ClientWork:
    task = task if isinstance(task, Task) else task(context)
    facts = message.content.config_records[records.ROUND]
    partition = partition_of(context.node_config)
    server_round, seed = int(facts["number"]), int(facts["seed"])  # type: ignore[arg-type]
    kind = message.metadata.message_type.partition(".")[0]
    numbers = seeded_generator(seed, "client", kind, partition, server_round)
    return ClientWork(
        task=task,
        data=task.data(partition),
        received=records.to_params(message.content.array_records[records.MODEL]),
        memory=ClientMemory(context, method.name).load(),
        training=records.read_trainings(message.content),
        round=server_round,
        seed=seed,
        generator=torch.Generator().manual_seed(int(numbers.integers(2**63))),
    )


def _released(
    update: Params, message: Message, context: Context, allow_seeded_noise: bool
) -> Mapping[str, torch.Tensor]:
    """The update as it leaves the client: bounded and noised as the server's plan says."""
    facts = message.content.config_records[records.ROUND]
    if "clipping-norm" not in facts:
        return update
    bounded = clip(update, float(facts["clipping-norm"])).value  # type: ignore[arg-type]
    noise: NoiseSource = SecureNoise()
    if facts["seeded-noise"]:
        if not allow_seeded_noise or context.node_config.get("require-secure-noise"):
            raise PermissionError(
                "the server asks for seeded noise, which this client does not allow: in "
                "simulation build it with client_app(..., allow_seeded_noise=True), elsewhere "
                "set seeded_noise=False"
            )
        partition = partition_of(context.node_config)
        noise = SeededNoise(int(facts["seed"]), "client-noise", partition, int(facts["number"]))  # type: ignore[arg-type]
    return noise.add_gaussian(bounded, float(facts["noise-stddev"]))  # type: ignore[arg-type]
