"""Private weighting needs its extra, and neither PyTorch nor Flower."""

import subprocess
import sys

import pytest

from tests.support.imported_anew import run_anew


@pytest.mark.parametrize("missing", ["phe", "gmpy2", "nacl"])
def test_without_the_extra_the_error_says_what_to_install(missing):
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from flower_ext.secure.weighting.protocol import load_protocol\n"
        "load_protocol('paillier')"
    )
    done = run_anew(code, missing)
    assert done.returncode != 0
    assert f"private weighting needs {missing}: pip install 'flower-ext[weighting]'" in done.stderr


def test_the_package_does_without_torch_and_flower():
    code = "import flower_ext.secure, sys; print({'torch', 'flwr'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
