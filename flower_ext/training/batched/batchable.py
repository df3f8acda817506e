"""Decide which models train in a batch as they do alone: known obstacles, and trials.

`why_apart` finds out whether a batch gives a model the same result, up to rounding, and
`trains_alike` whether the form of a plug-in does. `depends_on_batch` finds out whether the result
is the same to the last bit, whichever models train beside it. Libraries choose kernels by the shape
of a batch, and unstable training amplifies a difference in the last bit without limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from logging import getLogger
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flower_ext.data import ClientData, Examples
from flower_ext.errors import InvalidValue
from flower_ext.training.batched.descent import Kind, Stack, kind_of, models_for, unstacked
from flower_ext.training.batched.form import MEMORY_LIMIT, OfferedForm
from flower_ext.training.batched.unfused import faster_alone
from flower_ext.training.local import SGD, Job, LocalTraining, train_job
from flower_ext.training.model_calls import refusing_layer
from flower_ext.training.model_factory import in_training
from flower_ext.training.objective import Linear, Proximal
from flower_ext.training.params import Params, clone, shaken
from flower_ext.training.rounding import products_are_reproducible
from flower_ext.training.survival import cox_loss
from flower_ext.training.task import Task
from flower_ext.training.trials.snapshots import leaves_attributes_unchanged

log = getLogger("flwr")

_INVARIANT_LOSSES = (cross_entropy, cox_loss)
"""Losses that were measured, on CPUs, to round a model's outputs alike in every batch."""
MOST_ROWS = 256
"""Largest mini-batch of models in an invariant batch. Above it batches of models gain little, and
`depends_on_batch` would take longer than the trainings."""
FEWEST_INVARIANT = 4
"""Smallest batch in which no model depends on the others; see `with_copies`."""
_TRIED: Sequence[Sequence[int]] = (
    range(18),
    range(17, -1, -1),
    [*range(5, 18), *range(5)],
    range(8, 18),
    range(8),
    range(3, 9),
    [0],
    [11],
)
"""The jobs that `depends_on_batch` trains together, in this order."""


def why_apart(task: Task, jobs: Sequence[Job], *, steady: bool = False) -> str | None:
    """Return why these jobs are better trained one by one; None if they are not.

    With ``steady`` the reason may also be that a model might round differently in some batch.
    """
    if reason := why_unusual(jobs):
        return reason
    reason = _why_unlike(_trial_of(task, jobs[0]))
    if reason is None and steady:
        if task.torch_device().type != "cpu":
            reason = "of this device nobody knows whether it rounds alike in every batch"
        elif not products_are_reproducible():
            reason = (
                "matrix products may round differently in every batch (MKL's reproducible mode is "
                "off: import flower_ext before anything multiplies matrices, or set MKL_CBWR=AUTO)"
            )
        elif task.loss not in _INVARIANT_LOSSES:
            reason = "of this loss nobody knows whether it rounds alike in every batch"
        elif not models_for(task, jobs[0]).batch_invariant:
            reason = "of this model not all is known to round alike in every batch"
    if reason is not None:
        _say_once(reason)
    return reason


def why_unusual(jobs: Sequence[Job]) -> str | None:
    """Return why these jobs must train one by one, whatever their model; None if they need not."""
    for part in ("features", "targets"):
        if not isinstance(getattr(jobs[0].examples, part), Tensor):
            return f"{part} are no single tensor"
    if any(job.training.tolerance for job in jobs):
        return "exact minimisers are found one by one"
    if any(job.training.optimizer != SGD for job in jobs):
        return "another optimiser than SGD"
    if any(type(term) not in (Proximal, Linear) for job in jobs for term in job.terms):
        return "a term other than Proximal and Linear"
    return None


class _Trial(NamedTuple):
    """Everything that determines random trainings like those of a job."""

    kind: Kind
    loss: Callable[..., Tensor]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def task(self) -> Task:
        """A task without data."""
        device = str(self.kind.device)
        return Task(model=self.kind.build, data=_no_data, loss=self.loss, device=device)

    def job(self, count: int, training: LocalTraining, seed: int) -> Job:
        """Return a job on ``count`` random examples."""
        random = torch.Generator().manual_seed(seed)
        most = 256 if self.kind.dtype == torch.uint8 else 2
        features = torch.randint(most, (count, *self.kind.shape), generator=random)
        features = features.to(self.kind.dtype)
        if features.is_floating_point():
            features.normal_(generator=random)
        targets = torch.randint(2, (count, *self.shape), generator=random).to(self.dtype)
        return Job(
            params=self.task.factory.like_initial(seed),
            examples=Examples(features, targets),
            training=training,
            generator=random,
        )


def _trial_of(task: Task, job: Job) -> _Trial:
    targets = job.examples.targets
    return _Trial(kind_of(task, job), task.loss, targets.shape[1:], targets.dtype)


@lru_cache(maxsize=64)
def _why_unlike(trial: _Trial) -> str | None:
    """Return why models of this kind cannot train in a batch, with targets of this shape."""
    for module in in_training(trial.kind.build()).modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return "batch normalisation changes the model while it is evaluated"
        drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        if drops and (type(module) is not nn.Dropout or trial.kind.device.type != "cpu"):
            return f"{module} draws other numbers in a batch of models"
        if faster_alone(module, trial.kind.device):
            return f"on a CPU {module} is faster by itself"
    if layer := refusing_layer(trial.kind.build, trial.kind.shape, trial.kind.dtype):
        return f"{layer} refuses a mini-batch of a single row"
    return _why_other(trial, lambda jobs: Stack(trial.task, jobs, lambda name: True).minimise())


