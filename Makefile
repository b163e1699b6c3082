# graphc: `make` shows the targets. Everything runs in $(VENV), which is made on first use.
VENV   ?= .venv
PYTHON ?= python3
JOBS   ?= 2
PY     := $(VENV)/bin/python
GRAPHC := $(VENV)/bin/graphc
STAMP  := $(VENV)/.installed

# whoever is done takes tests from the end of the other's: a file's fixtures are seldom made twice
WORKERS := --numprocesses $(JOBS) --dist worksteal

PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check --quiet -c constraints.txt

# one OpenMP thread: the tests compare single-threaded kernels, and two pools fight over few cores
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint check bench conformance clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP) ## set up .venv with graphc and its tools (VENV=... for another place)

$(STAMP): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e ".[dev,hf,bench,remote]"
	touch $@

demo: venv ## build, run and inspect the built-in model; a second time compiles nothing
	$(GRAPHC) demo

test: venv ## run the tests, those marked as heavy apart (JOBS=2 of them at a time)
	$(PY) -m pytest -m "not heavy" $(WORKERS)

lint: venv ## ruff, format, mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

check: lint ## lint, pyright, then all tests, heavy ones too
	$(VENV)/bin/pyright --pythonpath $(PY)
	$(PY) -m pytest $(WORKERS)

bench: venv ## time the dense workloads against every peer (takes hours; ROWS=regex for some)
	$(PY) benchmarks/dense.py --threads 1,2 --cold --json bench.json --rows "$(ROWS)" \
		--markdown docs/benchmarks.md

conformance: venv ## run the suites in SUITES=folder, print one table and one JSON
	@test -n "$(SUITES)" || { echo "usage: make conformance SUITES=folder" >&2; exit 2; }
	$(PY) benchmarks/suites.py "$(SUITES)" --json conformance.json

clean: ## remove .venv and what tools left behind (not the kernel cache: `graphc cache clear`)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
