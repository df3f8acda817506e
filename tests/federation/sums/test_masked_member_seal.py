"""How an update leaves a client: as it is, or masked."""

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.federation import records
from flower_ext.federation.sums.masked_member import seal
from flower_ext.privacy.mechanisms.protections import ClipAndNoise, Protection

CELLS = ClipAndNoise(clipping_norm=1.0, noise_stddev=0.5, cell=2.0**-16)
CONTEXT = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def test_without_masks_an_update_leaves_as_it_is():
    update = {"w": torch.tensor([1.5, -2.0]), "b": np.float32(0.5)}
    sealed = seal(update, Protection(), {}, CONTEXT, "m")
    assert {name: array.tolist() for name, array in sealed.items()} == {"w": [1.5, -2.0], "b": 0.5}
    assert all(type(array) is np.ndarray for array in sealed.values())


@pytest.mark.parametrize(
    ("sums", "error"),
    [({}, (KeyError, InvalidValue)), ({records.SECURE_SUM: {}}, ProtocolError)],
    ids=["no record of the sum", "no keys"],
)
def test_cells_never_leave_a_client_without_masks(sums, error):
    with pytest.raises(error):
        seal({"w": np.ones(2, dtype=np.int64)}, CELLS, sums, CONTEXT, "m")
