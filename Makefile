# Every target makes the environment it needs, with python3 and pip only.
# Paths are relative, so a clone may live in a folder with spaces in its name.

PYTHON ?= python3
PYTHONS ?=
PYTEST_FLAGS ?=
# Number of test processes. A process runs whole files, because the tests of a file share
# compiled programs. 0 runs all in pytest's own process, for a debugger.
WORKERS ?= 2
# More flags for pip when the benchmarks' environment is made, for example another
# index to take the CPU build of torch from.
BENCH_PIP_FLAGS ?=
# Each demo gets its own folder, because a run is never overwritten.
DEMO ?= train configs/demo.toml --out results/demo-$(shell date +%Y%m%d-%H%M%S)

# More flags for the audits of `make trust`.
TRUST_AUDIT ?=

FIGURES := correlated designs draws iso_epsilon_demo iteration local_dp \
  poisson_against_without_replacement poisson_rdp product_rate shuffling stages

VENV := .venv
BENCH_VENV := .venv-bench
DOCS_VENV := .venv-docs
GPU_VENV := .venv-gpu
# The JAX of the device, for other than CUDA 12, and flags of `make bench-gpu`.
GPU_JAX ?= jax[cuda12]
GPU_FLAGS ?=
PY := $(VENV)/bin/python
# Tests start dozens of processes: without bytecode each compiles the package again.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest
# If XLA_FLAGS is set, even to nothing, the tests do not set flags of their own.
AS_USERS := XLA_FLAGS="$${XLA_FLAGS-}"
PARALLEL := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
BENCH_PY := $(BENCH_VENV)/bin/python
BENCH_PINS := experiments/benchmarks/requirements.txt
# MkDocs 1 is pinned; the variable hides the theme's notice about its end.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs

PYTHON_CHECK := import sys; sys.exit(sys.version_info < (3, 11) and \
  "Python 3.11 or later is needed, this is " + sys.version.split()[0] + \
  "; try make PYTHON=python3.12 ...")

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help env demo test test-all test-peers dist lint format bench bench-exact bench-sweep
.PHONY: bench-gpu bench-start bench-training figures docs docs-serve trust clean

help:
	@echo "make demo      train a few-shot classifier privately, stop at the target epsilon"
	@echo "make test      the fast tests"
	@echo "make test-all  every test, then the fast ones again with x64 on, and on JAX"
	@echo "make test-peers  tests of interop with opacus and torch, in the benchmarks' environment"
	@echo "make dist      sdist and wheel, each tested alone under every Python found"
	@echo "make lint      format, lint and types"
	@echo "make format    apply the formatter and the linter's safe fixes"
	@echo "make bench     speed against other accountants"
	@echo "make figures   the figures and tables of the documentation"
	@echo "make bench-start  time and memory of the first answer, against other accountants"
	@echo "make bench-exact  speed and error of the exact and certified methods against PLD and PRV"
	@echo "make bench-sweep  speed and memory of sweeps of up to ten million settings"
	@echo "make docs      the documentation as a site, into results/site"
	@echo "make docs-serve  the same at a local address, rebuilt at every change"
	@echo "make bench-training  speed of a private training step, from memory and from disk"
	@echo "make bench-gpu  tests, sweeps and training steps on an accelerator"
	@echo "make trust     audits, planted faults, kills and fuzzing at full counts: hours"

