"""The sum of clipped gradients of single examples, in the fastest way that `passes` finds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import reduce
from logging import ERROR, WARNING, getLogger

import torch
from torch import Tensor
from torch.nn import functional

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.training.dp.passes import TOGETHER, GradientMethod, Passes
from flower_ext.training.index_limits import usable_rows
from flower_ext.training.isolation import attempted, seeded
from flower_ext.training.params import Params
from flower_ext.training.per_example import Parts
from flower_ext.training.task import Task

log = getLogger("flwr")

_MARGIN = 1.0 - 1e-5
"""Factor on the clipping norm. It covers rounding errors of norms, partly in single precision."""


class ClippedGradient:
    """Sum over examples of their gradients, each clipped to ``clipping_norm``, in float64.

    An example's gradient is the gradient of this example's loss, as if there were no other example.
    It counts as zero if it is not finite, or if the example's loss raises an error, because an
    error message would reveal something about that record.

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
        The constructor raises it if the loss compares examples, or if the model has batch
        normalisation. A call raises it in three cases. The model or the loss remembers an example.
        Features have another type than the model's numbers. Or the model cannot learn from one
        example alone (see `why_not_one_by_one`).
    """

    def __init__(
        self,
        task: Task,
        names: list[str],
        *,
        clipping_norm: float,
        batch_size: float = TOGETHER,
    ) -> None:
        if task.compares_examples:
            raise InvalidValue(
                "the loss compares examples, so no example has a gradient of its own to clip: "
                "DP-SGD needs a loss that is a mean over examples"
            )
        self.task, self.names, self.clipping_norm = task, names, clipping_norm
        self.passes = Passes(task, names, batch_size)
        self.way: GradientMethod | None = None
        """The way to find gradients, which the first call chooses."""
        self._logged: set[int] = set()

    def __call__(self, params: Mapping[str, Tensor], features: Tree, targets: Tree) -> Params:
        """Return the sum of the examples' clipped gradients at ``params``, which are a whole model.

        Without examples, the sum is 0.
        """
        summed = {name: torch.zeros_like(params[name], dtype=torch.float64) for name in self.names}
        for name, parameter in self.passes.params.items():
            parameter.copy_(params[name])
        # Only the first training of a process runs trials. Seed the generators, so that the trials'
        # draws do not change the draws of this training.
        with self._seeded(0):
            way = self.way = self.way or self.passes.fastest_way(features, targets)
        if trees.length(features) == 0:
            return summed
        any_valid = False
        for x, y in trees.split((features, targets), self.passes.width(way)):
            parts, valid = self._gradients(way, x, y)
            if parts:
                self._add(summed, parts, valid)
                any_valid = any_valid or bool(valid.any())
        if not any_valid:
            text = "the loss raises an error for every example: check the task and the data"
            self._log_once(ERROR, text)
        return summed

    def _add(self, summed: Params, parts: Parts, valid: Tensor) -> None:
        """Clip each ``valid`` example's gradient, and add it to ``summed`` if it is finite."""
        # One norm over all parameters: a bound for each layer alone would allow a longer gradient.
        norms = reduce(torch.add, [part.squares() for part in parts.values()]).sqrt()
        factors = (self.clipping_norm * _MARGIN / norms.clamp_min(1e-30)).clamp_max(1.0)
        factors = factors.where(valid, 0.0)
        # A factor of zero does not remove gradients that are not finite, because 0 · NaN is NaN.
        if not bool((finite := norms.isfinite()).all()):
            parts = {name: part.only(finite) for name, part in parts.items()}
            factors = factors.where(finite, 0.0)
        for name, part in parts.items():
            summed[name] += part.total(factors).view_as(summed[name])

    def _gradients(self, way: GradientMethod, x: Tree, y: Tree) -> tuple[Parts, Tensor]:
        """Return gradients of one pass, or none, and booleans: False if a loss raises an error."""
        count, device = trees.length(x), trees.first(x).device
        seed = int(torch.randint(2**62, (1,)))
        valid = torch.ones(count, dtype=torch.bool, device=device)
        if device.type != "cpu" and not (usable := usable_rows(self.task, x, y)).all():
            valid = usable.to(device)
            x, y = _with_stand_ins(x, y, valid)
        parts = self._try_pass(way, x, y, seed) if valid.any() else {}
        if parts is None:
            # One example's error ends the whole pass. Find that example, so that the others count.
            valid = valid & torch.tensor(self._pass_alone(way, x, y, seed), device=device)
            x, y = _with_stand_ins(x, y, valid)
            parts = self._try_pass(way, x, y, seed)
        return parts or {}, functional.pad(valid, (0, self.passes.width(way) - count))

    def _pass_alone(self, way: GradientMethod, x: Tree, y: Tree, seed: int) -> list[bool]:
        """Return one bool for each example: False if its loss raises an error."""
        if self._try_pass(way, x, y, seed) is not None:
            return [True] * trees.length(x)
        if trees.length(x) == 1:
            self._log_once(WARNING, "an example's loss raises an error, so it counts as zero")
            return [False]
        halves = trees.split((x, y), -(-trees.length(x) // 2))
        return [valid for x, y in halves for valid in self._pass_alone(way, x, y, seed)]

    def _try_pass(self, way: GradientMethod, x: Tree, y: Tree, seed: int) -> Parts | None:
        """Return the gradients from one pass over these examples; None if it raises an error."""
        more = self.passes.width(way) - trees.length(x)

        def widened(leaf: Tensor) -> Tensor:  # a copy, into which the model may write
            return torch.cat([leaf, leaf[:1].expand(more, *leaf.shape[1:])])

        with self._seeded(seed):
            parts = attempted(self.passes.gradients, way, *trees.mapped(widened, (x, y)))
        if isinstance(parts, Exception):
            log.debug("a pass of examples raises an error", exc_info=parts)
            return None
        return parts

    def _seeded(self, seed: int) -> AbstractContextManager[None]:
        """Make random draws, such as dropout, depend only on the seed and an example's place."""
        return seeded(seed, devices=self.task.torch_device().type != "cpu")

    def _log_once(self, level: int, message: str) -> None:
        """Log a message once, on the client's own machine. The server does not see it."""
        if level not in self._logged:
            self._logged.add(level)
            log.log(level, message)


def _with_stand_ins(x: Tree, y: Tree, valid: Tensor) -> tuple[Tree, Tree]:
    """Replace every example that is not ``valid`` by the first valid one; the others stay in place.

    Dropout therefore draws the same numbers for them.
    """
    rows = torch.arange(len(valid), device=valid.device)
    stood_in: tuple[Tree, Tree] = trees.rows((x, y), rows.where(valid, valid.int().argmax()))
    return stood_in
