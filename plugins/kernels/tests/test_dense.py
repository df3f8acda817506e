"""Dense layers of any size, whose last tiles are incomplete; and the exponentials of the loss."""

import pytest
import torch
from torch import nn

from flower_ext.data import Examples
from flower_ext.training import Job, LocalTraining
from tests.support.jobs import one_by_one, problem, same, train_many


class Widths:
    """Makes a network with layers of these widths."""

    def __init__(self, *widths):
        self.widths = widths

    def __call__(self):
        ends = zip(self.widths, self.widths[1:], strict=False)
        return nn.Sequential(*(part for end in ends for part in (nn.Linear(*end), nn.ReLU())))[:-1]


def jobs(model, inputs, classes, batch_size, examples=11, scale=1.0):
    task = problem(model)
    random = torch.Generator().manual_seed(1)
    return task, lambda: [
        Job(
            params=task.initial_params(client),
            examples=Examples(
                scale * torch.randn(examples, inputs, generator=random.manual_seed(client)),
                torch.randint(classes, (examples,), generator=random),
            ),
            training=LocalTraining(epochs=2, batch_size=batch_size, learning_rate=0.2),
            generator=torch.Generator().manual_seed(client),
        )
        for client in range(3)
    ]


@pytest.mark.parametrize("batch_size", [1, 2, 5, 6, 11])
@pytest.mark.parametrize(
    "widths", [(1, 1, 2), (5, 6, 4), (15, 16, 17), (33, 31, 11), (80, 26, 3), (97, 5, 10, 2)]
)
def test_layers_of_any_size_train_as_in_the_loop(widths, batch_size, compiled):
    task, make_jobs = jobs(Widths(*widths), widths[0], widths[-1], batch_size)
    same(train_many(task, make_jobs()), one_by_one(task, make_jobs()))
    assert len(compiled) == 3


def test_huge_logits_give_the_same_gradients(compiled):
    """Their exponentials range from 1 to far below the smallest number of float32."""
    task, make_jobs = jobs(Widths(40, 10), 40, 10, 4, scale=300.0)
    ours, theirs = train_many(task, make_jobs()), one_by_one(task, make_jobs())
    for one, other in zip(ours, theirs, strict=True):
        for name in other:
            torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-3)
    assert len(compiled) == 3


def test_exponentials_are_exact_to_the_last_place():
    products = pytest.importorskip("flower_ext_kernels.products")
    x = -40 * torch.rand(100_000, generator=torch.Generator().manual_seed(0)).square()
    ours = x.clone().numpy()
    products.exponential(ours)
    exact = x.double().exp()
    assert ((torch.from_numpy(ours).double() - exact).abs() <= exact * 2**-23).all()


def test_exponentials_of_extreme_numbers():
    products = pytest.importorskip("flower_ext_kernels.products")
    extreme = torch.tensor([0.0, -0.0, -87.5, -1e30, -torch.inf, torch.nan])
    ours = extreme.clone().numpy()
    products.exponential(ours)
    assert ours[:2].tolist() == [1, 1]
    assert (ours[2:5] >= 0).all()
    assert (ours[2:5] < 1e-37).all()
    assert ours[5] != ours[5]