env: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c '$(PYTHON_CHECK)'
	$(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[plot,test,dev]'
	@touch $@

$(BENCH_VENV)/.stamp: pyproject.toml $(BENCH_PINS)
	@$(PYTHON) -c '$(PYTHON_CHECK)'
	$(PYTHON) -m venv --clear $(BENCH_VENV)
	$(BENCH_PY) -m pip install --quiet --disable-pip-version-check $(BENCH_PIP_FLAGS) \
	  --requirement $(BENCH_PINS) --editable .
	@touch $@

$(GPU_VENV)/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c '$(PYTHON_CHECK)'
	$(PYTHON) -m venv --clear $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[plot,sweep,test]' '$(GPU_JAX)'
	@touch $@

$(DOCS_VENV)/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c '$(PYTHON_CHECK)'
	$(PYTHON) -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[docs]'
	@touch $@

demo: $(VENV)/.stamp
	$(VENV)/bin/jaxdp-episodic $(DEMO)

test: $(VENV)/.stamp
	$(PYTEST) $(PARALLEL) -m "not slow" $(PYTEST_FLAGS)

test-all: $(VENV)/.stamp
	$(AS_USERS) $(PYTEST) $(PARALLEL) $(PYTEST_FLAGS)
	JAX_ENABLE_X64=1 $(PYTEST) $(PARALLEL) -m "not slow" $(PYTEST_FLAGS)
	JAXDP_EPISODIC_ENGINE=jax $(PYTEST) $(PARALLEL) -m "not slow" \
	  tests/accountant/methods tests/accountant/questions \
	  tests/accountant/losses tests/accountant/bounds $(PYTEST_FLAGS)

# Writes to dist/. PYTHONS names interpreters that are not on the path.
dist:
	$(PYTHON) experiments/dist.py --pythons $(PYTHONS)

# In the environment of `make test` there is no torch, and these tests are skipped.
test-peers: $(BENCH_VENV)/.stamp
	$(BENCH_PY) -m pytest tests/accountant/interop $(PYTEST_FLAGS)
	$(BENCH_PY) -m pytest tests/test_docs.py -k opacus $(PYTEST_FLAGS)

lint: $(VENV)/.stamp
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright --pythonpath $(PY)

format: $(VENV)/.stamp
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

figures: $(VENV)/.stamp
	@mkdir -p docs/images docs/tables
	@for name in $(FIGURES); do \
	  $(PY) experiments/figures.py $$name && \
	  cp results/$$name/*.png docs/images/ && \
	  cp results/$$name/$$name.json docs/tables/ || exit 1; done

docs: $(DOCS_VENV)/.stamp
	$(MKDOCS) build --strict

docs-serve: $(DOCS_VENV)/.stamp
	$(MKDOCS) serve

# Takes hours: attacks the library's claims at full counts and writes docs/trust.md.
# TRUST_AUDIT="--draws 2e4" makes the audits much shorter.
trust: $(VENV)/.stamp
	$(PY) experiments/trust/mutations.py --out results/trust/mutations
	$(PY) experiments/trust/fuzz.py --cases 100000 --out results/trust/fuzz
	$(PY) experiments/trust/kill_training.py --kills 200 --out results/trust/kills
	$(PY) experiments/trust/kill_distributed.py --kills 20 --out results/trust/distributed
	$(PY) experiments/trust/audit.py $(TRUST_AUDIT) --out results/trust/audit
	$(PY) experiments/trust/allocation.py --out results/trust/allocation
	$(PY) experiments/trust/page.py --results results/trust

bench: $(BENCH_VENV)/.stamp
	$(BENCH_PY) experiments/benchmarks/accountant.py --only grid million calibration one_by_one

# The peers' own start-up is in the same table.
bench-start: $(BENCH_VENV)/.stamp
	$(BENCH_PY) experiments/benchmarks/start.py --slow

bench-exact: $(BENCH_VENV)/.stamp
	$(BENCH_PY) experiments/benchmarks/accountant.py --only batch exact memory \
	  --out results/benchmark-exact

bench-sweep: $(VENV)/.stamp
	$(PY) experiments/benchmarks/sweep.py

bench-training: $(VENV)/.stamp
	$(PY) experiments/benchmarks/training.py
	$(PY) experiments/benchmarks/stored.py

# Without an accelerator it measures the CPU, and says so.
bench-gpu: $(GPU_VENV)/.stamp
	$(GPU_VENV)/bin/python experiments/benchmarks/gpu.py $(GPU_FLAGS)

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(DOCS_VENV) $(GPU_VENV) build dist .pytest_cache .ruff_cache .hypothesis
