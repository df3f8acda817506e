"""Matrix products that round equally wherever a matrix lies in memory."""

import os
import subprocess
import sys

import pytest

from tests.support.grids import grid


def python(code, **environment):
    """Return the output of a new process."""
    variables = {**{k: v for k, v in os.environ.items() if k != "MKL_CBWR"}, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


ASK = """
from flower_ext.training.isolation import products_are_reproducible
print(products_are_reproducible())
"""
PRODUCTS = """
import torch
def everywhere(*shape):
    return torch.randn(1, *shape).expand(40, *shape).contiguous()
alike = []
for outputs, inputs, rows in ((3, 21, 16), (21, 63, 33), (5, 7, 9)):
    slopes, x = everywhere(outputs, rows), everywhere(rows, inputs)
    product = torch.zeros(40, outputs, inputs).baddbmm_(slopes, x)
    alike.append(torch.equal(product, product[:1].expand_as(product)))
print(all(alike))
"""


def test_if_imported_first_products_are_equal_in_every_batch_place():
    """The mode is on, and the products of equal models show it."""
    assert python(f"import flower_ext.training\n{ASK}{PRODUCTS}").split() == ["True", "True"]


@pytest.mark.parametrize("mode", grid(["COMPATIBLE", "AVX2"], lambda mode: mode == "AVX2"))
def test_a_mode_that_the_user_chose_stays(mode):
    code = f"""
import ctypes, pathlib, torch
mkl = ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
before = mkl.mkl_serv_cbwr_get(-1)
{ASK}
print(before == mkl.mkl_serv_cbwr_get(-1))
"""
    assert python(code, MKL_CBWR=mode).split() == ["True", "True"]
