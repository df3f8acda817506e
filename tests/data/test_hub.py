"""The loaders through flwr-datasets, with small tables in place of downloads."""

import numpy as np
import pytest

from flower_ext.data import load

RNG = np.random.default_rng(0)


@pytest.fixture
def serve(monkeypatch):
    """Make flwr-datasets return the given splits, each (images, labels), without telemetry."""
    # The libraries read these variables when they are first imported.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("FLOWER_EXT_DATA", raising=False)
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("flwr_datasets")
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr("flwr_datasets.federated_dataset.event", lambda *_: None)

    def serve(columns, num_classes, **splits):
        features = datasets.Features(
            {columns[0]: datasets.Image(), columns[1]: datasets.ClassLabel(num_classes)}
        )
        asked = []

        def load_dataset(path, name=None, **_):
            asked.append(path)
            return datasets.DatasetDict(
                {
                    split: datasets.Dataset.from_dict(
                        {
                            columns[0]: [image.fromarray(array) for array in images],
                            columns[1]: labels.tolist(),
                        },
                        features=features,
                    )
                    for split, (images, labels) in splits.items()
                }
            )

        monkeypatch.setattr("datasets.load_dataset", load_dataset)
        return asked

    return serve


def table(count, *shape, num_classes=10):
    images = RNG.integers(0, 256, (count, *shape), dtype=np.uint8)
    return images, RNG.integers(0, num_classes, count)


def same_rows(read, images, labels) -> bool:
    """Return True if the pool holds these examples, in any order."""
    pixels = (read.features * 255).round().numpy().astype(np.uint8).reshape(len(images), -1)
    found = {(row.tobytes(), int(target)) for row, target in zip(pixels, read.targets, strict=True)}
    expected = {(row.tobytes(), int(label)) for row, label in zip(images, labels, strict=True)}
    return found == expected


@pytest.mark.parametrize(
    ("name", "hub"),
    [("mnist", "ylecun/mnist"), ("fashion-mnist", "zalando-datasets/fashion_mnist")],
)
def test_grey_images_of_both_splits_are_one_pool(name, hub, serve):
    train, test = table(12, 28, 28), table(5, 28, 28)
    asked = serve(("image", "label"), 10, train=train, test=test)
    read = load(name)
    assert asked == [hub]
    assert read.features.shape == (17, 1, 28, 28)
    images, labels = (np.concatenate(parts) for parts in zip(train, test, strict=True))
    assert same_rows(read, images.reshape(17, -1), labels)


def test_colour_images_get_their_channels_first_and_are_standardised(serve):
    white = np.full((4, 32, 32, 3), 255, np.uint8)
    labels = np.arange(4)
    serve(("img", "label"), 10, train=(white[:3], labels[:3]), test=(white[3:], labels[3:]))
    read = load("cifar10")
    assert read.features.shape == (4, 3, 32, 32)
    expected = [(1 - m) / s for m, s in [(0.4914, 0.2470), (0.4822, 0.2435), (0.4465, 0.2616)]]
    np.testing.assert_allclose(read.features[0, :, 0, 0].numpy(), expected, rtol=1e-5)


def test_of_all_femnist_characters_only_the_digits_are_kept(serve):
    images, labels = table(80, 28, 28, num_classes=62)
    serve(("image", "character"), 62, train=(images, labels))
    digits = labels < 10
    assert 0 < digits.sum() < 80
    read = load("femnist")
    assert same_rows(read, images[digits].reshape(digits.sum(), -1), labels[digits])


def test_the_hub_gives_the_order_of_the_files_so_that_a_seed_means_the_same_partition(serve):
    images = np.zeros((40, 28, 28), np.uint8)
    labels = np.arange(40) % 10
    serve(("image", "label"), 10, train=(images[:30], labels[:30]), test=(images[30:], labels[30:]))
    assert load("mnist").targets.tolist() == labels.tolist()
