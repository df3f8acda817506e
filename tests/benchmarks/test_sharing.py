"""The map of when sharing pays: its populations, one private run, and its gains."""

import math

import pytest
import torch

from benchmarks.report.tables.sharing import private_gains
from benchmarks.sharing import DELTA, EPSILON, Cell, accuracy, deal_clients, split_examples


def pixels(examples):
    return [tuple(image.flatten().tolist()) for image in examples.features]


def test_clients_get_the_cells_examples_of_its_classes_and_none_twice():
    train, test = split_examples("digits", None)
    known = set(pixels(train))
    clients = deal_clients(Cell(20, 12, 5), train, test, 1)
    assert len(clients) == 20
    used = []
    for client in clients:
        classes = set(client.train.targets.tolist())
        assert len(client.train) == 12
        assert len(classes) == 5
        assert set(client.test.targets.tolist()) == classes
        used += pixels(client.train)
    assert set(used) <= known
    assert len(used) - len(set(used)) <= len(train) - len(known)  # images that the set has twice
    owners = torch.cat([client.train.targets.unique() for client in clients])
    assert owners.bincount().tolist() == [10] * 10


def test_test_images_are_no_training_images():
    train, test = split_examples("digits", None)
    assert not set(pixels(train)) & set(pixels(test))


def test_too_many_clients_are_refused():
    train, test = split_examples("digits", None)
    with pytest.raises(IndexError):
        deal_clients(Cell(1000, 50, 2), train, test, 1)


def test_a_private_run_spends_the_budget_and_a_lone_client_nothing():
    clients = deal_clients(Cell(30, 6, 10), *split_examples("digits", None), 1)
    clients = [type(c)(train=c.train, test=c.test.subset(range(10))) for c in clients]
    assert len(clients) * DELTA < 1
    settings = {"learning_rate": 0.3, "clipping_norm": 1.0}
    score, epsilon = accuracy("DP-FedAvg", settings, clients, 1)
    assert 0 <= score <= 1
    assert 0.95 * EPSILON < epsilon <= EPSILON
    score, epsilon = accuracy("alone", {"learning_rate": 0.3}, clients, 1)
    assert score > 0.2
    assert math.isnan(epsilon)


def test_gains_are_those_of_the_better_private_method_by_seed():
    scores = {
        ("alone", ""): (0.5, 0.6),
        ("FedAvg", "inf"): (0.9, 0.9),
        ("DP-FedAvg", "2"): (0.75, 0.7),
        ("DP²-FedSAM", "2"): (0.4, 0.8),
    }
    cell = [
        {"method": method, "epsilon": epsilon, "seed": str(seed), "accuracy": str(value)}
        for (method, epsilon), values in scores.items()
        for seed, value in enumerate(values)
    ]
    best, points = private_gains(cell)
    assert best == "DP-FedAvg"
    assert points == pytest.approx([25, 10])
