"""No training leaves anything in its process by which another training changes."""

import pytest
import torch
from torch import nn

from flower_ext.data import Examples
from flower_ext.training.apart import require_apart
from tests.support.jobs import problem
from tests.support.keeping import Global, Hooked, Keeping, OfAClass

EXAMPLES = Examples(torch.zeros(5, 4), torch.zeros(5).long())
BOX = [0.0]


def enclosed():
    """Return a model whose hook writes into a variable that all models enclose."""
    model = nn.Sequential(nn.Linear(4, 3))

    def hook(module, inputs, output):
        BOX[0] = 0.5 * BOX[0] + float(output.detach().sum())
        return output * (1.0 + BOX[0])

    model.register_forward_hook(hook)
    return model


@pytest.mark.parametrize(
    ("build", "place"),
    [(OfAClass, r"OfAClass\.kept"), (Global, "global KEPT"), (enclosed, "global BOX")],
)
def test_a_model_that_shares_what_it_keeps_is_refused_by_the_name_of_the_place(build, place):
    with pytest.raises(ValueError, match=f"{place}.*other models see it"):
        require_apart(problem(build), EXAMPLES)


@pytest.mark.parametrize("build", [Keeping, Hooked, lambda: nn.Linear(4, 3)])
def test_what_a_model_keeps_for_itself_is_allowed(build):
    require_apart(problem(build), EXAMPLES)
