import subprocess
import sys

import numpy as np
import pytest

from flower_ext.secure import estimate_round
from flower_ext.secure.weighting.paillier import ZeroPool
from tests.support.weighting import World, weighting_settings


def test_bytes_are_those_of_the_messages():
    facts = weighting_settings(coordinates=7, coordinates_per_plaintext=2)
    world = World(facts, np.ones((3, 4), dtype=int))
    message = world.server.open_round(1)
    sums = world.weigh(message, *world.draw(np.random.default_rng(0)))
    estimate = estimate_round(facts)
    assert estimate.download_bytes == len(message.weights)
    assert {estimate.upload_bytes} == {len(sent.ciphertexts) for sent in sums}


def test_parts_add_up_and_those_that_do_not_happen_take_no_time():
    estimate = estimate_round(
        weighting_settings(coordinates_per_plaintext=1), users_per_silo=0, prepared=False
    )
    assert (estimate.fold, estimate.tables, estimate.pack, estimate.prepare) == (0, 0, 0, 0)
    assert estimate.silo == pytest.approx(estimate.products + estimate.rerandomise)
    assert estimate.server == pytest.approx(estimate.encrypt + estimate.decrypt)


def test_ten_times_the_coordinates_are_ten_times_the_operations(monkeypatch):
    monkeypatch.setattr(
        "flower_ext.secure.weighting.estimate._seconds", lambda work, *arguments: 1.0
    )
    few, many = (
        estimate_round(weighting_settings(coordinates=count, coordinates_per_plaintext=1))
        for count in (30_000, 300_000)
    )
    assert many.decrypt == pytest.approx(10 * few.decrypt)
    assert 9 < many.products / few.products < 10.01
    assert many.fold == few.fold
    assert few.prepare > ZeroPool.size(512)


def test_packing_trades_decryptions_and_bytes_for_squarings():
    alone, packed = (
        estimate_round(weighting_settings(coordinates=300, coordinates_per_plaintext=slots))
        for slots in (1, 2)
    )
    assert packed.upload_bytes * 2 == alone.upload_bytes
    assert packed.pack > alone.pack == 0


@pytest.mark.parametrize("missing", ["phe", "gmpy2", "nacl"])
def test_without_the_extra_the_error_says_what_to_install(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; import flower_ext.secure.weighting"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert (
        f"flower_ext.secure.weighting needs {missing}: pip install 'flower-ext[weighting]'"
        in done.stderr
    )


def test_the_package_does_without_torch_and_flower():
    code = "import flower_ext.secure, sys; print({'torch', 'flwr'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
