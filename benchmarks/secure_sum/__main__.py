"""Secure sums: processor time and bytes, beside Flower's legacy SecAgg+.

    python -m benchmarks secure-sums

Each row is one round in this process, with every tenth client lost after sharing. Times are
processor seconds; a client's time excludes its training. ``--clients 100`` takes a larger cohort
instead of the default of 10 clients.
"""

import logging
from itertools import product, starmap

from benchmarks.command_line import command_parser
from benchmarks.secure_sum import legacy, ours
from flower_ext.runs.page import table

LENGTHS = (10_000, 667_402)
HEADER = (
    *("clients", "parameters", "a client, s", "SecAgg+", "the server, s", "SecAgg+"),
    *("bytes a number", "SecAgg+", "other bytes"),
)


def main() -> None:
    """Measure each cohort and length, and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[10], help="sizes of cohorts")
    parser.add_argument(
        "--parameters", type=int, nargs="+", default=LENGTHS, help="lengths of vectors"
    )
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    print(table(HEADER, starmap(row, product(arguments.clients, arguments.parameters))))


def row(members: int, length: int) -> list[str]:
    """Run a round of both protocols with the same number of neighbours and threshold."""
    package_cost = ours.round_cost(members, length)
    masked = ours.mechanism_of(members).masked
    assert masked is not None
    sums = masked.parameters
    legacy_cost = legacy.round_cost(members, sums.num_neighbors, sums.threshold, length)
    return [
        f"{members:,}",
        f"{length:,}",
        f"{package_cost.client:.3g}",
        f"{legacy_cost.client:.3g}",
        f"{package_cost.server:.3g}",
        f"{legacy_cost.server:.3g}",
        f"{package_cost.vector_bytes / length:.2f}",
        f"{legacy_cost.vector_bytes / length:.2f}",
        f"{package_cost.extra_bytes:,.0f}",
    ]


if __name__ == "__main__":
    main()
