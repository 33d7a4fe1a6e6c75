# Everything happens in .venv inside the checkout; nothing outside of it is changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_VENV := .venv-bench
BENCH_READY := $(BENCH_VENV)/.ready
BENCH ?=
FAST ?= -m 'not slow and not wide'
# Three files at a time, each with its own cluster: much of a test's time goes into waiting for processes. In the order
# given: the long ones first. Which they are is told at the end.
SIDE_BY_SIDE ?= -n 3 --dist loadfile --no-loadscope-reorder --durations=60 --durations-min=5

# All but the pure tests, those first that take longest.
OTHERS := $(addprefix tests/,ray processes one_rank store memory verification tensors kube)

# For tests of real processes. With ELASTIC_TESTS_AGAIN those that failed are run once more, one after another on a machine
# that does nothing else; it fails where none had failed (pytest itself did), or one does again.
AGAIN = || { code=$$?; [ -n "$$ELASTIC_TESTS_AGAIN" ] && [ $$code = 1 ] || exit $$code; \
	echo "once more, alone: the tests that failed"; \
	env -u ELASTIC_TESTS_UNTIL $(BIN)/python -m pytest -v -rfEs --last-failed --last-failed-no-failures none

# One thread per process: the tests start many processes on few cores.
export OMP_NUM_THREADS ?= 1
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO ?= 0
export RAY_USAGE_STATS_ENABLED ?= 0
# Else each of them would compile all that it imports, and the tests', by itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo lab test test-all wide slow faults soak unit lint bench verification wheel clean

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

# DEMO=--links: links that change, and what each way of the gradients costs on them.
DEMO ?=
demo: $(READY)
	$(BIN)/python examples/demo.py $(DEMO)

# Gradients on their way, predicted and measured. LAB='--full' trains DistilBERT itself.
LAB ?=
lab: $(READY)
	cd examples && ../$(BIN)/python -m lab $(LAB)

test: lint unit
	$(BIN)/python -m pytest -q $(SIDE_BY_SIDE) $(OTHERS) $(FAST) $(AGAIN) $(OTHERS) $(FAST); }

# What `make test` leaves out of the levels that start processes (tests/first.yaml) but for the slow ones.
WIDE := $(OTHERS) -m 'wide and not slow'
wide: $(READY)
	$(BIN)/python -m pytest -q -rfEs $(SIDE_BY_SIDE) $(WIDE) $(AGAIN) $(WIDE); }

# With the wide and the slow tests, and the oracle through real kills for every ZeRO stage, type, optimizer, dropout and
# source: 64 runs instead of 6.
test-all: export ELASTIC_ORACLE := full
test-all: FAST :=
test-all: test

# What is left out by both but for the oracle. First what no other test shows: each fault, whole runs; then the rest of
# wide matrices, of which `make test` has run a part.
SLOW := tests/faults $(OTHERS) tests/simulation tests/unit
slow: $(READY)
	$(BIN)/python -m pytest -q -rfEs $(SIDE_BY_SIDE) $(SLOW) -m slow $(AGAIN) $(SLOW) -m slow; }

# The pure tests: no Ray, no training processes.
unit: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal tests/simulation tests/unit $(FAST)

# One run through each kind of fault, and the table of what it cost.
faults: $(READY)
	$(BIN)/python -m pytest -q tests/faults

# The failures of 400 servers in a year, in so many hours, on a local cluster.
HOURS ?= 2
soak: $(READY)
	ELASTIC_SOAK_HOURS=$(HOURS) $(BIN)/python -m pytest -q tests/faults/test_soak.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The peers want packages that the project does not: an environment of their own. BENCH='--case recovery --quick' runs one.
bench: $(BENCH_READY)
	$(BENCH_VENV)/bin/python -m benchmarks $(BENCH)

$(BENCH_READY): benchmarks/peers.txt pyproject.toml
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --requirement benchmarks/peers.txt
	$(BENCH_VENV)/bin/python -m pip install --quiet --editable .
	touch $@

# Mutation tests of the verification: known bugs of resharders, each injected and caught; a thousand healthy reshards pass.
verification: $(READY)
	cd tests && ../$(BIN)/python -m verification --reshards 1000

# dist/ray_elastic-VERSION-py3-none-any.whl
wheel: $(READY)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) $(BENCH_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
