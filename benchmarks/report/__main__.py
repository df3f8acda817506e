"""Result tables of the documentation, from rows of CSV files.

    python -m benchmarks report --collect uldp-fl RESULTS/runs     # completed runs become rows
    python -m benchmarks report --store RESULTS/sharing.csv        # rows of an output folder
    python -m benchmarks report                                    # rows become tables of pages

Rows are in ``benchmarks/results``. A page of ``docs`` has a table between the lines
``<!-- results NAME -->`` and ``<!-- end -->``.
"""

from pathlib import Path

from benchmarks.command_line import command_parser
from benchmarks.report.pages import pages, with_tables
from benchmarks.report.rows import COLUMNS, collect, copy_files


def main() -> None:
    """Publish rows with ``--collect`` or ``--store``; write the tables of all pages."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--collect", nargs=2, metavar=("APP", "RUNS"), help=f"APP: {', '.join(COLUMNS)}"
    )
    parser.add_argument(
        "--store", nargs="+", type=Path, default=[], metavar="CSV", help="files of output folders"
    )
    arguments = parser.parse_args()
    for path in arguments.store:
        if path.suffix != ".csv" or not path.is_file():
            parser.error(f"--store {path}: expected a CSV file")
    if arguments.collect:
        app, runs = arguments.collect
        if app not in COLUMNS:
            parser.error(f"--collect {app}: expected one of {', '.join(COLUMNS)}")
        for path in collect(app, Path(runs)):
            print(path)
    for path in copy_files(arguments.store):
        print(path)
    for page in pages():
        text = page.read_text(encoding="utf-8")
        changed = with_tables(text)
        if changed != text:
            page.write_text(changed, encoding="utf-8")
            print(page)


if __name__ == "__main__":
    main()