def trains_alike(task: Task, job: Job, form: OfferedForm) -> bool:
    """Return True if a plug-in's form trains models like that of ``job`` as `train` does.

    A trial decides, because the code of a model may do more than its layers show. A model that
    counts its passes, say, may act on the count long after the trial, so no model is taken whose
    attributes change in a pass.
    """
    return _trains_alike(_trial_of(task, job), form)


@lru_cache(maxsize=64)
def _trains_alike(trial: _Trial, form: OfferedForm) -> bool:
    def minimise(jobs: Sequence[Job]) -> Params:
        if [*form.groups(jobs, MEMORY_LIMIT)] != [[*range(len(jobs))]]:
            raise InvalidValue("the form does not take the random jobs of a trial")
        if not leaves_attributes_unchanged(
            in_training(trial.kind.build()), jobs[0].examples.features
        ):
            raise InvalidValue("a pass changes attributes of the model")
        return form.minimise(jobs, lambda name: True)

    return _why_other(trial, minimise) is None


def _why_other(trial: _Trial, minimise: Callable[[Sequence[Job]], Params]) -> str | None:
    """Return how two short trainings by ``minimise`` differ from `train`; None if they agree."""
    training = LocalTraining(steps=2, batch_size=3)

    def jobs() -> list[Job]:
        return [trial.job(count, training, seed=count) for count in (3, 2)]

    with torch.random.fork_rng(devices=[]):
        try:
            both = jobs()
            ours = unstacked(minimise(both), both)
            theirs = [train_job(trial.task, job) for job in jobs()]
        except Exception as error:  # a model or a loss may raise anything for a batch
            return f"two in a batch end with {error!r}"
    for one, other, job in zip(ours, theirs, jobs(), strict=True):
        for name, p in other.items():
            if not p.numel():
                continue
            moved = (p - job.params[name]).double().abs().max()
            if not moved.isfinite():
                return f"random examples do not show what a batch makes of {name}"
            if float((one[name].to(p) - p).double().abs().max()) > 1e-3 * float(moved) + 1e-6:
                return f"two in a batch do not make the same {name}"
    return None


def with_copies(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs with copies of the first: an even number, and at least four.

    Libraries use other kernels for a few models, and for some odd numbers of models.
    """
    count = max(FEWEST_INVARIANT, len(jobs) + len(jobs) % 2)
    return [*jobs, *(_copy(jobs[0]) for _ in range(count - len(jobs)))]


def _copy(job: Job) -> Job:
    """Return a copy of the job, which will draw the same batches."""
    generator = torch.Generator(job.generator.device)
    generator.set_state(job.generator.get_state())
    return replace(job, generator=generator)


def padded_rows(job: Job) -> int:
    """Return the number of rows to which an invariant batch pads the mini-batches of a job.

    Libraries choose kernels by this number, so it must follow from the job alone. A power of two
    lets jobs of nearly the same size share a batch.
    """
    longest = min(len(job.examples), job.training.batch_size)
    return min(job.training.batch_size, 1 << (longest - 1).bit_length())


def depends_on_batch(task: Task, job: Job) -> bool:
    """Train random models of the kind of ``job`` in several batches; True if any bit differs.

    Models, examples and order come from fixed seeds. The answer therefore depends on the kind of
    model, the padded size of its mini-batches, the machine and its number of threads, and on
    nobody's data otherwise. False is evidence, not proof. The process remembers the answer, which
    takes some 100 ms for a small model.
    """
    rows = padded_rows(job)
    if rows > MOST_ROWS:
        return True
    training = LocalTraining(
        steps=2,
        batch_size=rows,
        momentum=0.9 if job.training.momentum else 0.0,
        sam_radius=0.1 if job.training.sam_radius else 0.0,
    )
    several, threads = len(job.examples) > job.training.batch_size, torch.get_num_threads()
    return _differs(_trial_of(task, job), training, several, bool(job.objective), threads)


@lru_cache(maxsize=1024)
def _differs(
    trial: _Trial, training: LocalTraining, several: bool, terms: bool, threads: int
) -> bool:
    """Return True if a model of this kind depends on others.

    With ``several``, an epoch has more than one mini-batch, and these lie apart in memory.
    ``threads`` only keys the cache.
    """
    task, rows = trial.task, training.batch_size

    def job(number: int) -> Job:
        # The last mini-batch has every length, from a single example to one without padding.
        last = rows - number % 5 * (rows - 1) // 4
        made = trial.job(rows * several + last, training, seed=number)
        # Below a head that begins at zero all gradients vanish and would show nothing.
        params = shaken(made.params, made.generator)
        pull = [Proximal(weight=0.1, anchor=made.params)] if terms else []
        return replace(made, params=params, terms=pull)

    first: dict[int, Params] = {}
    for members in _TRIED:
        jobs = with_copies([job(number) for number in members])
        stack = Stack(task, jobs, lambda name: True, rows).minimise()
        for row, number in enumerate(members):
            model = {name: p[row] for name, p in stack.items()}
            before = first.setdefault(number, clone(model))
            if not all(torch.equal(p, before[name]) for name, p in model.items()):
                _say_once("a trial finds that a model depends on those beside it")
                return True
    return False


def _no_data(client: int) -> ClientData:
    raise NotImplementedError


@lru_cache(maxsize=64)
def _say_once(reason: str) -> None:
    log.info("local trainings run one by one: %s", reason)
