"""Matrix products that round equally wherever a matrix lies in memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.grids import grid

HERE = Path(__file__).parent
LIMITS = (
    "ATEN_CPU_CAPABILITY=default",
    "ATEN_CPU_CAPABILITY=avx2",
    "ONEDNN_MAX_CPU_ISA=SSE41",
    "ONEDNN_MAX_CPU_ISA=AVX2",
    "MKL_CBWR=COMPATIBLE",
    "MKL_CBWR=AVX2",
)
"""Instruction sets that other processors have."""


def python(code, **environment):
    """Return the output of a new process."""
    own = {**{k: v for k, v in os.environ.items() if k != "MKL_CBWR"}, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=own, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


ASK = """
from flower_ext.training.rounding import products_are_reproducible
print(products_are_reproducible())
"""
PRODUCTS = """
import torch
{first}
def everywhere(*shape):
    return torch.randn(1, *shape).expand(40, *shape).contiguous()
alike = []
for outputs, inputs, rows in ((3, 21, 16), (21, 63, 33), (5, 7, 9)):
    slopes, x = everywhere(outputs, rows), everywhere(rows, inputs)
    product = torch.zeros(40, outputs, inputs).baddbmm_(slopes, x)
    alike.append(torch.equal(product, product[:1].expand_as(product)))
print(all(alike))
"""


def test_equal_models_have_equal_products_in_every_place_of_a_batch():
    assert python(PRODUCTS.format(first="import flower_ext.training")) == "True"


def test_the_mode_is_on_where_this_package_comes_first():
    assert python(ASK) == "True"


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


LATE = """
import torch
torch.randn(64, 64) @ torch.randn(64, 64)
from torch import nn
from flower_ext.data import Examples
from flower_ext.training import LocalTraining, Task, trains_apart
from flower_ext.training.rounding import products_are_reproducible
shape = Examples(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
task = Task(model=lambda: nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU()), data=print, device="cpu")
print(products_are_reproducible(), trains_apart(task, shape, LocalTraining()))
"""


def test_where_it_comes_too_late_users_train_one_by_one():
    assert python(LATE) == "False True"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("limit", LIMITS)
def test_no_model_depends_on_its_company_with_any_instruction_set(limit, threads):
    name, _, value = limit.partition("=")
    environment = {**os.environ, name: value, "OMP_NUM_THREADS": threads}
    chosen = [str(HERE / "batched" / "test_many.py"), "-k", "where_asked_for", "-n", "0", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *chosen], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3_000:]
