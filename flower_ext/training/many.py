"""Many local trainings as one batch: stacked parameters, padded mini-batches, one backward pass.

Each job keeps its own model, examples, settings, terms and batch order; what comes out is what
`train` makes of the jobs one by one, up to the order of floating-point sums. Every parameter is one
tensor with a first dimension of jobs, so momentum, SAM and terms cost a few operations for all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from logging import getLogger
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.functional import cross_entropy

from flower_ext.data import ClientData, Examples
from flower_ext.training import dense
from flower_ext.training.local import (
    Job,
    LocalTraining,
    batch_rows,
    evaluate,
    predict,
    score,
    spared,
    train,
)
from flower_ext.training.objective import Linear, Proximal, affine
from flower_ext.training.params import Params, Sizes, sizes
from flower_ext.training.stacked import (
    Loss,
    MappedModel,
    NotStackable,
    StackedModel,
    Target,
)
from flower_ext.training.task import Task

log = getLogger("flwr")

MEMORY_LIMIT = 2**30
"""Bytes that one batch of trainings may take, unless the caller says otherwise."""
_CACHE = 12 * 2**20
"""Bytes of parameters and activations in a batch on a CPU: more leave its caches."""
_IGNORED = -100
"""Targets that cross_entropy leaves out of its mean."""
_LEAST_TOGETHER = 8
_TOGETHER_ELSEWHERE = 4096


def train_many(
    task: Task,
    jobs: Sequence[Job],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    memory_limit: int = MEMORY_LIMIT,
) -> list[Params]:
    """What `train` returns for each job, in their order.

    Jobs that cannot be trained together, or would not gain by it, are trained one by one.

    Parameters
    ----------
    memory_limit : int
        Bytes for parameters, gradients, examples and activations of one batch (estimated).

    Raises
    ------
    ValueError, NotConverged
        As `train`.
    """
    return list(train_each(task, jobs, trained=trained, memory_limit=memory_limit))


def train_each(
    task: Task,
    jobs: Sequence[Job],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    memory_limit: int = MEMORY_LIMIT,
) -> Iterator[Params]:
    """As `train_many`, but each model as soon as it and those before it are there.

    Who uses a model at once finds it in the processor's caches, and need not hold all of them.
    """
    ready: dict[int, Params] = {}
    done = 0
    for group, rows in train_groups(task, jobs, trained=trained, memory_limit=memory_limit):
        ready |= zip(group, unstacked(rows, [jobs[index] for index in group]), strict=True)
        while done in ready:
            yield ready.pop(done)
            done += 1


def train_groups(
    task: Task,
    jobs: Sequence[Job],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    memory_limit: int = MEMORY_LIMIT,
    steady: bool = False,
) -> Iterator[tuple[list[int], Params]]:
    """What `train_many` trains, batch by batch: the indices of jobs, and their models in rows.

    Each parameter has a first dimension of these jobs; it is the caller's to change. What no job of
    a batch trains, buffers too, may be missing. Who needs sums over models rather than the models
    never holds more than one batch of them.

    Parameters
    ----------
    steady : bool
        Whether no model may depend on which other jobs there are, not even by its rounding, which
        unstable training amplifies: for jobs that a guarantee bounds one by one. Costs time where
        jobs differ in their numbers of examples.
    """
    if any(len(job.examples) == 0 for job in jobs):
        raise ValueError("cannot train on a client without examples")
    for members in _alike(jobs):
        alike = [jobs[index] for index in members]
        for group, rows in _train_alike(task, alike, trained, memory_limit, steady):
            yield [members[index] for index in group], rows


def _train_alike(
    task: Task,
    jobs: Sequence[Job],
    trained: Callable[[str], bool],
    memory_limit: int,
    steady: bool,
) -> Iterator[tuple[list[int], Params]]:
    apart = why_apart(task, jobs) is not None
    others = [*range(len(jobs))]
    network = dense.network(task, jobs[0]) if (steady or len(jobs) > 1) and not apart else None
    if network is not None:
        fit = [network.takes(job) for job in jobs]
        own, others = [i for i in others if fit[i]], [i for i in others if not fit[i]]
        size = network.together(memory_limit)
        for start in range(0, len(own), size):
            group = own[start : start + size]
            yield group, network.minimise([jobs[index] for index in group], trained)
    for part in _groups(task, [jobs[index] for index in others], memory_limit, steady=steady):
        group = [others[index] for index in part]
        chosen = [jobs[index] for index in group]
        if apart or (len(chosen) == 1 and not steady):
            (job,) = chosen
            model = train(
                task,
                job.params,
                job.examples,
                job.training,
                trained=trained,
                terms=job.terms,
                generator=job.generator,
            )
            # Copies, as what was not trained may be the job's own.
            yield group, {name: p.clone().unsqueeze(0) for name, p in model.items()}
        else:
            like = chosen[0].params
            rows = Stack(task, chosen, trained).minimise()
            yield group, {n: w.to(like[n].device, like[n].dtype) for n, w in rows.items()}


def unstacked(rows: Mapping[str, Tensor], jobs: Sequence[Job]) -> list[Params]:
    """Each job's whole model: its row, and its own parameters where there are no rows."""
    each = {name: [p.contiguous() for p in part.unbind()] for name, part in rows.items()}
    return [
        {name: each[name][row] if name in each else p for name, p in job.params.items()}
        for row, job in enumerate(jobs)
    ]


