"""A trial that a model and its loss keep nothing of one example that another one could see.

Unlike examples pass twice, each time through a fresh model: in one order, then in the other. What
a pass leaves behind is compared, and so are the gradients, which must not depend on the order. So
neither the largest example nor the first one hides what the others leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

from torch import nn

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue, tellable
from flower_ext.training.isolation import isolated
from flower_ext.training.model_factory import seeded
from flower_ext.training.params import Params
from flower_ext.training.task import Task
from flower_ext.training.trials.single_examples import built, slopes_alone
from flower_ext.training.trials.snapshots import State, changed, same_params, state_of


def refuse_memory(task: Task, names: Sequence[str], features: Tree, targets: Tree) -> None:
    """Refuse a model or a loss that keeps something of an example.

    Parameters
    ----------
    names : sequence of str
        The trained parameters.
    features, targets : Tree
        Examples that are nobody's (see `unlike_examples`).

    Raises
    ------
    InvalidValue
        The message names the place, and may travel.
    """
    trial = _Trial(task, names, [*trees.each((features, targets))])
    places = range(len(trial.examples))
    one, other = trial.passed(places), trial.passed(reversed(places))
    # What a first pass prepares, as a table of positions, must not depend on the example.
    for place in changed(one.untouched, one.prepared):
        if one.prepared.get(place) != other.prepared.get(place):
            raise _keeps(place)
    if not all(same_params(one.gradients[n], other.gradients[n]) for n in places):
        raise _keeps("something outside its attributes")


class _Passed:
    """A model's state before all examples and after the first, and every example's gradient."""

    def __init__(self, untouched: State) -> None:
        self.untouched = self.prepared = untouched
        self.gradients: dict[int, Params | None] = {}


class _Trial:
    def __init__(self, task: Task, names: Sequence[str], examples: list[tuple[Tree, Tree]]) -> None:
        self.task, self.names, self.examples = task, names, examples

    def passed(self, order: Iterable[int]) -> _Passed:
        """Pass examples through a fresh model; refuse one that changes after the first of them."""
        with self._draws():
            model = built(self.task, self.names)
        passed, is_prepared = _Passed(self._state(model)), False
        for number in order:
            gradient = self._gradient(model, *self.examples[number])
            passed.gradients[number] = gradient
            state = self._state(model)
            if not is_prepared:  # an example that raises may do so before anything is prepared
                passed.prepared, is_prepared = state, gradient is not None
            elif places := changed(passed.prepared, state):
                raise _keeps(places[0])
        return passed

    def _gradient(self, model: nn.Module, x: Tree, y: Tree) -> Params | None:
        point = {n: p for n, p in model.state_dict().items() if n in self.task.shapes}
        x, y = trees.mapped(lambda leaf: leaf.clone(), (x, y))  # model and loss may write into them
        try:
            with self._draws(), isolated():
                return slopes_alone(model, point, self.names, self.task.loss, x, y)
        except Exception:  # a model or a loss may raise anything, for random examples too
            return None

    def _state(self, model: nn.Module) -> State:
        return state_of(model=model, loss=self.task.loss)

    def _draws(self) -> AbstractContextManager[None]:
        return seeded(0, devices=self.task.torch_device().type != "cpu")


def _keeps(place: str) -> InvalidValue:
    return tellable(
        InvalidValue(
            f"{place} changes while an example passes the model or its loss: expected no change, "
            "because one record would move the gradients of those that follow, which no clipping "
            "bounds. Change it only when `not self.training`, or compute it anew in each forward "
            "pass; for a weight of torch.nn.utils.spectral_norm, use "
            "torch.nn.utils.parametrizations.spectral_norm"
        )
    )
