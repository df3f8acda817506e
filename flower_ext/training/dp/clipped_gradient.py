"""The sum of clipped gradients of single examples, however a model may be taken apart.

What goes in and out of every layer gives the norm of each example's gradient and the sum of the
clipped ones in one pass (`per_example`); examples pass in small groups that stay in the caches.
Where a model might mix them, or features or outputs are no single tensor, each example's gradient
is found by vmap, or in a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial, reduce
from logging import ERROR, WARNING, getLogger
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.training.batched.unfused import unfuse
from flower_ext.training.blueprint import in_training
from flower_ext.training.dp.per_example import Parts, Rows, gradients, is_known
from flower_ext.training.local import UnlikeTypes, call, spared
from flower_ext.training.params import Params, clone, shaken, sizes
from flower_ext.training.task import Task

log = getLogger("flwr")

_TOGETHER = 64
"""Examples that pass together where gradients of single examples are written down."""
_MARGIN = 1.0 - 1e-5
"""Room for the rounding of norms, whose shortest sums are in single precision."""
_TRIED, _PIECE, _ALIKE = 3, 16, 1e-3
"""Random examples on which one pass is tried out, first few and then more; and how far off rounding
may be."""
_HALF = (torch.float16, torch.bfloat16)
_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)
"""Modules that do something else each time."""

Loss = Callable[[Any, Tree], Tensor]


class ClippedGradient:
    """Sum over examples of their gradients, each clipped to ``clipping_norm``, in float64.

    An example's gradient is that of its own loss, as if there were no others. One that is not
    finite, or whose loss raises, counts as zero: were it an error, that alone would tell of a
    record.

    Parameters
    ----------
    names : list of str
        The parameters that are trained: the norm is taken over all of these together.
    clipping_norm : float

    Raises
    ------
    ValueError
        The loss compares examples, the model has batch normalisation, or trained parameters are of
        half precision; once it is called: features are of another type than the model's numbers.
    """

    def __init__(self, task: Task, names: list[str], *, clipping_norm: float) -> None:
        if task.compares_examples:
            raise InvalidValue(
                "the loss compares examples, so that none has a gradient of its own to clip: "
                "DP-SGD needs a loss that is a mean over examples"
            )
        self.task, self.names, self.clipping_norm = task, names, clipping_norm
        self.model, self.followed = _built(task), _built(task)
        with suppress(ValueError):  # an unusual layer, which vmap may know or say that it does not
            unfuse(self.followed)
        self.params = {n: p for n, p in self.model.state_dict().items() if n in task.shapes}
        for name in names:
            if self.params[name].dtype in _HALF:
                raise InvalidValue(
                    f"{name!r} is of type {self.params[name].dtype}: expected float32 or float64, "
                    "as one record's rounding might move the gradients of others: train the "
                    "model in float32 (model.float())"
                )
        layers = {name.rpartition(".")[0] for name in names}
        self.layers = {name: self.model.get_submodule(name) for name in layers}
        self.by_vmap: bool | None = None
        """Whether vmap follows model and loss; None until there are examples."""
        self.in_one_pass: bool | None = None if all(map(is_known, self.layers.values())) else False
        """Whether layers tell examples apart; None until there are some (see `_choose`)."""
        self._known: _Known | None = None
        self._told: set[int] = set()
        written = any(type(layer) is not nn.Linear for layer in self.layers.values())
        self.together = _TOGETHER if written else 16 * _TOGETHER

    def __call__(self, params: Mapping[str, Tensor], features: Tree, targets: Tree) -> Params:
        """At ``params`` (the whole model), on (examples, …); zero for no examples."""
        summed = {name: torch.zeros_like(params[name], dtype=torch.float64) for name in self.names}
        if trees.length(features) == 0:
            return summed
        for name, own in self.params.items():
            own.copy_(params[name])
        self._choose(features, targets)
        size, some = self.together if self.in_one_pass else _TOGETHER, False
        for x, y in trees.split((features, targets), size):
            for parts, there in self._gradients(x, y):
                self._add(summed, parts, there)
                some = some or bool(there.any())
        if not some:
            self._tell(ERROR, "the loss of every example raises: look into the task or the data")
        return summed

    def _add(self, summed: Params, parts: Parts, there: Tensor) -> None:
        """Add the clipped gradients of the examples that are ``there`` and finite."""
        norms = reduce(torch.add, [part.squares() for part in parts.values()]).sqrt()
        factors = (self.clipping_norm * _MARGIN / norms.clamp_min(1e-30)).clamp_max(1.0)
        factors = factors.where(there, 0.0)
        if not bool((sound := norms.isfinite()).all()):
            parts = {name: part.only(sound) for name, part in parts.items()}
            factors = factors.where(sound, 0.0)
        for name, part in parts.items():
            summed[name] += part.total(factors).view_as(summed[name])

    def _gradients(self, x: Tree, y: Tree) -> Iterator[tuple[Parts, Tensor]]:
        """Yield examples' gradients, and which of them are there."""
        if self.in_one_pass or self.by_vmap:
            count, device = trees.length(x), trees.first(x).device
            there = torch.ones(count, dtype=torch.bool, device=device)
            with suppress(Exception):  # whatever a model or a loss makes of a record
                yield self._together(x, y, there)
                return
            own = [self._own(self.task.loss, *pair) is not None for pair in trees.each((x, y))]
            there = torch.tensor(own, device=device)
            # Another in its place keeps the shapes, and with them how all others are rounded.
            rows = torch.arange(count, device=device)
            rows = rows.where(there, there.int().argmax())
            with suppress(Exception):
                others = trees.rows((x, y), rows)
                yield self._together(others[0], others[1], there)
                return
        for pair in trees.split((x, y), _TOGETHER):
            yield self._in_a_loop(*pair)

    def _together(self, x: Tree, y: Tree, there: Tensor) -> tuple[Parts, Tensor]:
        """Return gradients of examples that pass together, in a number that was tried out."""
        if not self.in_one_pass:
            return self._by_vmap(spared(self.task, x), y, self.task.loss), there
        more = _room(len(x)) - len(x)

        def widened(leaf: Tensor) -> Tensor:
            return torch.cat([leaf, leaf[:1].expand(more, *leaf.shape[1:])])

        x, y = trees.mapped(widened, (x, y))
        there = functional.pad(there, (0, more))
        return self._in_one_pass(spared(self.task, x), y, self.task.loss), there

    def _choose(self, features: Tree, targets: Tree) -> None:
        """Find out how to get at the gradients of as many examples.

        One pass finds every example's own gradient, unless a layer sees patches or times as rows,
        is used twice, or examples mix: it is tried out with each number of examples that it is
        given. What a model does may depend on values, too: vmap refuses such a model. Tried out on
        random examples, so that it depends on nobody's data.
        """
        if self._known is None:
            form = trees.form(features), trees.form(targets)
            kind = self.task.model, self.task.loss, trees.first(features).device, *form
            self._known = _known(*kind, sizes(self.params), tuple(self.names))
        if self._known.by_vmap is None:
            self.by_vmap = _holds(self._vmap_follows, features, targets)
            if self.in_one_pass is None:
                one = isinstance(features, Tensor) and self.by_vmap
                self.in_one_pass = one and _holds(self._tells_apart, features)
            if not self.by_vmap:
                self._say_unlike_types(features, targets)
            if not self.in_one_pass:
                how = "by vmap" if self.by_vmap else "one by one"
                log.info("gradients of single examples are found %s", how)
        else:
            self.by_vmap, self.in_one_pass = self._known.by_vmap, self._known.in_one_pass
        count = trees.length(features)
        most = min(count, self.together)
        for room in {_room(most), _room(count % most or most)} - self._known.tried:
            self._known.tried.add(room)
            self.in_one_pass = self.in_one_pass and _holds(self._is_like, features, room, _PIECE)
        self._known.by_vmap, self._known.in_one_pass = self.by_vmap, self.in_one_pass

    def _say_unlike_types(self, features: Tree, targets: Tree) -> None:
        """Raise what would let each example count as zero: here no record's values are known."""
        x, y = self._random(features, targets)
        try:
            _alone(self.model, self._point(), self.task.loss, *trees.each((x, y))[0])
        except UnlikeTypes:
            raise
        except Exception:
            log.debug("a random example raises", exc_info=True)

    def _random(self, features: Tree, targets: Tree) -> tuple[Tree, Tree]:
        """Return a few random examples, and zeros for targets."""
        generator = torch.Generator().manual_seed(0)
        x = trees.mapped(lambda leaf: _random(leaf, _TRIED, generator), features)
        return x, trees.mapped(lambda leaf: leaf.new_zeros((_TRIED, *leaf.shape[1:])), targets)

    def _vmap_follows(self, features: Tree, targets: Tree) -> bool:
        """Tell whether there is no branch on values, nor an operation that vmap does not know."""
        self._by_vmap(*self._random(features, targets), self.task.loss)
        return True

    def _tells_apart(self, features: Tensor) -> bool:
        """Tell whether one pass over a few random examples finds every one's own gradient."""
        with self._shaken() as generator:
            x, directions = self._tried_on(features, _TRIED, generator)
            together = self._in_one_pass(x, directions, _along)
            own = [self._own(_along, *pair) or {} for pair in zip(x, directions, strict=True)]
        for name, part in together.items():
            rows = [part.total(only) for only in torch.eye(_TRIED).to(x.device)]
            if not _alike(torch.stack(rows), torch.stack([one[name] for one in own])):
                return False
        return self._is_like(features, _PIECE, _TRIED)

    def _is_like(self, features: Tensor, count: int, piece: int) -> bool:
        """Tell whether one pass over ``count`` random examples is like passes over pieces."""
        with self._shaken() as generator:
            x, directions = self._tried_on(features, -(-count // piece) * piece, generator)
            parts = self._in_one_pass(x[:count], directions[:count], _along)
            pairs = zip(torch.split(x, piece), torch.split(directions, piece), strict=True)
            pieces = [self._in_one_pass(*pair, _along) for pair in pairs]
        factors = torch.randn(len(x), generator=generator).to(x.device)
        factors[count:] = 0.0
        for name, part in parts.items():
            own = [one[name] for one in pieces]
            squares = torch.cat([one.squares() for one in own])[:count]
            scaled = zip(own, torch.split(factors, piece), strict=True)
            total = torch.stack([one.total(some) for one, some in scaled]).sum(dim=0)
            alike = _alike(part.squares()[None], squares[None])
            if not (alike and _alike(part.total(factors[:count])[None], total[None])):
                return False
        return True

    @contextmanager
    def _shaken(self) -> Iterator[torch.Generator]:
        """Weights are random: below a head that begins at zero all slopes are zero, and tell
        nothing.
        """
        generator = torch.Generator().manual_seed(0)
        random = [m for m in self.model.modules() if isinstance(m, _RANDOM)]
        for module in random:
            module.eval()
        weights = {n: p for n, p in self.model.named_parameters() if n in self.params}
        kept = clone(weights)
        for name, weight in shaken(weights, generator).items():
            weights[name].copy_(weight)
        try:
            yield generator
        finally:
            for module in random:
                module.train()
            for name, weight in kept.items():
                weights[name].copy_(weight)

    def _tried_on(
        self, features: Tensor, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Random examples, and directions in which to add up their outputs."""
        x = _random(features, count, generator)
        with torch.no_grad():
            shape = self.model(x[:1].clone()).shape[1:]
        return x, torch.randn(count, *shape, generator=generator).to(x.device)

    def _in_one_pass(self, x: Tensor, y: Tree, loss: Loss) -> Parts:
        came_in: dict[str, Tensor] = {}
        went_out: dict[str, Tensor] = {}

        def keep(name: str, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            if name in came_in:
                raise RuntimeError(f"{name!r} is used twice")
            came_in[name] = inputs[0].detach()
            went_out[name] = output if output.requires_grad else output.requires_grad_()
            return output

        hooks = [m.register_forward_hook(partial(keep, name)) for name, m in self.layers.items()]
        try:
            outputs = self.model(x)
        finally:
            for hook in hooks:
                hook.remove()
        slopes = torch.autograd.grad(_summed(loss, outputs, y), list(went_out.values()))
        parts = {}
        for layer, slope in zip(went_out, slopes, strict=True):
            for leaf, part in gradients(self.layers[layer], came_in[layer], slope).items():
                parts[f"{layer}.{leaf}".removeprefix(".")] = part
        return {name: parts[name] for name in self.names}

    def _by_vmap(self, x: Tree, y: Tree, loss: Loss) -> Parts:
        """Every example's own gradient, for any model that vmap follows."""
        chosen = {name: self.params[name] for name in self.names}

        def alone(chosen: Params, x: Tree, y: Tree) -> Tensor:
            return _alone(self.followed, {**self.params, **chosen}, loss, x, y)

        each = vmap(grad(alone), in_dims=(None, 0, 0), randomness="different")(chosen, x, y)
        return {name: Rows(gradient) for name, gradient in each.items()}

    def _in_a_loop(self, x: Tree, y: Tree) -> tuple[Parts, Tensor]:
        """Every example's own gradient, for any model at all; and for which there is one."""
        every = [self._own(self.task.loss, *pair) for pair in trees.each((x, y))]
        nothing = {name: torch.zeros_like(self.params[name]) for name in self.names}
        found = {name: torch.stack([(own or nothing)[name] for own in every]) for name in nothing}
        there = torch.tensor([own is not None for own in every], device=trees.first(x).device)
        return {name: Rows(gradient) for name, gradient in found.items()}, there

    def _own(self, loss: Loss, x: Tree, y: Tree) -> Params | None:
        """The gradient of one example; None if it raises."""
        leaves = {name: self.params[name].detach().requires_grad_() for name in self.names}
        try:
            x = trees.mapped(Tensor.clone, x)  # a model may write into it
            value = _alone(self.model, {**self._point(), **leaves}, loss, x, y)
            slopes = torch.autograd.grad(
                value, list(leaves.values()), allow_unused=True, materialize_grads=True
            )
        except Exception as error:  # whatever a model or a loss makes of a record
            self._tell(WARNING, f"an example's loss raises {type(error).__name__}: counts as zero")
            log.debug("an example's loss raises", exc_info=True)
            return None
        return dict(zip(leaves, slopes, strict=True))

    def _point(self) -> Params:
        """Return all of the model, with copies of its buffers: the next example sees no change."""
        return {**self.params, **clone(dict(self.model.named_buffers()))}

    def _tell(self, level: int, what: str) -> None:
        """Say it once, to who has the data: who gets the sum learns nothing of it."""
        if level not in self._told:
            self._told.add(level)
            log.log(level, what)


@dataclass
class _Known:
    """What was found out about models of one kind."""

    by_vmap: bool | None = None
    in_one_pass: bool | None = None
    tried: set[int] = field(default_factory=set)


@lru_cache(maxsize=64)
def _known(*kind: Hashable) -> _Known:
    return _Known()


def _built(task: Task) -> nn.Module:
    model = in_training(task.model().to(task.torch_device())).requires_grad_(False)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise InvalidValue(
                f"{name!r} is batch normalisation, by which every example moves every "
                "gradient: use GroupNorm (flower_ext.training.replace_batch_norm)"
            )
        if getattr(module, "inplace", False):  # it would overwrite what a layer put out
            module.inplace = False
        if getattr(module, "max_norm", None) is not None:
            raise InvalidValue(
                f"{name!r} has max_norm={module.max_norm!r}: expected None with DP-SGD, as an "
                "example would rewrite rows that others look up"
            )
        if isinstance(module, nn.Conv2d):  # faster on a CPU, for pooling above all
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _holds(check: Callable[..., bool], *facts: object) -> bool:
    """Return what ``check`` returns; False where the model raises as it is taken apart."""
    try:
        return check(*facts)
    except Exception:
        log.debug("%s raises", check.__name__, exc_info=True)
        return False


def _alone(model: nn.Module, params: Params, loss: Loss, x: Tree, y: Tree) -> Tensor:
    """The loss of one example, without the dimension of examples."""
    x, y = trees.mapped(lambda leaf: leaf.unsqueeze(0), (x, y))
    return loss(call(model, params, x), y)


def _room(count: int) -> int:
    """As many examples or up to an eighth more: few numbers of examples need to be tried out."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


def _random(features: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Random examples like these."""
    x = torch.randn(count, *features.shape[1:], generator=generator)
    if not features.is_floating_point():
        x = x > 0
    return x.to(features.device, features.dtype)


def _alike(found: Tensor, expected: Tensor) -> bool:
    """Return True if all rows of numbers agree, and at least one is not zero."""
    found, expected = (part.reshape(len(part), -1).double() for part in (found, expected))
    largest = expected.abs().amax(dim=1)
    agree = (found - expected).abs().amax(dim=1) <= _ALIKE * largest
    return bool(largest.any()) and bool(agree.all())


def _summed(loss: Loss, outputs: Tensor, y: Tree) -> Tensor:
    """Σ loss of one example alone: a mean may weigh examples by what the others are."""
    if loss is functional.cross_entropy and outputs.dim() == 2:
        return functional.cross_entropy(outputs, y, reduction="sum")

    def alone(output: Tensor, target: Tree) -> Tensor:
        return loss(output.unsqueeze(0), trees.mapped(lambda leaf: leaf.unsqueeze(0), target))

    return vmap(alone)(outputs, y).sum()


def _along(outputs: Tensor, directions: Tensor) -> Tensor:
    return (outputs * directions).sum()
