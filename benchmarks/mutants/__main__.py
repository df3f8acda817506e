"""Faults planted in what guarantees rest on: list those that the tests miss.

    python -m benchmarks mutants --seed 0 --number 300

Each fault is planted alone in a copy of the project, where the tests of its module run until the
first one fails. A fault that makes them run several times as long counts as found. ``tests.toml``
lists the tests of each module. ``equivalent.toml`` lists faults that no test can find, with
reasons; entries whose line has changed since are reported.
"""

import random

from scipy import stats

from benchmarks.command_line import command_parser
from benchmarks.mutants.catalogue import (
    EQUIVALENT,
    TESTS,
    all_mutants,
    reason_not_to_find,
    stale_entries,
)
from benchmarks.mutants.running import missed_mutants


def main() -> None:
    """Plant faults, run tests, and print the share that was found."""
    parser = command_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--number", type=int, default=300, help="faults, over all modules")
    parser.add_argument("--module", choices=TESTS, action="append", help="only this; repeatable")
    arguments = parser.parse_args()
    everything = all_mutants(arguments.module or TESTS)
    number = min(arguments.number, len(everything))
    sample = random.Random(arguments.seed).sample(everything, number)
    sample.sort(key=lambda mutant: (mutant.module, mutant.fault.start))
    print(f"{number} of {len(everything)} faults, seed {arguments.seed}", flush=True)
    missed = missed_mutants(sample)
    reasons = {mutant: reason_not_to_find(mutant) for mutant in missed}
    for mutant, reason in reasons.items():
        old, new = mutant.change
        place = f"flower_ext/{mutant.module}:{mutant.line}"
        print(f"\n{place}: {reason or 'NOT FOUND'}\n- {old}\n+ {new}")
    found = number - len(missed)
    print(f"\nfound: {_share(found, number)}")
    if any(reasons.values()):
        can_be_found = found + list(reasons.values()).count("")
        print(f"of those that can be found: {_share(found, can_be_found)}")
    for entry in stale_entries():
        print(f"{EQUIVALENT.name} is stale: {entry['module']} has no such fault in {entry['line']}")


def _share(found: int, number: int) -> str:
    """Return a share with its Clopper–Pearson interval at 95 %."""
    interval = stats.binomtest(found, number).proportion_ci(method="exact")
    share = found / number
    return f"{found} of {number}, {share:.0%} (95 %: {interval.low:.0%} to {interval.high:.0%})"


if __name__ == "__main__":
    main()
