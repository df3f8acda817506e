"""The app ``apps/uldp-fl``, whose data sets these benchmarks use."""

from importlib import import_module
from pathlib import Path

from flower_ext.federation.engines.run_app import load_app

APP = Path(__file__).parents[2] / "apps" / "uldp-fl"
load_app(APP)
_silos = import_module("uldp_fl_app.silos")
describe_silos, load_silos = _silos.describe_silos, _silos.load_silos
