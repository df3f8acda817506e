"""Run an app several times, with new random numbers or one changed client."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_ext_check.app_folder import AppFolder
from flower_ext_check.forks import in_fork
from flower_ext_check.held_run import Change, HeldRun
from flower_ext_check.instruments import Instruments
from flower_ext_check.observe import Watch, observe
from flower_ext_check.observed import Observed
from flower_ext_check.recognise import AppTraits, traits_of
from flower_ext_check.request import CheckRequest
from flower_ext_check.vectors import HELD_NORM, Vector


class RunName(StrEnum):
    """The runs of one check.

    Clients learn only in the run ``REAL``. All other runs are held (see `held_run`). In ``HELD``
    and ``OTHER_SEED``, no client is changed. Other names say what the changed client does.
    """

    REAL = "real"
    HELD = "held"
    OTHER_SEED = "other seed"
    QUIET = "quiet"
    NAN = "nan"
    RAISE = "raise"
    HUGE = "huge"
    HUGE_OTHER_SEED = "huge, other seed"
    HEAVY = "heavy"
    ZERO = "zero"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The options in which one run differs from the others."""

    seed: int
    """Seed of the app's random numbers."""
    change: Change = ""
    quiet: bool = False
    for_tasks: bool = True
    """If False, clients that train a task of this package skip the run (`AppTraits.has_task`)."""


RUNS = {
    RunName.REAL: Probe(seed=1),
    RunName.HELD: Probe(seed=1),
    RunName.OTHER_SEED: Probe(seed=2),
    RunName.NAN: Probe(seed=1, change="nan"),
    RunName.RAISE: Probe(seed=1, change="raise"),
    RunName.QUIET: Probe(seed=1, quiet=True),
    RunName.HUGE: Probe(seed=1, change="huge", quiet=True),
    RunName.HUGE_OTHER_SEED: Probe(seed=2, change="huge", for_tasks=False),
    RunName.HEAVY: Probe(seed=1, change="heavy", quiet=True, for_tasks=False),
    RunName.ZERO: Probe(seed=1, change="zero", for_tasks=False),
}
"""All runs, in the order in which a check makes them."""


@dataclass(kw_only=True)
class Probes:
    """The runs of one check, by name."""

    app: AppFolder
    server: ServerApp
    client: ClientApp
    request: CheckRequest
    instruments: Instruments
    runs: dict[RunName, Observed | None] = field(default_factory=dict)
    traits: AppTraits = field(init=False)
    """The traits of the app, which the check recognises in its first run."""

    @property
    def real(self) -> Observed:
        """The observations of the first run, in which clients learn. That run must have ended."""
        real = self.runs[RunName.REAL]
        assert real is not None
        return real

    @property
    def comparable(self) -> range:
        """The rounds in which the noise of a held run has the promised standard deviation."""
        return range(1, (self.request.rounds if self.traits.rounds_alike else 1) + 1)

    def run(self, name: RunName) -> Observed | None:
        """Run the app once in a separate process; return None if it crashes or takes too long."""
        probe, real, request = RUNS[name], self.runs.get(RunName.REAL), self.request
        held = (
            None
            if real is None
            else HeldRun(template=real.template, planned_change=probe.change, quiet=probe.quiet)
        )
        watch = Watch(app=self.app, seed=probe.seed, rounds=request.rounds, held=held)
        self.instruments.watch = watch

        def watched() -> tuple[Observed, AppTraits | None]:
            seen = observe(self.server, self.client, request.config, request.clients, watch)
            return seen, traits_of(self.instruments, self.client, seen) if held is None else None

        observed, traits = in_fork(watched, seconds=request.seconds) or (None, None)
        self.runs[name] = observed
        if observed is not None and traits is not None:
            self.traits = traits
            observed.log = request.log.read_text(encoding="utf-8", errors="replace")
        return observed

    def run_all(self) -> None:
        """Make all held runs, which follow the first run."""
        for name, probe in RUNS.items():
            if name is not RunName.REAL and (probe.for_tasks or not self.traits.has_task):
                self.run(name)

    @property
    def is_exact(self) -> bool:
        """True if the difference between two quiet runs (`HeldRun.quiet`) shows no noise.

        Either quiet runs have no noise, or all runs with the same seed have the same noise.
        """
        one, other = self.runs.get(RunName.HELD), self.runs.get(RunName.QUIET)
        if one is None or other is None or len(one.releases) != len(other.releases):
            return False
        ones, others = one.uploads(1), other.uploads(1)
        steps: list[Vector | None] = [*others.values()] or [other.step(1)]
        if all(step is not None and step.norm <= 2 * HELD_NORM for step in steps):
            return True
        return ones.keys() == others.keys() and all(
            np.array_equal(left.sample, right.sample)
            for left, right in zip(
                [*one.releases, *ones.values()], [*other.releases, *others.values()], strict=True
            )
        )

    def seen(self, name: RunName) -> Observed:
        """Return the run ``name``; an empty one if the run was not made or did not end in time."""
        return self.runs.get(name) or Observed()

    def movement(self, name: RunName, round: int) -> float | None:
        """Return how far along `direction` one changed client moves the model in a round."""
        changed, held = self.seen(name).step(round), self.seen(RunName.QUIET).step(round)
        return None if changed is None or held is None else changed.along - held.along
