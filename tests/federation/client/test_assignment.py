"""A client trains under a guarantee only if no training changes another one of its process."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flower_ext.errors import InvalidValue, is_tellable
from flower_ext.federation.client.assignment import checked_data
from flower_ext.federation.messages.round_entries import RoundEntries
from flower_ext.privacy.mechanisms.protections import ClipAndNoise, Unprotected
from tests.support.worlds import CLASSES, FEATURES, task


class Remembering(nn.Linear):
    """Keeps the largest input of all models."""

    largest = 0.0

    def __init__(self):
        super().__init__(FEATURES, CLASSES)

    def forward(self, x):
        type(self).largest = max(self.largest, float(x.detach().nan_to_num().max()))
        return super().forward(x) / (1.0 + self.largest)


def data_under(protection, build):
    round_entries = RoundEntries(number=1, seed=0, protection=protection)
    request = SimpleNamespace(hides_missing_data=True, round=round_entries, kind="train")
    return checked_data(replace(task(), model=build), request, 0)


def test_a_model_by_which_trainings_change_one_another_is_refused():
    protection = ClipAndNoise(clipping_norm=1.0, noise_stddev=1.0)
    with pytest.raises(InvalidValue, match=r"Remembering\.largest.*other models see it") as refused:
        data_under(protection, Remembering)
    assert is_tellable(refused.value)
    allowed = data_under(protection, lambda: nn.Linear(FEATURES, CLASSES))
    assert torch.equal(
        allowed.train.features, data_under(Unprotected(), Remembering).train.features
    )
