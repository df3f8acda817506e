"""Start an experiment: ``python -m benchmarks NAME [options]``.

Without a name, list the experiments. ``python -m benchmarks NAME --help`` lists one's options.
"""

import ast
import runpy
import sys
from pathlib import Path

EXPERIMENTS = {
    "dp2-fedsam": "dp2_fedsam",
    "finetuning": "finetuning",
    "mechanisms": "mechanisms",
    "correlated": "correlated",
    "upcycled-fl": "upcycled",
    "dp-ditto": "ditto",
    "uldp-fl": "uldp",
    "private-weighting": "weighting.rounds",
    "paillier": "weighting.paillier",
    "weighting-figures": "weighting.figures",
    "ring-lwe": "weighting.ring_lwe",
    "secure-sums": "secure_sum",
    "statistics": "released_statistics",
    "study": "study",
    "sharing": "sharing",
    "speed": "speed",
    "trainings": "speed.trainings",
    "memory": "speed.memory",
    "dp-sgd": "speed.dp_sgd",
    "language": "speed.language",
    "guard": "guard",
    "faults": "faults",
    "report": "report",
    "mutants": "mutants",
}
"""Modules below ``benchmarks``, by the names of their experiments."""


def main() -> None:
    """Start the named experiment, or list all of them."""
    name, *options = sys.argv[1:] or [""]
    if name in EXPERIMENTS:
        sys.argv = [f"python -m benchmarks {name}", *options]
        runpy.run_module(f"benchmarks.{EXPERIMENTS[name]}", run_name="__main__")
        return
    for known, module in EXPERIMENTS.items():
        print(f"{known:18} {purpose(module)}")
    if name not in ("", "-h", "--help"):
        sys.exit(f"{name!r}: expected one of these experiments")


def path_of(module: str) -> Path:
    """Return the file that runs if the module below ``benchmarks`` is started."""
    path = Path(__file__).parent / Path(*module.split("."))
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def purpose(module: str) -> str:
    """Return the first line of a module's docstring, without importing the module."""
    docstring = ast.get_docstring(ast.parse(path_of(module).read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


if __name__ == "__main__":
    main()