def groups(task: Task, jobs: Sequence[Job], memory_limit: int = MEMORY_LIMIT) -> list[list[int]]:
    """Which jobs are best trained together: their indices, the longest first in each group.

    All of a group have examples of one shape and type. A batch narrows as its jobs end, so those
    that would outlast all others are groups of one. Of equally long ones those with as many
    examples are neighbours, so that less is padded.
    """
    return [
        [members[index] for index in group]
        for members in _alike(jobs)
        for group in _groups(task, [jobs[index] for index in members], memory_limit)
    ]


def _alike(jobs: Sequence[Job]) -> list[list[int]]:
    """Jobs whose examples have one shape and type."""
    alike = defaultdict(list)
    for index, job in enumerate(jobs):
        alike[_example_of(job.examples)].append(index)
    return [*alike.values()]


def _example_of(examples: Examples) -> tuple[torch.Size, torch.dtype, torch.Size, torch.dtype]:
    """Shape and type of one example, of its features and its target."""
    features, targets = examples.features, examples.targets
    return features.shape[1:], features.dtype, targets.shape[1:], targets.dtype


def _groups(
    task: Task, jobs: Sequence[Job], memory_limit: int, *, steady: bool = False
) -> list[list[int]]:
    """As `groups`, for jobs that are alike; if ``steady``, none changes how others are padded."""

    def kind(index: int) -> tuple[int, bool]:
        examples = jobs[index].examples
        return -len(examples), steady and _IGNORED in examples.targets

    order = sorted(range(len(jobs)), key=lambda i: (-_steps(jobs[i]), *kind(i)))
    steps = [_steps(jobs[i]) for i in order]
    lonely = len(jobs)
    if (steady or len(jobs) > 1) and jobs and why_apart(task, jobs) is None:
        fewest = 0 if steady else _form_for(task, jobs[0]).fewest
        worth = (i for i in range(len(jobs)) if sum(steps[i:]) >= fewest * max(steps[i], 1))
        lonely = next(worth, len(jobs))
    chosen = [[index] for index in order[:lonely]]
    of_one_kind = groupby(order[lonely:], kind if steady else lambda index: None)
    for left in ([*members] for _, members in of_one_kind):
        while left:
            size = together(task, jobs[left[0]], memory_limit)
            chosen.append(left[:size])
            left = left[size:]
    return chosen


def why_apart(task: Task, jobs: Sequence[Job]) -> str | None:
    """Why these jobs are better trained one by one; None if they are not."""
    if any(job.training.tolerance for job in jobs):
        return "exact minimisers are found one by one"
    if any(type(term) not in (Proximal, Linear) for job in jobs for term in job.terms):
        return "a term other than Proximal and Linear"
    targets = jobs[0].examples.targets
    reason = _why_unlike(_kind(task, jobs[0]), task.loss, targets.shape[1:], targets.dtype)
    if reason is not None:
        _say_once(reason)
    return reason


class Kind(NamedTuple):
    """All that the form of K models depends on."""

    build: Callable[[], nn.Module]
    device: torch.device
    shape: torch.Size
    dtype: torch.dtype
    parameters: Sizes


def _kind(task: Task, job: Job) -> Kind:
    features, device = job.examples.features, task.torch_device()
    return Kind(task.model, device, features.shape[1:], features.dtype, sizes(job.params))


