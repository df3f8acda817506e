"""The probe for layers that refuse a single row leaves nothing behind."""

import torch
from torch import nn

from flower_ext.training.kind import kind_of
from flower_ext.training.trials.single_rows import refusing_layer
from tests.support.jobs import problem


class Unsettling(nn.Linear):
    """Changes a setting of the process for a batch of one row, which it then refuses."""

    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x):
        if len(x) == 1:
            torch.set_default_dtype(torch.float64)
            raise ValueError("one row")
        return super().forward(x)


def test_probing_a_model_changes_no_setting_of_the_next_training():
    kind = kind_of(problem(Unsettling), torch.zeros(2, 4), torch.zeros(2).long(), {})
    try:
        assert refusing_layer(kind) is not None
        assert torch.get_default_dtype() is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
