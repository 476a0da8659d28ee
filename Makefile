# Each target makes the environment that it needs; a change of pyproject.toml or constraints.txt renews it.
#
#   make quickstart                 the guided first run (core install only)
#   make test                       the test suite
#   make test-slow                  what it leaves out: clusters, four processes, runs of minutes
#   make chaos                      runs are killed, starved and damaged; each must end as if nothing had happened
#   make soak                       memory and log volume of a long tiny run
#
# Variables:
#   PYTHON       the interpreter that makes the environment (3.11 or later)
#   TORCH        the torch requirement; by default the release in constraints.txt
#   TORCH_INDEX  an extra package index for torch; set it to PyTorch's CPU index to get the small build without CUDA
#   ARGS         more arguments for `podium quickstart`, pytest or the benchmark
#   JOBS         test processes at once

PYTHON ?= python3
TORCH ?= $(shell grep '^torch' constraints.txt)
TORCH_INDEX ?=
ARGS ?=
JOBS ?= auto

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: help install quickstart test test-slow chaos soak lint format wheel bench clean
.DEFAULT_GOAL := help

help:
	@grep -E '^#  ' Makefile | cut -c3-
	@echo "  make install | lint | format | wheel | bench | clean"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The larger environments include the smaller: whoever has `dev` need not install `test` again.
$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) $(INDEX) "$(TORCH)" -e .
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) $(INDEX) "$(TORCH)" -e ".[test]"
	@touch $(VENV)/.core $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) $(INDEX) "$(TORCH)" -e ".[dev]"
	@touch $(VENV)/.core $(VENV)/.test $@

$(VENV)/.bench: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) $(INDEX) "$(TORCH)" -e ".[test,bench]"
	@touch $(VENV)/.core $(VENV)/.test $@

install: $(VENV)/.core

quickstart: $(VENV)/.core
	$(BIN)/podium quickstart $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(JOBS) --maxprocesses 4 --dist loadgroup -m "not slow" $(ARGS)

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow $(ARGS)

chaos: $(VENV)/.test
	$(BIN)/python benchmarks/chaos.py $(ARGS)

soak: $(VENV)/.test
	$(BIN)/python benchmarks/soak.py $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: $(VENV)/.dev
	$(BIN)/python -m build --wheel

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/cpu_grpo.py $(ARGS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	find podium tests -name __pycache__ -type d -prune -exec rm -rf {} +
