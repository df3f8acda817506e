"""Run an app several times, with new random numbers or one changed client, and compare the runs.

With a probability of at least 1 − `LUCK`, all statistical decisions of a check are right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from scipy.stats import chi2

from flower_ext.check.app_folder import AppFolder
from flower_ext.check.forks import in_fork
from flower_ext.check.held_run import Change, HeldRun
from flower_ext.check.instruments import Instruments
from flower_ext.check.observe import Observed, Watch, observe
from flower_ext.check.recognise import AppTraits, traits_of
from flower_ext.check.stand_in import Column
from flower_ext.check.vectors import HELD, Vector

LUCK = 1e-6
_DECISIONS = 100
_DEVIATIONS = 6.5
"""Standard deviations that a Gaussian exceeds with probability `LUCK` / `_DECISIONS`."""
_LONG = 5
"""If the first run takes more seconds than this, the user learns how long the check may take."""
REAL, AGAIN, OTHER, QUIET = "real", "again", "other", "quiet"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A measured standard deviation, with bounds that hold almost surely (see `spread`)."""

    value: float
    low: float
    high: float


def spread(differences: np.ndarray) -> Spread:
    """Return the standard deviation of Gaussian noise of mean zero, with bounds.

    The bounds fail with probability `LUCK` / `_DECISIONS`.
    """
    count, total = differences.size, float(np.sum(differences**2))
    low, high = chi2.ppf([LUCK / _DECISIONS / 2, 1 - LUCK / _DECISIONS / 2], count)
    return Spread(
        value=(total / count) ** 0.5, low=(total / high) ** 0.5, high=(total / low) ** 0.5
    )


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """The options of a check.

    Parameters
    ----------
    app : str
        Folder of the app's copy.
    log : str
        File for everything that the app prints.
    config : Mapping[str, Any]
        The app's settings.
    clients, rounds : int
    seconds : float
        Longest time of a run.
    random_data : bool
        True if random rows take the place of ``flwr_datasets``.
    columns : Mapping[str, Column]
        Columns of the random rows, by name.
    """

    app: str
    log: str
    config: Mapping[str, Any]
    clients: int
    rounds: int
    seconds: float
    random_data: bool
    columns: Mapping[str, Column]


