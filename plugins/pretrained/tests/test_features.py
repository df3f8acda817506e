"""Features by a frozen front depend on one example each, are computed once, agree on all nodes."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from flower_ext.algorithms import DPFedAvg
from flower_ext.data import ClientData, Examples, SiloData
from flower_ext.errors import InvalidValue
from flower_ext.federation import FederatedStrategy, FederationNotReady, InProcessGrid
from flower_ext.privacy import FullParticipation, NonPrivatePlan
from flower_ext.training import LocalTraining, Task
from flower_ext.training.models.calls import UnlikeTypes
from flower_ext_pretrained.features import Features
from tests.support.fronts import WIDTH, Front, count_of, images

CLIENTS = 3


def changed(record: torch.Tensor, client: int) -> ClientData:
    data = images(client)
    x = data.train.features.clone()
    x[2] = record
    return ClientData(train=Examples(x, data.train.targets), test=data.test)


def without_a_record(client: int) -> ClientData:
    data = images(client)
    return ClientData(train=data.train.subset([0, 1, 3, 4, 5, 6, 7]), test=data.test)


def test_features_are_what_the_front_puts_out_in_evaluation_and_targets_stay():
    plain = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(25), nn.Dropout(0.5), nn.Linear(25, 4))
    made = Features(lambda: plain.train(), images)(1)
    data = images(1)
    for part, was in ((made.train, data.train), (made.test, data.test)):
        torch.testing.assert_close(part.features, plain.eval()(was.features))
        assert torch.equal(part.targets, was.targets)
        assert not part.features.requires_grad


def of_float64(client: int) -> ClientData:
    x = images(client).train.features.double()
    examples = Examples(x, images(client).train.targets)
    return ClientData(train=examples, test=examples)


def test_images_of_another_type_than_the_front_are_refused_with_a_remedy():
    front = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(25, affine=False), nn.Linear(25, 4))
    words = r"features of type torch.float64: expected torch.float32.*features.to\("
    with pytest.raises(UnlikeTypes, match=words):
        Features(lambda: front, of_float64)(0)
    made = Features(lambda: front.double(), of_float64)(0)
    assert made.train.features.dtype == torch.float64


def test_a_front_without_floating_point_numbers_reports_the_libraries_error():
    with pytest.raises(RuntimeError, match="same dtype"):
        Features(Integers, of_float64)(0)


class Integers(nn.Module):
    """A front whose only numbers are integers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.ones(25, 4, dtype=torch.int64))

    def forward(self, x):
        return x.flatten(1) @ self.weight


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(torch.full((1, 5, 5), float("nan")), id="NaN"),
        pytest.param(torch.full((1, 5, 5), 1e38), id="huge"),
        pytest.param(torch.zeros(1, 5, 5), id="zero"),
    ],
)
def test_a_record_moves_no_bit_of_anothers_features(record):
    expected = Features(Front, images)(0)
    made = Features(Front, partial(changed, record))(0)
    others = torch.tensor([0, 1, 3, 4, 5, 6, 7])
    assert torch.equal(made.train.features[others], expected.train.features[others])
    assert torch.equal(made.test.features, expected.test.features)
    assert not torch.equal(made.train.features[2], expected.train.features[2])


def test_an_absent_record_moves_no_bit_of_anothers_features():
    expected, made = Features(Front, images)(0), Features(Front, without_a_record)(0)
    others = torch.tensor([0, 1, 3, 4, 5, 6, 7])
    assert torch.equal(made.train.features, expected.train.features[others])


def test_an_example_passes_once():
    features = Features(Front, images)
    assert count_of(features) == 12
    assert count_of(features) == 0
    assert count_of(features, 1) == 12


def test_features_in_the_folder_are_not_computed_by_another_object(tmp_path):
    first = Features(Front, images, tmp_path)
    assert count_of(first) == 12
    second = Features(Front, images, tmp_path)
    assert count_of(second) == 0
    assert torch.equal(first(0).train.features, second(0).train.features)
    # The folder belongs to the examples, so another partition of them is in it as well.
    assert count_of(Features(Front, without_a_record, tmp_path)) == 0