@lru_cache(maxsize=64)
def _why_unlike(
    kind: Kind, loss: Callable[..., Tensor], shape: torch.Size, dtype: torch.dtype
) -> str | None:
    """What keeps models of this kind from training in a batch, with targets of this shape."""
    for module in kind.build().modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return "batch normalisation changes the model while it is evaluated"
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return "dropout draws other numbers in a batch of models"
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return "padding of embeddings"
        if isinstance(module, nn.RNNBase):
            return "recurrent layers have no batched form"
    return _trial(kind, loss, shape, dtype)


def _trial(
    kind: Kind, loss: Callable[..., Tensor], shape: torch.Size, dtype: torch.dtype
) -> str | None:
    """Why two short trainings in a batch are not what `train` makes of them; None if they are."""
    task = Task(model=kind.build, data=_no_data, loss=loss, device=str(kind.device))
    training = LocalTraining(steps=2, batch_size=3)

    def jobs() -> Iterator[Job]:
        for count in (3, 2):
            random = torch.Generator().manual_seed(count)
            features = torch.randint(
                256 if kind.dtype == torch.uint8 else 2, (count, *kind.shape), generator=random
            ).to(kind.dtype)
            if kind.dtype.is_floating_point:
                features.normal_(generator=random)
            yield Job(
                params=task.initial_params(count),
                examples=Examples(
                    features, torch.randint(2, (count, *shape), generator=random).to(dtype)
                ),
                training=training,
                generator=random,
            )

    with torch.random.fork_rng(devices=[]):
        try:
            both = [*jobs()]
            ours = unstacked(Stack(task, both, lambda name: True).minimise(), both)
            theirs = [
                train(task, job.params, job.examples, training, generator=job.generator)
                for job in jobs()
            ]
        except Exception as error:  # whatever a model or a loss makes of a batch
            return f"two in a batch end with {error!r}"
    for one, other, job in zip(ours, theirs, jobs(), strict=True):
        for name, p in other.items():
            moved = (p - job.params[name]).double().abs().max()
            if not moved.isfinite():
                return f"random examples do not show what a batch makes of {name}"
            if float((one[name].to(p) - p).double().abs().max()) > 1e-3 * float(moved) + 1e-6:
                return f"two in a batch do not make the same {name}"
    return None


def _no_data(client: int) -> ClientData:
    raise NotImplementedError


@lru_cache(maxsize=64)
def _say_once(reason: str) -> None:
    log.info("local trainings run one by one: %s", reason)


def _form_for(task: Task, job: Job) -> StackedModel | MappedModel:
    return _form(_kind(task, job))


@lru_cache(maxsize=64)
def _form(kind: Kind) -> StackedModel | MappedModel:
    """How K models of this kind are computed at once."""

    def model() -> nn.Module:
        return kind.build().to(kind.device).train()

    try:
        return StackedModel(model(), torch.zeros(kind.shape, dtype=kind.dtype, device=kind.device))
    except NotStackable as reason:
        fresh = model()  # tracing may have left something in the other
        log.info("local trainings of %s go through vmap: %s", type(fresh).__name__, reason)
        return MappedModel(fresh)


