"""The sum of clipped gradients of single examples, by the fastest method that a model allows.

The inputs and outputs of every layer give the norm of each example's gradient, and the sum of the
clipped ones, in one pass (`one_pass`). Examples pass in small groups that stay in the caches. Where
a model might mix examples, each example's gradient is found by vmap, or in a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from logging import ERROR, WARNING, getLogger

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.training.batched.unfused import unfuse
from flower_ext.training.blueprint import channels_last_needs, in_training
from flower_ext.training.calls import call, spared
from flower_ext.training.dp.one_pass import Loss, OnePass
from flower_ext.training.dp.per_example import Parts, Rows, is_known
from flower_ext.training.dp.single import check_single_examples
from flower_ext.training.dp.trial import TRIED, Trial, random_examples, zeros
from flower_ext.training.params import Params, clone, shaken, sizes
from flower_ext.training.task import Task

log = getLogger("flwr")

_TOGETHER = 64
"""Examples that pass together where gradients of single examples are written down."""
_MARGIN = 1.0 - 1e-5
"""Room for the rounding of norms, whose shortest sums are in single precision."""
_HALF = (torch.float16, torch.bfloat16)


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

    Raises
    ------
    ValueError
        The loss compares examples, the model has batch normalisation, or a trained parameter has
        half precision. On a call: features have another type than the model's numbers, or the
        model learns from no random example by itself (see `check_single_examples`).
    """

    def __init__(self, task: Task, names: list[str], *, clipping_norm: float) -> None:
        if task.compares_examples:
            raise InvalidValue(
                "the loss compares examples, so no example has a gradient of its own to clip: "
                "DP-SGD needs a loss that is a mean over examples"
            )
        self.task, self.names, self.clipping_norm = task, names, clipping_norm
        self.model, self.followed = _built(task, names), _built(task, names)
        with suppress(ValueError):  # unusual layers remain; vmap may know them, or it refuses them
            unfuse(self.followed)
        self.params = {n: p for n, p in self.model.state_dict().items() if n in task.shapes}
        for name in names:
            if self.params[name].dtype in _HALF:
                raise InvalidValue(
                    f"{name!r} is of type {self.params[name].dtype}: expected float32 or float64, "
                    "because rounding one record might move the gradients of others: train the "
                    "model in float32 (model.float())"
                )
        layers = {name.rpartition(".")[0] for name in names}
        self.layers = {name: self.model.get_submodule(name) for name in layers}
        self.by_vmap: bool | None = None
        """True if vmap follows model and loss; None until there are examples."""
        self.in_one_pass: bool | None = None if all(map(is_known, self.layers.values())) else False
        """True if layers keep examples apart; None until there are examples (see `_choose`)."""
        self._one_pass = OnePass(self.model, names, self.layers)
        self._known: _Known | None = None
        self._told: set[int] = set()
        holders = [
            m for m in self.model.modules() if next(m.parameters(recurse=False), None) is not None
        ]
        written = any(type(layer) is not nn.Linear for layer in holders)
        self.together = _TOGETHER if written else 16 * _TOGETHER

    def __call__(self, params: Mapping[str, Tensor], features: Tree, targets: Tree) -> Params:
        """Return the sum at ``params`` (the whole model), on (examples, …); zero without any."""
        summed = {name: torch.zeros_like(params[name], dtype=torch.float64) for name in self.names}
        for name, own in self.params.items():
            own.copy_(params[name])
        self._check_single_examples(features, targets)
        if trees.length(features) == 0:
            return summed
        self._choose(features, targets)
        size, some = self.together if self.in_one_pass else _TOGETHER, False
        for x, y in trees.split((features, targets), size):
            for parts, there in self._gradients(x, y):
                self._add(summed, parts, there)
                some = some or bool(there.any())
        if not some:
            self._tell(ERROR, "the loss raises for every example: check the task and the data")
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
        """Yield examples' gradients, with a mask of the examples that have one."""
        if self.in_one_pass or self.by_vmap:
            count, device = trees.length(x), trees.first(x).device
            there = torch.ones(count, dtype=torch.bool, device=device)
            with suppress(Exception):  # a model or a loss may raise anything for a record
                yield self._together(x, y, there)
                return
            own = [self._own(self.task.loss, *pair) is not None for pair in trees.each((x, y))]
            there = torch.tensor(own, device=device)
            # A stand-in keeps the shapes, and with them the rounding of all other examples.
            rows = torch.arange(count, device=device)
            rows = rows.where(there, there.int().argmax())
            with suppress(Exception):
                others = trees.rows((x, y), rows)
                yield self._together(others[0], others[1], there)
                return
        for pair in trees.split((x, y), _TOGETHER):
            yield self._in_a_loop(*pair)

    def _together(self, x: Tree, y: Tree, there: Tensor) -> tuple[Parts, Tensor]:
        """Return gradients of examples that pass together, in a number that passed its trial."""
        if not self.in_one_pass:
            return self._by_vmap(spared(self.task, x), y, self.task.loss), there
        more = _room(trees.length(x)) - trees.length(x)

        def widened(leaf: Tensor) -> Tensor:
            return torch.cat([leaf, leaf[:1].expand(more, *leaf.shape[1:])])

        x, y = trees.mapped(widened, (x, y))
        there = functional.pad(there, (0, more))
        return self._one_pass(spared(self.task, x), y, self.task.loss), there

    def _choose(self, features: Tree, targets: Tree) -> None:
        """Choose the method for this number of examples.

        One pass finds every example's own gradient, unless a layer treats patches or times as rows,
        a layer is used twice, or examples mix. A trial checks that for each number of examples. A
        model may also change its operations by the values that it sees; such a model is refused
        (`watched`). Trials use random examples, so the choice depends on nobody's data.
        """
        known = self._known_of(features, targets)
        if self.in_one_pass is not False:
            trial = Trial(self._one_pass, self.params, self._own)
            if known.in_one_pass is None:
                known.in_one_pass = _holds(trial.tells_apart, features, targets, self.task.loss)
                known.last = self._one_pass.last
            self._one_pass.last = known.last
            count = trees.length(features)
            most = min(count, self.together)
            for room in {_room(most), _room(count % most or most)} - known.tried:
                known.tried.add(room)
                known.in_one_pass = known.in_one_pass and _holds(trial.is_like, features, room)
            self.in_one_pass = known.in_one_pass
        if not self.in_one_pass and self.by_vmap is None:
            if known.by_vmap is None:
                known.by_vmap = _holds(self._vmap_follows, features, targets)
                how = "by vmap" if known.by_vmap else "one by one"
                log.info("gradients of single examples are found %s", how)
            self.by_vmap = known.by_vmap

    def _check_single_examples(self, features: Tree, targets: Tree) -> None:
        """Refuse a model that learns from no example by itself; no record is read."""
        known = self._known_of(features, targets)
        if known.learns_singly:
            return
        chosen = {name: self.params[name] for name in self.names}
        # Below a head that begins at zero all outputs would be equal.
        random = shaken(chosen, torch.Generator().manual_seed(0))
        check_single_examples(
            type(self.model).__name__,
            lambda x: call(self.model, {**self._point(), **random}, x),
            lambda x, y: self._slopes(random, self.task.loss, x, y),
            features,
            targets,
        )
        known.learns_singly = True

    def _known_of(self, features: Tree, targets: Tree) -> _Known:
        """Return the facts about this model on examples of these shapes and types."""
        if self._known is None:
            form = trees.form(features), trees.form(targets)
            kind = self.task.model, self.task.loss, trees.first(features).device, *form
            self._known = _known(*kind, sizes(self.params), tuple(self.names))
        return self._known

    def _random(self, features: Tree, targets: Tree) -> tuple[Tree, Tree]:
        """Return a few random examples, with zeros for targets."""
        generator = torch.Generator().manual_seed(0)
        return random_examples(features, TRIED, generator), zeros(targets, TRIED)

    def _vmap_follows(self, features: Tree, targets: Tree) -> bool:
        """Return True if vmap works: no branch on values, no operation that it does not know."""
        self._by_vmap(*self._random(features, targets), self.task.loss)
        return True

    def _by_vmap(self, x: Tree, y: Tree, loss: Loss) -> Parts:
        """Return every example's own gradient, for any model that vmap follows."""
        chosen = {name: self.params[name] for name in self.names}

        def alone(chosen: Params, x: Tree, y: Tree) -> Tensor:
            return _alone(self.followed, {**self.params, **chosen}, loss, x, y)

        each = vmap(grad(alone), in_dims=(None, 0, 0), randomness="different")(chosen, x, y)
        return {name: Rows(gradient) for name, gradient in each.items()}

    def _in_a_loop(self, x: Tree, y: Tree) -> tuple[Parts, Tensor]:
        """Return every example's own gradient, for any model, and a mask of those that have one."""
        every = [self._own(self.task.loss, *pair) for pair in trees.each((x, y))]
        nothing = {name: torch.zeros_like(self.params[name]) for name in self.names}
        found = {name: torch.stack([(own or nothing)[name] for own in every]) for name in nothing}
        there = torch.tensor([own is not None for own in every], device=trees.first(x).device)
        return {name: Rows(gradient) for name, gradient in found.items()}, there

    def _own(self, loss: Loss, x: Tree, y: Tree) -> Params | None:
        """Return the gradient of one example; None if it raises."""
        try:
            return self._slopes({n: self.params[n] for n in self.names}, loss, x, y)
        except Exception as error:  # a model or a loss may raise anything for a record
            self._tell(WARNING, f"an example's loss raises {type(error).__name__}: counts as zero")
            log.debug("an example's loss raises", exc_info=True)
            return None

    def _slopes(self, chosen: Mapping[str, Tensor], loss: Loss, x: Tree, y: Tree) -> Params:
        """Return the gradient of one example at the trained parameters ``chosen``."""
        leaves = {name: p.detach().requires_grad_() for name, p in chosen.items()}
        x = trees.mapped(Tensor.clone, x)  # the model may write into it
        value = _alone(self.model, {**self._point(), **leaves}, loss, x, y)
        slopes = torch.autograd.grad(
            value, list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        return dict(zip(leaves, slopes, strict=True))

    def _point(self) -> Params:
        """Return the model with copies of its buffers, so that the next example sees no change."""
        return {**self.params, **clone(dict(self.model.named_buffers()))}

    def _tell(self, level: int, what: str) -> None:
        """Log a message once, on the client's own machine; the server learns nothing of it."""
        if level not in self._told:
            self._told.add(level)
            log.log(level, what)


@dataclass
class _Known:
    """Facts that trials found out about models of one kind."""

    by_vmap: bool | None = None
    in_one_pass: bool | None = None
    learns_singly: bool = False
    last: Tree | None = None
    tried: set[int] = field(default_factory=set)


@lru_cache(maxsize=64)
def _known(*kind: Hashable) -> _Known:
    return _Known()


def _built(task: Task, trained: Sequence[str]) -> nn.Module:
    model = in_training(task.model().to(task.torch_device())).requires_grad_(False)
    must_train = channels_last_needs(model)
    channels_last = must_train is None or must_train in trained  # faster on a CPU
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise InvalidValue(
                f"{name!r} is batch normalisation, through which every example moves every "
                "gradient: use GroupNorm (flower_ext.training.replace_batch_norm)"
            )
        if getattr(module, "inplace", False):  # it would overwrite another layer's output
            module.inplace = False
        if getattr(module, "max_norm", None) is not None:
            raise InvalidValue(
                f"{name!r} has max_norm={module.max_norm!r}: expected None with DP-SGD, because an "
                "example would rewrite rows that others look up"
            )
        if isinstance(module, nn.Conv2d) and channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _holds(check: Callable[..., bool], *facts: object) -> bool:
    """Return the result of ``check``; False if the model raises."""
    try:
        return check(*facts)
    except Exception:
        log.debug("%s raises", check.__name__, exc_info=True)
        return False


def _alone(model: nn.Module, params: Params, loss: Loss, x: Tree, y: Tree) -> Tensor:
    """Return the loss of one example, which comes without the dimension of examples."""
    x, y = trees.mapped(lambda leaf: leaf.unsqueeze(0), (x, y))
    return loss(call(model, params, x), y)


def _room(count: int) -> int:
    """Return ``count`` or up to an eighth more, so that few numbers of examples need a trial."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step