@dataclass(kw_only=True)
class Probes:
    """The runs of one check, by name.

    Parameters
    ----------
    app : AppFolder
    server, client
        The app's two sides, loaded from ``app``.
    request : ProbeRequest
    instruments : Instruments
    log : Callable
        Returns what the app printed since the last call.
    tell : Callable
        Shows the user a text on how long the check takes.
    """

    app: AppFolder
    server: ServerApp
    client: ClientApp
    request: ProbeRequest
    instruments: Instruments
    log: Callable[[], str]
    tell: Callable[[str], object] = lambda text: None
    runs: dict[str, Observed | None] = field(default_factory=dict)
    _facts: AppTraits | None = None

    @property
    def real(self) -> Observed:
        """The first run, in which clients learn; it exists once that run has ended in time."""
        real = self.runs[REAL]
        assert real is not None
        return real

    @property
    def traits(self) -> AppTraits:
        """The traits of the app, which the check recognised in its first run."""
        assert self._facts is not None
        return self._facts

    @property
    def comparable(self) -> range:
        """The rounds in which a held run has noise with the same standard deviation as the app."""
        rounds = self.request.rounds if self.traits.rounds_alike else 1
        return range(1, rounds + 1)

    def run(
        self, name: str, seed: int, change: Change = "", *, quiet: bool = False
    ) -> Observed | None:
        """Run the app once in a process of its own; None if the run does not end in time.

        The first run, named `REAL`, lets clients learn. All other runs are held (see `HeldRun`).
        """
        real = self.runs.get(REAL)
        held = None if real is None else HeldRun(template=real.template, change=change, quiet=quiet)
        watch = Watch(seed=seed, rounds=self.request.rounds, held=held, place=self.app.place)
        start = time.monotonic()
        result = in_fork(partial(self._observed, watch), seconds=self.request.seconds)
        observed = self.runs[name] = None if result is None else result[0]
        if name == REAL and (taken := time.monotonic() - start) > _LONG:
            self.tell(
                f"The app's first run took {taken:.0f} s; up to 9 follow, most of them faster"
            )
        if result is None or observed is None:
            return None
        if name == REAL:
            self._facts = result[1]
        observed.log = self.log()
        return observed

    def _observed(self, watch: Watch) -> tuple[Observed, AppTraits | None]:
        """Run the app; return what was observed and, after the first run, the app's traits."""
        self.instruments.watch = watch
        observed = observe(
            self.server, self.client, self.request.config, self.request.clients, watch
        )
        if REAL in self.runs:
            return observed, None
        return observed, traits_of(self.instruments, self.client, observed)

    def run_all(self) -> None:
        """Make all held runs, which follow the first run."""
        self.run(AGAIN, 1)
        self.run(OTHER, 2)
        for change in ("nan", "raise"):
            self.run(change, 1, change)
        self.run(QUIET, 1, quiet=True)
        self.run("huge", 1, "huge", quiet=True)
        if not self.traits.has_task:
            self.run("huge, other", 2, "huge")
            self.run("heavy", 1, "huge and heavy", quiet=True)
            self.run("zero", 1, "zero")

    @property
    def is_exact(self) -> bool:
        """True if the difference between two quiet runs (`HeldRun.quiet`) shows no noise.

        Either quiet runs have no noise, or all runs with the same seed have the same noise.
        """
        one, other = self.runs.get(AGAIN), self.runs.get(QUIET)
        if one is None or other is None or len(one.releases) != len(other.releases):
            return False
        ones, others = one.uploads(1), other.uploads(1)
        steps: list[Vector | None] = [*others.values()] or [other.step(1)]
        if all(step is not None and step.norm <= 2 * HELD for step in steps):
            return True
        return ones.keys() == others.keys() and all(
            np.array_equal(left.sample, right.sample)
            for left, right in zip(
                [*one.releases, *ones.values()], [*other.releases, *others.values()], strict=True
            )
        )

    def seen(self, name: str) -> Observed:
        """Return the run ``name``; an empty one if the run was not made or did not end in time."""
        return self.runs.get(name) or Observed()

    def upload_noise(self, one: str, other: str, round: int) -> dict[int, np.ndarray]:
        """Return the differences between two runs' uploads in one round, by partition.

        If no client takes part in both runs, the method compares different clients. This is right
        in held runs, because there all clients send the same public update.
        """
        left, right = self.seen(one).uploads(round), self.seen(other).uploads(round)
        if one != REAL and not left.keys() & right.keys():
            right = dict(zip(left, right.values(), strict=False))
        return {
            client: left[client].sample - right[client].sample
            for client in left.keys() & right.keys()
            if left[client].finite and right[client].finite
        }

    def target_noise(self, one: str, other: str, round: int) -> np.ndarray | None:
        """Return the difference between the changed client's uploads in two runs."""
        left, right = (self.seen(name).target_upload(round) for name in (one, other))
        if left is None or right is None or not (left.finite and right.finite):
            return None
        return np.asarray(left.sample - right.sample)

    def release_noise(self, one: str, other: str, round: int) -> np.ndarray | None:
        """Return the difference between what two runs released in one round."""
        left, right = (self.seen(name).step(round) for name in (one, other))
        return None if left is None or right is None else np.asarray(left.sample - right.sample)

    def cohort(self, name: str, round: int) -> int:
        """Return the number of clients that a run asked in a round."""
        return len(self.seen(name).cohort(round))

    def bound(self, round: int, cohort: float, *, by_client: bool) -> float | None:
        """Return the norm to which a huge update was clipped; None if no quiet run shows it.

        ``by_client`` is True if the clients clip their uploads, and False if the server does.
        """
        if not self.is_exact:
            return None
        if by_client and (upload := self.seen("huge").target_upload(round)):
            return upload.norm
        moved = self.movement("huge", round)
        return abs(moved) * cohort + HELD if moved is not None and cohort else None

    def upload_growth(self, name: str, round: int) -> float | None:
        """Return how far the changed client's upload is from a usual upload, along `direction`.

        The usual upload is the median in a quiet run. None if an upload is missing.
        """
        left, right = self.seen(name).target_upload(round), self.seen(QUIET).uploads(round)
        if left is None or not left.finite or not right:
            return None
        return left.along - float(np.median([upload.along for upload in right.values()]))

    def upload_change(self, name: str, other: str, round: int) -> float | None:
        """Return the distance between the uploads of the changed client in two runs.

        None if the uploads of another client differ, because the runs then differ in more than the
        change.
        """
        left, right = self.seen(name).uploads(round), self.seen(other).uploads(round)
        target = self.seen(name).target(round)
        if target is None or left.keys() != right.keys() or target not in left:
            return None
        distances = {client: left[client].minus(right[client]) for client in left}
        changed = distances.pop(target)
        if not changed.finite or any(distance.norm for distance in distances.values()):
            return None
        return float(changed.norm * (changed.size / changed.sample.size) ** 0.5)

    def movement(self, name: str, round: int) -> float | None:
        """Return how far along `direction` one changed client moves the model in a round."""
        changed, held = self.seen(name).step(round), self.seen(QUIET).step(round)
        return None if changed is None or held is None else changed.along - held.along

    def unit_movement(self, round: int, cohort: float) -> float | None:
        """Return how far one unit moves the sum of a round, if several clients have its records.

        The method compares the uploads of two runs if the check sees uploads, and the released
        means if not. Uploads come first because the server may refuse a huge upload.
        """
        huge, quiet = self.seen("huge"), self.seen(QUIET)
        left, right = huge.uploads(round), quiet.uploads(round)
        if left and left.keys() == right.keys():
            parts, factor = [left[client].minus(right[client]) for client in left], 1.0
        else:
            changed, held = huge.step(round), quiet.step(round)
            if changed is None or held is None:
                return None
            parts, factor = [changed.minus(held)], cohort
        moved = np.linalg.norm(np.sum([part.sample for part in parts], axis=0))
        skipped = parts[0].size / parts[0].sample.size
        return float(moved * factor * skipped**0.5) if all(p.finite for p in parts) else None


def exceeds(value: float, bound: float, stddev: float) -> bool:
    """Return True if ``value`` exceeds ``bound`` by more than noise and rounding explain.

    ``value`` is how far a client moved an upload or the model along `direction`.
    """
    return value > bound * 1.01 + 2 * HELD + _DEVIATIONS * stddev * 2**0.5
