"""Partitions of examples among clients.

``split`` divides the examples of one client. All other functions take the targets of a pool, and
return an array of indices for each client; no example is assigned twice. ``pathological``,
``dirichlet`` and ``split`` read a target as a class: one number, and not NaN.

flwr-datasets has partitioners of the same names, but they read Hugging Face tables. The
pathological partition of flwr-datasets may give some classes to more clients than others, or to
none.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from flower_ext.checks import require_one_of, require_positive
from flower_ext.errors import InvalidValue

_ATTEMPTS = 100
"""Number of Dirichlet draws that `dirichlet` tries before it raises an error."""


def partition(
    kind: str,
    targets: np.ndarray,
    *,
    num_partitions: int,
    rng: np.random.Generator,
    classes_per_partition: int = 2,
    alpha: float = 0.5,
    min_size: int = 10,
) -> list[np.ndarray]:
    """Divide a pool of examples by the named scheme: ``pathological``, ``dirichlet`` or ``iid``.

    ``classes_per_partition`` is for ``pathological``; ``alpha`` and ``min_size`` are for
    ``dirichlet``.
    """
    schemes: dict[str, Callable[..., list[np.ndarray]]] = {
        "pathological": partial(pathological, classes_per_partition=classes_per_partition),
        "dirichlet": partial(dirichlet, alpha=alpha, min_size=min_size),
        "iid": iid,
    }
    require_one_of("partition", kind, [*schemes])
    return schemes[kind](targets, num_partitions=num_partitions, rng=rng)


def pathological(
    targets: np.ndarray,
    *,
    num_partitions: int,
    classes_per_partition: int,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Give each of N clients exactly S = ``classes_per_partition`` classes, and disjoint examples.

    Each of the K classes goes to N·S/K clients, rounded up or down. The clients of a class share
    its examples evenly.

    Raises
    ------
    ValueError
        In five cases: N is not between 1 and the number of examples; S is not between 1 and K; N·S
        is below K, which would leave out a class; a class has fewer than two examples for each of
        its clients; or the targets are not classes.
    """
    _check_classes(targets)
    classes = np.unique(targets)
    _check_count(targets, num_partitions)
    if not 1 <= classes_per_partition <= len(classes):
        raise InvalidValue(
            f"classes_per_partition={classes_per_partition!r}: expected 1 … {len(classes)}, the "
            "number of classes in the targets"
        )
    slots = num_partitions * classes_per_partition
    if slots < len(classes):
        raise InvalidValue(
            f"{num_partitions} clients with {classes_per_partition} classes each cannot hold "
            f"{len(classes)} classes; raise num_partitions or classes_per_partition"
        )
    # Each client in turn gets the classes that the fewest clients have so far, with ties broken at
    # random. The numbers of clients per class thus differ by at most one.
    held = np.zeros((num_partitions, len(classes)), dtype=bool)
    for client in rng.permutation(num_partitions):
        order = held.sum(axis=0) + rng.random(len(classes))
        held[client, np.argsort(order)[:classes_per_partition]] = True
    pieces: list[list[np.ndarray]] = [[] for _ in range(num_partitions)]
    for number, label in enumerate(classes):
        holders = np.flatnonzero(held[:, number])
        examples = rng.permutation(np.flatnonzero(targets == label))
        # Each client needs one example of the class to train on, and one to test.
        if len(examples) < 2 * len(holders):
            raise InvalidValue(
                f"class {label} has {len(examples)} examples for {len(holders)} clients, fewer "
                "than two each; choose fewer clients or fewer classes per client"
            )
        for holder, piece in zip(holders, np.array_split(examples, len(holders)), strict=True):
            pieces[holder].append(piece)
    return [np.sort(np.concatenate(piece)) for piece in pieces]


