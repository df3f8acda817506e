# make demo    install and compare three runs: training alone, together with privacy, together without
# make deploy  the same on SuperLink with four SuperNodes, TLS and registered keys, on this machine
# make quick   lint, types, and the tests and audits of what you changed: a minute
# make test    install and run the tests
# make test-core  train and run engines without any plug-in
# make test-all   also all cases of its grids (make grids), and the audits with many trials (make audits)
# make test-slow  and those of whole deployments, minutes each
# make nightly   the tests of federation and engines with the newest nightly of Flower
# make mutants    plant faults in what guarantees rest on, and count those that the tests find: hours
# make docs    build the site in site/, strictly; nothing is fetched to build or to read it
# make check   format, lint, types, layer rules, tests: all that a contributor needs

PYTHON ?= python3
# Elsewhere where this path has spaces: below it, Flower's SuperLink finds no tables.
VENV ?= $(if $(word 2,$(CURDIR)),$(HOME)/.cache/flower-ext/$(firstword $(shell pwd | cksum)),.venv)
ifneq ($(words $(VENV)),1)
$(error VENV=$(VENV): expected a path without spaces)
endif
BIN := $(VENV)/bin
RUNS ?= $(CURDIR)/runs

# A folder for each demo, because its comparison is of all runs inside.
DEMO := $(RUNS)/demo-$(shell date +%Y%m%d-%H%M%S)
# For example --set dataset=mnist --set data-folder=/path
DEMO_SETTINGS ?=
DEPLOY_SETTINGS ?= --set rounds=3 --set sampling=everyone --set partition=iid

# Flower's files of this checkout.
export FLWR_HOME ?= $(CURDIR)/.flwr
export FLWR_TELEMETRY_ENABLED ?= 0
export FLWR_DISABLE_UPDATE_CHECK ?= 1
# Tests start hundreds of processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo deploy quick test test-core test-all grids audits test-slow nightly mutants lint docs check format clean

install: $(VENV)/.installed

PLUGINS := $(sort $(dir $(wildcard plugins/*/pyproject.toml)))
# Tests need these extras of plugins/pretrained.
PRETRAINED_EXTRAS := [images,text]
INSTALLED_PLUGINS := $(patsubst %/pretrained,%/pretrained$(PRETRAINED_EXTRAS),$(PLUGINS:%/=%))

# The package alone, which is all that the demo needs.
$(VENV)/.package: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed: $(VENV)/.package $(PLUGINS:%=%pyproject.toml)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]' $(INSTALLED_PLUGINS:%=--editable './%')
	touch $@

# The machine code of plugins/kernels. Only its tests wait for it; runs train without it.
$(VENV)/.compiled: $(VENV)/.installed flower_ext/training/models/dropout.py $(wildcard plugins/kernels/flower_ext_kernels/*.py)
	@# One core compiles. Meanwhile another translates the tests, which each worker would do again.
	$(BIN)/pytest --collect-only -n 0 > /dev/null 2>&1 & \
		$(BIN)/python -m flower_ext_kernels; status=$$?; kill $$! 2> /dev/null; exit $$status
	touch $@

# Its model is so small that further threads would only wait for one another.
demo: export OMP_NUM_THREADS ?= 1
demo: $(VENV)/.package
	for method in alone dp-fedavg fedavg; do \
		$(BIN)/flower-ext run apps/demo --in-process --runs "$(DEMO)" --set method=$$method $(DEMO_SETTINGS) || exit; \
	done
	$(BIN)/flower-ext report "$(DEMO)"/* --output "$(DEMO)"

deploy: $(VENV)/.installed
	$(BIN)/python -m tests.support.deployment apps/dp2-fedsam --nodes 4 --runs "$(RUNS)" $(DEPLOY_SETTINGS)

quick: $(VENV)/.compiled
	$(BIN)/python -m tests.support.quick --base "$(BASE)"

# Further threads of tests that run side by side, and of their processes, would wait for one another.
quick test test-core grids audits nightly: export OMP_NUM_THREADS ?= 1

test: $(VENV)/.compiled
	$(BIN)/pytest

# Tests of what plug-ins change.
CORE = tests/test_plugins.py tests/training/batched tests/training/test_side_by_side.py \
	tests/federation/engines tests/federation/test_independence.py tests/federation/test_paths.py \
	$(addprefix tests/algorithms/uldp/test_,methods.py sensitivity.py noise_and_dropouts.py silo_training_in_parts.py refusals.py) \
	plugins/audit/tests/test_odd_units.py

test-core: install
	FLOWER_EXT_PLUGINS=none $(BIN)/pytest $(CORE)

test-all: test grids audits

grids: $(VENV)/.compiled
	$(BIN)/pytest -m 'full and not slow and not exhaustive'

audits: install
	$(BIN)/pytest -m exhaustive

test-slow: install
	$(BIN)/pytest -n 0 -m slow

NIGHTLY = $(VENV)-nightly

# Only Flower is installed anew; everything else is that of the environment above.
nightly: install
	$(PYTHON) -m venv --clear $(NIGHTLY)
	$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
		> $$($(NIGHTLY)/bin/python -c 'import site; print(site.getsitepackages()[0])')/zz_above.pth
	sed '1s|.*|#!$(abspath $(NIGHTLY))/bin/python|' $(BIN)/flower-ext > $(NIGHTLY)/bin/flower-ext
	chmod +x $(NIGHTLY)/bin/flower-ext
	$(NIGHTLY)/bin/pip install --quiet 'flwr-nightly>=1.41.0.dev0' 'certifi>=2026.10.19'
	$(NIGHTLY)/bin/python -m pytest tests/federation/engines tests/federation/test_strategy.py tests/federation/test_flower_private.py tests/apps/test_engines.py

SEED ?= 0
NUMBER ?= 300

mutants: install
	$(BIN)/python -m benchmarks mutants --seed $(SEED) --number $(NUMBER)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --clean

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

check: lint test

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(NIGHTLY) site .flwr .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
