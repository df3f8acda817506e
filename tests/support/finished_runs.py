"""Directories of finished runs with a ledger, guarantees and metrics."""

from flower_ext.privacy import Ledger, PoissonSampling, ReleasePlan
from flower_ext.privacy.theorems.dp2_fedsam_theorem import theorem2_of_run
from flower_ext.runs import RunDirectory, RunWriter
from tests.support.guarantees import client_level
from tests.support.run_summary import run_summary, worst_case

PLAN = ReleasePlan(
    sampling=PoissonSampling(100, 0.1),
    clipping_norm=0.1,
    noise_multiplier=1.1,
    rounds=4,
    delta=1e-2,
)


def finished(path, *, method="dp2-fedsam", accuracy=0.8, private=True, **config) -> RunDirectory:
    """Write a complete run directory with four rounds, and return it."""
    run = RunWriter.create(path, {"method": method, "dataset": "digits", **config})
    if private:
        ledger = Ledger(run.ledger_path)
        for number in range(1, 5):
            with ledger.reserve(PLAN.mechanism().release, server_round=number) as entry:
                entry.note(topped_up_stddev=0.1 if number == 2 else 0.0)
        ledger.close()
        seen = worst_case(4, 10)
        guarantees = client_level(PLAN.mechanism(), seen, not_covered=["test scores"])
        run.save_guarantees(
            [theorem2_of_run(PLAN.mechanism(), run_summary(rounds=4))[0], *guarantees]
        )
    for number in range(1, 5):
        epsilon = {"epsilon_provable": 0.3 * number, "epsilon_published": 1.1 * number}
        run.log(
            number,
            cohort=10,
            answered=9,
            refused=1,
            messages=19 * (number % 2),
            training_seconds=0.25,
            bytes_down=1e6,
            bytes_up=2e6,
            accuracy_mean=accuracy * number / 4,
            accuracy_worst_decile=accuracy * number / 8,
            **(epsilon if private else {}),
        )
    run.save_client_metrics([{"partition": i, "accuracy": accuracy - 0.01 * i} for i in range(10)])
    run.finish("completed")
    return run