def dirichlet(
    targets: np.ndarray,
    *,
    num_partitions: int,
    alpha: float,
    rng: np.random.Generator,
    min_size: int = 10,
) -> list[np.ndarray]:
    """Spread each class over the clients by a Dirichlet(alpha) draw (Hsu et al. 2019).

    The draw is repeated until every client holds at least ``min_size`` examples.

    Raises
    ------
    ValueError
        If ``alpha`` is not above 0, if ``num_partitions`` or ``min_size`` is out of range, if none
        of 100 draws gives every client enough examples, or if the targets are not classes.
    """
    _check_classes(targets)
    _check_count(targets, num_partitions)
    require_positive("alpha", alpha)
    most = len(targets) // num_partitions
    if not 0 < min_size <= most:
        raise InvalidValue(
            f"min_size={min_size!r}: expected 1 … {most}, because {len(targets)} examples "
            f"cannot give more to each of {num_partitions} partitions; in an app, change the "
            "setting dirichlet-min-size"
        )
    for _ in range(_ATTEMPTS):
        pieces: list[list[np.ndarray]] = [[] for _ in range(num_partitions)]
        for label in np.unique(targets):
            examples = rng.permutation(np.flatnonzero(targets == label))
            shares = rng.dirichlet(np.full(num_partitions, alpha))
            cuts = np.round(np.cumsum(shares)[:-1] * len(examples)).astype(int)
            for client, piece in enumerate(np.split(examples, cuts)):
                pieces[client].append(piece)
        divided = [np.sort(np.concatenate(piece)) for piece in pieces]
        if min(map(len, divided)) >= min_size:
            return divided
    raise InvalidValue(
        f"none of {_ATTEMPTS} draws with alpha={alpha:g} gave every client at least {min_size} "
        "examples; raise alpha, lower min_size (in an app, the setting dirichlet-min-size), or "
        f"choose fewer than {num_partitions} clients"
    )


def iid(targets: np.ndarray, *, num_partitions: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Divide a pool at random into equal parts. Their sizes differ by at most one."""
    _check_count(targets, num_partitions)
    return [
        np.sort(share) for share in np.array_split(rng.permutation(len(targets)), num_partitions)
    ]


def split(
    indices: np.ndarray,
    targets: np.ndarray,
    *,
    train_fraction: float = 0.9,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of one client's training examples, and of its test examples.

    Each class makes up about the same fraction of both sets, and neither set is empty.

    Raises
    ------
    ValueError
        If there are fewer than two examples, if ``train_fraction`` is outside (0, 1), or if the
        targets are not classes.
    """
    _check_classes(targets)
    if not 0 < train_fraction < 1:
        raise InvalidValue(f"train_fraction={train_fraction!r}: expected a number in (0, 1)")
    if len(indices) < 2:
        raise InvalidValue(
            f"{len(indices)} examples cannot be divided into training and test: expected at least 2"
        )
    # Spread each class's examples evenly over (0, 1), in random order. The last ones are for tests.
    place = np.empty(len(indices))
    for label in np.unique(targets[indices]):
        members = np.flatnonzero(targets[indices] == label)
        place[members] = (rng.permutation(len(members)) + rng.random()) / len(members)
    order = np.argsort(place, kind="stable")
    cut = min(max(1, round(train_fraction * len(indices))), len(indices) - 1)
    return np.sort(indices[order[:cut]]), np.sort(indices[order[cut:]])


def _check_count(targets: np.ndarray, num_partitions: int) -> None:
    if not 1 <= num_partitions <= len(targets):
        raise InvalidValue(
            f"num_partitions={num_partitions!r}: expected 1 … {len(targets)}, at most one for "
            "each example; in an app, change the setting clients"
        )


def _check_classes(targets: np.ndarray) -> None:
    if targets.ndim != 1:
        raise InvalidValue(
            f"targets of shape {targets.shape}: expected a class for each example, of shape "
            f"({len(targets)},); for one-hot targets give targets.argmax(axis=1), and divide "
            "examples without classes by iid"
        )
    if missing := int(np.count_nonzero(targets != targets)):  # NaN differs from itself
        raise InvalidValue(
            f"targets: {missing} of {len(targets)} are NaN, expected a class for each example; "
            "leave those examples out or give them a class of their own"
        )
