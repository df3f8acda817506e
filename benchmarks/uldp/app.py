"""The app ``apps/uldp-fl``, whose data sets these benchmarks use."""

from importlib import import_module

from benchmarks.runs import APPS
from flower_ext.federation.engines.run_app import load_app

load_app(APPS / "uldp-fl")
_silos = import_module("uldp_fl_app.silos")
describe_silos, load_silos = _silos.describe_silos, _silos.load_silos