def together(task: Task, job: Job, memory_limit: int) -> int:
    """How many jobs like this one fit into ``memory_limit`` bytes; at least one."""
    numbers = sum(p.numel() for p in job.params.values())
    features = job.examples.features
    batch = min(job.training.batch_size, len(features))
    activations = batch * _activations(task.model, features.shape[1:], features.dtype)
    most = _TOGETHER_ELSEWHERE
    if task.torch_device().type == "cpu":
        most = max(_LEAST_TOGETHER, _CACHE // (4 * (numbers + activations)))
    # Weights, their gradient, velocity, terms and SAM's second point; what layers keep for their
    # backward pass, and its own.
    needed = 4 * (8 * numbers + features.numel() + 3 * activations)
    return int(max(1, min(most, memory_limit // needed)))


@lru_cache(maxsize=64)
def _activations(build: Callable[[], nn.Module], shape: torch.Size, dtype: torch.dtype) -> int:
    """Numbers that the layers put out for one example, and the example's own."""
    count = 2 * math.prod(shape)

    def add(module: nn.Module, inputs: object, output: object) -> None:
        nonlocal count
        count += output.numel() if isinstance(output, Tensor) else 0

    model = build()
    for module in model.modules():
        module.register_forward_hook(add)
    with torch.no_grad():
        model(torch.zeros((2, *shape), dtype=dtype))  # one alone may be too few
    return count // 2


def _steps(job: Job) -> int:
    return job.training.num_steps(len(job.examples))


class Stack:
    """A batch of jobs, sorted from the longest to the shortest.

    ``weights`` are the trained parameters by name, each with a first dimension of jobs.
    """

    def __init__(self, task: Task, jobs: Sequence[Job], trained: Callable[[str], bool]) -> None:
        if any(len(job.examples) == 0 for job in jobs):
            raise ValueError("cannot train on a client without examples")
        self.task, self.jobs = task, jobs
        self.device = task.torch_device()
        self.form = _form_for(task, jobs[0])
        self.names = [name for name in self.form.parameters if trained(name)]
        if not self.names:
            raise ValueError("trained selects no parameter of the model")
        every = {
            name: self.form.stack([job.params[name] for job in jobs]).detach().to(self.device)
            for name in jobs[0].params
        }
        self.weights = {name: every.pop(name) for name in self.names}
        self.dtype = self.weights[self.names[0]].dtype
        self.rest = every
        self.batches = Batches(jobs, self.device)
        self._shape: tuple[Sequence[int], bool] | None = None
        # Whether each example counts the same, at the usual loss.
        self.classifies = task.loss is cross_entropy and not any(
            _IGNORED in job.examples.targets for job in jobs
        )

    def minimise(self) -> Params:
        """SGD with momentum, or SAM, on every job to its own end; ``weights`` afterwards."""
        rate, momentum, radius = (
            self._numbers([getattr(job.training, name) for job in self.jobs])
            for name in ("learning_rate", "momentum", "sam_radius")
        )
        terms = self.terms()
        if not terms and not momentum.any() and not radius.any():
            return self._descend(rate)
        velocity = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        for x, y, counts in self.batches:
            active = len(x)
            now, rest = first(self.weights, active), first(self.rest, active)
            point = now
            if radius.any():
                climb = self.slope(now, rest, x, y, counts, terms)
                norm = _norms(climb)
                scale = torch.where(norm > 0, radius[:active] / norm, 0.0)
                point = {n: torch.addcmul(w, climb[n], along(scale, w)) for n, w in now.items()}
            own = first(velocity, active)
            for v in own.values():
                v.mul_(along(momentum[:active], v))
            self._send(point, rest, x, y, counts, {n: Target(v, keep=1.0) for n, v in own.items()})
            add_terms(own, terms, point)
            for name, w in now.items():
                w.addcmul_(own[name], along(rate[:active], w), value=-1.0)
        return self.weights

    def _descend(self, rate: Tensor) -> Params:
        """Plain SGD: the backward pass moves the weights; no gradient is ever written."""
        for x, y, counts in self.batches:
            active = len(x)
            now, rest = first(self.weights, active), first(self.rest, active)
            targets = {name: Target(w, keep=1.0, factor=-1.0) for name, w in now.items()}
            self._send(now, rest, x, y, counts, targets, rate[:active])
        return self.weights

    def slope(
        self,
        point: Params,
        rest: Params,
        x: Tensor,
        y: Tensor,
        counts: Sequence[int],
        terms: Mapping[str, tuple[Tensor, Tensor]],
    ) -> Params:
        """Each job's gradient of its loss and ``terms`` at ``point``; see `Batches`, `terms`."""
        found = {name: torch.empty_like(w) for name, w in point.items()}
        self._send(point, rest, x, y, counts, {name: Target(g) for name, g in found.items()})
        add_terms(found, terms, point)
        return found

    def _send(
        self,
        point: Params,
        rest: Params,
        x: Tensor,
        y: Tensor,
        counts: Sequence[int],
        targets: Mapping[str, Target],
        factors: Tensor | None = None,
    ) -> None:
        """Each job's gradient of its loss, times its factor, to ``targets``."""
        loss = self._loss(y, counts, factors)
        self.form.gradient({**rest, **point}, spared(self.task, x, batched=2), loss, targets)

    def _loss(self, y: Tensor, counts: Sequence[int], factors: Tensor | None) -> Loss:
        """Sum over jobs of factor · loss on the first ``counts`` examples."""
        if self._shape != (counts, factors is None):  # few batches differ in shape from the last
            self._shape = (counts, factors is None)
            self._real, self._share = self._shares(counts, factors)
        real, share, loss = self._real, self._share, self.task.loss

        def summed(outputs: Tensor) -> Tensor:
            if self.classifies and outputs.dim() == 3:
                each = cross_entropy(outputs.flatten(0, 1), y.flatten(0, 1), reduction="none")
                return torch.dot(each, share.flatten())
            scale = share.sum(dim=1)
            if self.task.compares_examples:
                return torch.dot(vmap(loss)(outputs, y, real), scale)
            total = scale.new_zeros(())
            for count in set(counts):  # a mean over examples or not: no loss ever sees padding
                rows = [row for row, own in enumerate(counts) if own == count]
                own = vmap(loss)(outputs[rows, :count], y[rows, :count])
                total = total + torch.dot(own, scale[rows])
            return total

        return summed

    def _numbers(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=self.dtype, device=self.device)

    def _shares(self, counts: Sequence[int], factors: Tensor | None) -> tuple[Tensor, Tensor]:
        """Which places of each mini-batch hold examples, and what each of them counts."""
        number = self._numbers(counts).unsqueeze(1)
        real = torch.arange(max(counts), device=self.device) < number
        share = real / number
        return real, share if factors is None else share * factors.unsqueeze(1)

    def terms(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The gradient of all terms of a job is slope · w + offset, name by name."""
        if not any(job.objective for job in self.jobs):
            return {}
        slopes = torch.zeros(len(self.jobs), dtype=self.dtype, device=self.device)
        offsets = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        for row, job in enumerate(self.jobs):
            for slope, scale, vector in affine(job.objective):
                slopes[row] += slope
                for name, offset in offsets.items():
                    offset[row].add_(vector[name].to(self.device), alpha=scale)
        return {name: (slopes, offset) for name, offset in offsets.items()}


def first(params: Mapping[str, Tensor], active: int) -> Params:
    """Of the first ``active`` jobs only: views."""
    return {name: p[:active] for name, p in params.items()}


def along(values: Tensor, like: Tensor) -> Tensor:
    """One value a job, in a shape that multiplies ``like``."""
    return values.to(like.dtype).view(-1, *(1 for _ in like.shape[1:]))


def add_terms(
    slopes: Params, terms: Mapping[str, tuple[Tensor, Tensor]], point: Mapping[str, Tensor]
) -> None:
    """The gradient of ``terms`` (see `Stack.terms`) at ``point``, on top of ``slopes``."""
    for name, (factor, offset) in terms.items():
        active = len(point[name])
        slopes[name].addcmul_(along(factor[:active], point[name]), point[name])
        slopes[name].add_(offset[:active])


def _norms(params: Mapping[str, Tensor]) -> Tensor:
    """L2 norm of each job over all its parameters."""
    squares = [p.flatten(1).square().sum(dim=1) for p in params.values()]
    return torch.stack(squares).sum(dim=0).sqrt()


class Batches:
    """The mini-batches of all jobs, step by step, in each job's own order.

    Yields (features, targets, counts): of shape (jobs that still train, batch, …), and how many
    examples of each mini-batch are real; the rest is padding.
    """

    def __init__(self, jobs: Sequence[Job], device: torch.device) -> None:
        self.jobs, self.device = jobs, device
        self.alike = len({(len(job.examples), job.training.batch_size) for job in jobs}) == 1

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
        return self._epochs() if self.alike else self._gathered()

    def _epochs(self) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
        """Clients of one size: an epoch's examples are copied in order, and cut into batches."""
        count, size = len(self.jobs[0].examples), self.jobs[0].training.batch_size
        steps = torch.tensor([_steps(job) for job in self.jobs])
        per_epoch = math.ceil(count / size)
        for step in range(int(steps[0])):
            active, start = int((steps > step).sum()), step % per_epoch * size
            if start == 0:
                orders = [torch.randperm(count, generator=j.generator) for j in self.jobs[:active]]
                if step == 0 or per_epoch > 1:  # a batch of all examples may keep its order
                    features = self._ordered("features", orders)
                    targets = self._ordered("targets", orders)
            x = features[:active, start : start + size]
            yield x, targets[:active, start : start + size], [x.shape[1]] * active

    def _ordered(self, part: str, orders: Sequence[Tensor]) -> Tensor:
        own = [getattr(job.examples, part).to(self.device) for job in self.jobs[: len(orders)]]
        copied: Tensor = own[0].new_empty((len(own), *own[0].shape))
        for data, order, place in zip(own, orders, copied, strict=True):
            torch.index_select(data.detach(), 0, order.to(self.device), out=place)
        return copied

    def _gathered(self) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
        """Clients of any size: every mini-batch is gathered and padded."""
        jobs = self.jobs
        longest = max(len(job.examples) for job in jobs)
        width = min(longest, max(job.training.batch_size for job in jobs))
        features, targets = (self._padded(part, longest) for part in ("features", "targets"))
        rows = torch.zeros((_steps(jobs[0]), len(jobs), width), dtype=torch.long)
        every: list[list[int]] = [[] for _ in range(_steps(jobs[0]))]
        for index, job in enumerate(jobs):
            drawn = batch_rows(len(job.examples), job.training, job.generator)
            for step, chosen in enumerate(drawn):
                rows[step, index] = chosen[0]  # padding is a member of its batch
                rows[step, index, : len(chosen)] = chosen
                every[step].append(len(chosen))
        number = torch.arange(len(jobs), device=self.device).unsqueeze(1)
        for chosen, counts in zip(rows.to(self.device), every, strict=True):
            active, most = len(counts), max(counts)
            where = number[:active], chosen[:active, :most]
            yield features[where], targets[where], counts

    def _padded(self, part: str, longest: int) -> Tensor:
        like: Tensor = getattr(self.jobs[0].examples, part)
        padded = like.new_zeros((len(self.jobs), longest, *like.shape[1:]), device=self.device)
        for job, place in zip(self.jobs, padded, strict=True):
            place[: len(job.examples)] = getattr(job.examples, part).detach()
        return padded


def evaluate_many(
    task: Task,
    models: Sequence[Mapping[str, Tensor]],
    examples: Sequence[Examples],
    *,
    memory_limit: int = MEMORY_LIMIT,
) -> list[dict[str, float]]:
    """What `evaluate` returns for each model on its own examples.

    Examples of one form, of clients that share one model (the same object), go through it together,
    as many as fit into ``memory_limit`` bytes, if it looks at each example alone.
    """
    sharing = defaultdict(list)
    for index, (model, data) in enumerate(zip(models, examples, strict=True)):
        sharing[id(model), _example_of(data)].append(index)
    scores: dict[int, dict[str, float]] = {}
    for (_, (shape, dtype, *_)), members in sharing.items():
        if not _looks_at_each_alone(task.model, shape, dtype):
            scores |= {i: evaluate(task, models[i], examples[i]) for i in members}
            continue
        for part in _portions(
            members, [examples[i].features.nbytes for i in members], memory_limit
        ):
            own = [examples[index] for index in part]
            outputs = predict(task, models[part[0]], torch.cat([one.features for one in own]))
            each = torch.split(outputs, [len(one) for one in own])
            for index, one, output in zip(part, own, each, strict=True):
                scores[index] = score(task, output, one.targets.to(output.device))
    return [scores[index] for index in range(len(models))]


@lru_cache(maxsize=64)
def _looks_at_each_alone(
    build: Callable[[], nn.Module], shape: torch.Size, dtype: torch.dtype
) -> bool:
    """Whether in evaluation such a model puts out a row an example, whatever the others are."""
    random = torch.Generator().manual_seed(0)
    x = torch.randint(2, (3, *shape), generator=random).to(dtype)
    if dtype.is_floating_point:
        x.normal_(generator=random)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            model = build().eval()
            together, each = model(x.clone()), [model(x[i : i + 1].clone()) for i in range(3)]
            return len(together) == 3 and torch.allclose(torch.cat(each), together, 1e-3, 1e-4)
        except Exception:  # whatever a model makes of random examples
            return False


def _portions(members: Sequence[int], sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Members in order, in lists whose sizes add up to at most ``limit`` (or of one member)."""
    portion: list[int] = []
    total = 0
    for member, size in zip(members, sizes, strict=True):
        if portion and total + size > limit:
            yield portion
            portion, total = [], 0
        portion.append(member)
        total += size
    if portion:
        yield portion
