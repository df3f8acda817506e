"""The sum of clipped gradients of single examples, by the fastest method that a model allows.

The inputs and outputs of every layer give the norm of each example's gradient, and the sum of the
clipped ones, in one pass (`one_pass`). Examples pass in small groups that stay in the caches. Where
a model might mix examples, each example's gradient is found by vmap, or in a loop.

Libraries choose their kernels by the number of rows, so an example's gradient would be rounded
differently if another example joined the pass. A ReLU at its kink turns such a difference in the
last bit into a whole gradient. All passes therefore have one public width, and copies fill the last
pass up. Where a trial finds that an example's bits depend on the others even so, examples pass one
by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, reduce
from logging import ERROR, WARNING, getLogger

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.training.dp.one_pass import OnePass
from flower_ext.training.dp.per_example import GradientRows, Parts, is_known
from flower_ext.training.isolation import attempted
from flower_ext.training.params import Params, clone
from flower_ext.training.seeding import seeded
from flower_ext.training.task import Task
from flower_ext.training.trials.batch_invariance import BatchInvarianceTrial
from flower_ext.training.trials.single_examples import (
    Loss,
    gradient_alone,
    loss_alone,
    model_of_single_examples,
    require_single_examples,
)
from flower_ext.training.trials.trial_examples import kind_of

log = getLogger("flwr")

_TOGETHER, _FEWEST = 64, 4
"""Most and fewest examples that pass together if each example's gradient is stored.

