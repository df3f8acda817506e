"""Random data stand in for an app's data that fail to load."""

import numpy as np
import pytest
from check_apps import write_app
from checking import result_of

from flower_ext.errors import InvalidValue
from flower_ext_check import stand_in

QUICKSTART_DATA = """
from flwr_datasets import FederatedDataset
from flwr_datasets.partitioner import IidPartitioner


class Partitioner(IidPartitioner):
    former: IidPartitioner | None = None


fds = FederatedDataset(dataset="uoft-cs/cifar10", partitioners={"train": Partitioner(6)})
"""
USE = """
rows = fds.load_partition(context.node_config["partition-id"])
rows = rows.train_test_split(test_size=0.2, seed=42)["train"].with_transform(lambda batch: batch)
batch = next(iter(torch.utils.data.DataLoader(rows, batch_size=8, collate_fn=list)))
assert np.asarray(batch[0]["img"]).shape == (32, 32, 3) and 0 <= batch[0]["label"] < 10
"""


def test_an_app_whose_data_fail_to_load_runs_with_the_suggested_option(tmp_path, monkeypatch):
    import flwr_datasets  # noqa: F401 - before the forks, each of which would import it anew

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    app = write_app(tmp_path / "cifar", client_code=QUICKSTART_DATA, train_code=USE)
    assert "--data random" in result_of(app, tmp_path / "own")["error"]
    assert "error" not in result_of(app, tmp_path / "random", random_data=True)


def test_unknown_data_sets_need_their_columns():
    with pytest.raises(InvalidValue, match="expected NAME=image"):
        stand_in.parse_column("img=picture:3")
    assert stand_in.parse_column("img=image:8x8x3") == ("img", ("image", (8, 8, 3)))


def test_random_rows_repeat_for_a_client_and_keep_their_shapes():
    columns = {"x": ("float", (3,)), "label": ("int", (4,)), "text": ("text", ())}
    rows, same, others = (stand_in.draw_rows(columns, seed=seed) for seed in (1, 1, 2))
    assert rows[:] == same[:]
    assert rows[:]["label"] != others[:]["label"]
    assert set(rows[:]["label"]) <= {0, 1, 2, 3}
    assert np.shape(rows[:]["x"]) == (stand_in.ROWS, 3)