SECOND_PROCESS = """
import sys
from pathlib import Path
from flower_ext_pretrained.features import Features
from tests.support.fronts import Front, count_of, images
features = Features(Front, images, Path(sys.argv[1]))
print(count_of(features), features(0).train.features.double().sum().item())
"""


def test_another_process_reads_the_folder(tmp_path):
    total = Features(Front, images, tmp_path)(0).train.features.double().sum().item()
    done = subprocess.run(
        [sys.executable, "-c", SECOND_PROCESS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["0", str(total)]


@pytest.mark.parametrize(
    "harm",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    ],
    ids=["torn", "empty", "one bit"],
)
def test_a_damaged_file_is_computed_anew(harm, tmp_path):
    expected = Features(Front, images, tmp_path)(0)
    file = next(path for path in tmp_path.rglob("*") if path.is_file())
    file.write_bytes(harm(file.read_bytes()))
    again = Features(Front, images, tmp_path)
    assert count_of(again) == 1
    assert torch.equal(again(0).train.features, expected.train.features)
    assert count_of(Features(Front, images, tmp_path)) == 0


def test_another_front_reads_nothing_of_the_folder(tmp_path):
    Features(Front, images, tmp_path)(0)
    assert count_of(Features(partial(Front, moved=1e-3), images, tmp_path)) == 12


def test_owners_of_records_in_silos_stay():
    def silo(client):
        data = images(client)
        return SiloData(train=data.train, test=data.test, owners=torch.arange(8))

    made = Features(Front, silo)(0)
    assert isinstance(made, SiloData)
    assert torch.equal(made.owners, torch.arange(8))


def test_a_partition_without_test_examples_has_features_of_the_same_form():
    def untested(client):
        data = images(client)
        return ClientData(train=data.train, test=data.test.subset([]))

    made = Features(Front, untested)(0)
    assert made.test.row_type == made.train.row_type


def test_a_mapping_of_features_is_given_by_name():
    class Words(nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (ids * mask).sum(dim=1, keepdim=True).float()

    def texts(client):
        words = Examples(
            {"ids": torch.tensor([[3, 4], [5, 6]]), "mask": torch.tensor([[1, 1], [1, 0]])},
            torch.tensor([0, 1]),
        )
        return ClientData(train=words, test=words)

    assert Features(Words, texts)(0).train.features.tolist() == [[7.0], [5.0]]


def test_a_front_that_puts_out_no_tensor_is_refused():
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x

    with pytest.raises(InvalidValue, match=r"front returned tuple .* expected a tensor \(1"):
        Features(Pair, images)(0)


def task(front=Front) -> Task:
    return Task(model=partial(nn.Linear, WIDTH, 2), data=Features(front, images), device="cpu")


def start(its_task: Task):
    strategy = FederatedStrategy(
        DPFedAvg(local=LocalTraining(epochs=1)),
        NonPrivatePlan(sampling=FullParticipation(CLIENTS)),
        seed=1,
        frozen=task().fingerprint,
    )
    grid = InProcessGrid(DPFedAvg.client_app(its_task), num_clients=CLIENTS)
    return strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=2)


def test_a_node_with_another_front_is_refused_before_the_first_round():
    assert start(task()).arrays
    other = task(partial(Front, moved=1e-6))
    with pytest.raises(FederationNotReady, match=f"{other.fingerprint}.*same base model"):
        start(other)


def test_a_fingerprint_is_of_the_models_frozen_part_and_of_the_front():
    def half_frozen() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        return model

    alone = Task(model=half_frozen, data=images).fingerprint
    front = task().fingerprint
    both = Task(model=half_frozen, data=Features(Front, images)).fingerprint
    assert alone
    assert front
    assert both == f"{alone}-{front}"