Libraries have other kernels for one, two and three rows.
"""
_MOST_DENSE, _OF_EIGHT = 1024, 8
"""Most examples that pass together if no gradient is stored; they pass in multiples of eight."""
_MARGIN = 1.0 - 1e-5
"""Room for the rounding of norms, whose shortest sums are in single precision."""


class Way(StrEnum):
    """Ways to find the gradients of single examples, the fastest first."""

    IN_ONE_PASS = "in one pass"
    BY_VMAP = "by vmap"
    ONE_BY_ONE = "one by one"


class ClippedGradient:
    """Sum over examples of their gradients, each clipped to ``clipping_norm``, in float64.

    An example's gradient is that of its own loss, as if there were no others. A gradient that is
    not finite, or an example whose loss raises, counts as zero: an error would reveal something
    about that record.

    Parameters
    ----------
    names : list of str
        The trained parameters; the norm is taken over all of them together.
    clipping_norm : float
    batch_size : float
        The usual number of examples of a call. It must be public, because it sets how many
        examples pass together.

    Raises
    ------
    ValueError
        The loss compares examples, or the model has batch normalisation. On a call: the model or
        the loss keeps something between examples, features have another type than the model's
        numbers, or the model learns from no random example by itself (see
        `require_single_examples`).
    """

    def __init__(
        self,
        task: Task,
        names: list[str],
        *,
        clipping_norm: float,
        batch_size: float = _TOGETHER,
    ) -> None:
        if task.compares_examples:
            raise InvalidValue(
                "the loss compares examples, so no example has a gradient of its own to clip: "
                "DP-SGD needs a loss that is a mean over examples"
            )
        self.task, self.names, self.clipping_norm = task, names, clipping_norm
        self.model = model_of_single_examples(task, names)
        self.params = {n: p for n, p in self.model.state_dict().items() if n in task.shapes}
        layers = {name.rpartition(".")[0] for name in names}
        self.layers = {name: self.model.get_submodule(name) for name in layers}
        self.way: Way | None = None
        """The way to find gradients; None until there are examples (see `_chosen_way`)."""
        self._one_pass = OnePass(self.model, names, self.layers)
        self._results: _TrialResults | None = None
        self._logged: set[int] = set()
        holders = [
            m for m in self.model.modules() if next(m.parameters(recurse=False), None) is not None
        ]
        written = any(type(layer) is not nn.Linear for layer in holders)
        self._widest = _width(batch_size, written=written)
        self._narrow = _width(batch_size, written=True)

    def __call__(self, params: Mapping[str, Tensor], features: Tree, targets: Tree) -> Params:
        """Return the sum at ``params`` (the whole model) over the examples; zero without any."""
        summed = {name: torch.zeros_like(params[name], dtype=torch.float64) for name in self.names}
        for name, parameter in self.params.items():
            parameter.copy_(params[name])
        # Only the first training of a process runs trials, so their draws must not change its own.
        with self._seeded(0):
            self._prepare(features, targets)
        if trees.length(features) == 0:
            return summed
        any_valid = False
        for x, y in trees.split((features, targets), self.width):
            parts, valid = self._gradients(x, y)
            if parts:
                self._add(summed, parts, valid)
                any_valid = any_valid or bool(valid.any())
        if not any_valid:
            self._log_once(ERROR, "the loss raises for every example: check the task and the data")
        return summed

    @property
    def width(self) -> int:
        """The number of examples of each pass, the same for every batch."""
        if self.way == Way.IN_ONE_PASS:
            return self._widest
        return 1 if self.way == Way.ONE_BY_ONE else self._narrow

    def _add(self, summed: Params, parts: Parts, valid: Tensor) -> None:
        """Add the clipped gradients of the examples that pass without an error and are finite."""
        # One norm over all parameters: a bound for each layer alone would allow a longer gradient.
        norms = reduce(torch.add, [part.squares() for part in parts.values()]).sqrt()
        factors = (self.clipping_norm * _MARGIN / norms.clamp_min(1e-30)).clamp_max(1.0)
        factors = factors.where(valid, 0.0)
        # A factor of zero is not enough for these: 0 · NaN is NaN.
        if not bool((finite := norms.isfinite()).all()):
            parts = {name: part.only(finite) for name, part in parts.items()}
            factors = factors.where(finite, 0.0)
        for name, part in parts.items():
            summed[name] += part.total(factors).view_as(summed[name])

    def _gradients(self, x: Tree, y: Tree) -> tuple[Parts, Tensor]:
        """Return gradients of up to `width` examples, and a mask of those that have one.

        If no example has one, there are no gradients.
        """
        count, device = trees.length(x), trees.first(x).device
        seed, valid = _seed(), torch.ones(count, dtype=torch.bool, device=device)
        parts = self._try_pass(x, y, seed)
        if parts is None:
            # One example's error ends the whole pass: find that example, so that the others count.
            valid = torch.tensor(self._pass_alone(x, y, seed), device=device)
            # A stand-in keeps the places, and with them the random draws, of all other examples.
            rows = torch.arange(count, device=device)
            x, y = trees.rows((x, y), rows.where(valid, valid.int().argmax()))
            parts = self._try_pass(x, y, seed)
        return parts or {}, functional.pad(valid, (0, self.width - count))

    def _pass_alone(self, x: Tree, y: Tree, seed: int) -> list[bool]:
        """Return for each example True if it passes without an error."""
        if self._try_pass(x, y, seed) is not None:
            return [True] * trees.length(x)
        if trees.length(x) == 1:
            self._log_once(WARNING, "an example's loss raises an error, so it counts as zero")
            return [False]
        halves = trees.split((x, y), -(-trees.length(x) // 2))
        return [valid for x, y in halves for valid in self._pass_alone(x, y, seed)]

    def _try_pass(self, x: Tree, y: Tree, seed: int) -> Parts | None:
        """Return gradients of examples that pass together; None if the pass raises."""
        more = self.width - trees.length(x)

        def widened(leaf: Tensor) -> Tensor:  # a copy, into which the model may write
            return torch.cat([leaf, leaf[:1].expand(more, *leaf.shape[1:])])

        x, y = trees.mapped(widened, (x, y))
        follow = self._one_pass if self.way == Way.IN_ONE_PASS else self._by_vmap
        if self.way == Way.ONE_BY_ONE:
            follow = self._alone
        with self._seeded(seed):
            parts = attempted(follow, x, y, self.task.loss)
        if isinstance(parts, Exception):
            log.debug("a pass raises", exc_info=parts)
            return None
        return parts

    def _seeded(self, seed: int) -> AbstractContextManager[None]:
        """Let random draws, as of dropout, depend on an example's place alone."""
        return seeded(seed, devices=self.task.torch_device().type != "cpu")

    def _prepare(self, features: Tree, targets: Tree) -> None:
        """Refuse a model that keeps something, or learns from no example; choose the way."""
        if self._results is None:
            kind = kind_of(self.task, features, targets, self.params)
            self._results = _trial_results(
                kind, tuple(self.names), self._widest, torch.get_num_threads()
            )
        results = self._results
        if not results.learns_singly:
            require_single_examples(self.task, self.names, features, targets)
            results.learns_singly = True
        if self.way is None and trees.length(features):
            if results.way is None:
                results.way = self._chosen_way(features, targets)
                results.last = self._one_pass.last
                log.info("gradients of single examples are found %s", results.way)
            self.way, self._one_pass.last = results.way, results.last

    def _chosen_way(self, features: Tree, targets: Tree) -> Way:
        """Choose the fastest way that trials allow; their random examples are nobody's data.

        One pass finds every example's own gradient, unless a layer treats patches or times as rows,
        a layer is used twice, or examples mix; or operations depend on values (`watched`). Neither
        in one pass nor under vmap may the bits of an example depend on its place or on the others.
        """
        trial = BatchInvarianceTrial(self.model, self.params, self.names)
        example = features, targets, self.task.loss
        widest = self._one_pass, self._widest
        if (
            all(map(is_known, self.layers.values()))
            and _holds(self._one_pass.prepare, features, self._widest)
            and _holds(trial.finds_own_gradients, *example, *widest)
            and _holds(trial.is_batch_invariant, *example, *widest)
        ):
            return Way.IN_ONE_PASS
        by_vmap = _holds(trial.is_batch_invariant, *example, self._by_vmap, self._narrow)
        return Way.BY_VMAP if by_vmap else Way.ONE_BY_ONE

    def _by_vmap(self, x: Tree, y: Tree, loss: Loss) -> Parts:
        """Return every example's own gradient, for any model that vmap follows."""
        chosen = {name: self.params[name] for name in self.names}
        buffers = {n: self.params.get(n, b) for n, b in self.model.named_buffers()}
        point = {**self.params, **clone(buffers)}

        def alone(chosen: Params, x: Tree, y: Tree) -> Tensor:
            return loss_alone(self.model, {**point, **chosen}, loss, x, y)

        gradients = vmap(grad(alone), in_dims=(None, 0, 0), randomness="different")(chosen, x, y)
        return {name: GradientRows(gradient) for name, gradient in gradients.items()}

    def _alone(self, x: Tree, y: Tree, loss: Loss) -> Parts:
        """Return the gradient of a pass of one example, for any model."""
        (pair,) = trees.each((x, y))
        gradient = gradient_alone(self.model, self.params, self.names, loss, *pair)
        return {name: GradientRows(part.unsqueeze(0)) for name, part in gradient.items()}

    def _log_once(self, level: int, message: str) -> None:
        """Log a message once, on the client's own machine; the server learns nothing of it."""
        if level not in self._logged:
            self._logged.add(level)
            log.log(level, message)


@dataclass
class _TrialResults:
    """Results of trials of models of one kind."""

    learns_singly: bool = False
    way: Way | None = None
    last: Tree | None = None


@lru_cache(maxsize=64)
def _trial_results(*kind: Hashable) -> _TrialResults:
    return _TrialResults()


def _holds(check: Callable[..., bool], *arguments: object) -> bool:
    """Return the result of ``check``; False if the model raises."""
    try:
        return check(*arguments)
    except Exception:  # a model may raise anything for random examples
        log.debug("%s raises", check.__name__, exc_info=True)
        return False


def _seed() -> int:
    return int(torch.randint(2**62, (1,)))


def _width(batch_size: float, *, written: bool) -> int:
    """Return how many examples pass together, from the public number that a batch usually has."""
    if written:  # each row costs: two passes or three waste less than one with room for all
        half = math.ceil(min(batch_size, 2 * _TOGETHER) / 2)
        return max(_FEWEST, 1 << (half - 1).bit_length())
    usual = batch_size + 3 * math.sqrt(batch_size)  # a Poisson batch is rarely larger
    passes = math.ceil(usual / _MOST_DENSE)
    return _OF_EIGHT * math.ceil(usual / passes / _OF_EIGHT)
