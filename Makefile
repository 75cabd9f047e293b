# The table of contents: `make help`. Every target makes the environment first if it is missing, and may be run again.
#
#   PYTHON=/path/to/python3.11   instead of the one that is found
#   BUILD=cpu|cuda               instead of the guess (cuda where nvidia-smi answers or on Python 3.12)
#   TORCH_INDEX=URL              index with PyTorch's CPU wheels, where the usual one has none

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo test test-long chaos check bench bench-gpu clean cluster-up cluster-down

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXAMPLE := docs/examples/arithmetic-moe.toml
export PYTHONSAFEPATH := 1
export OMP_NUM_THREADS ?= 1

help:  ## this list
	@grep -hE '^[a-z-]+:.*  ## ' Makefile | sed -E 's/^([a-z-]+):.*  ## (.*)/  make \1\t\2/' | expand -t 22

install: $(STAMP)  ## the environment in .venv (3 to 5 minutes, 3 GB)

demo: $(STAMP)  ## the main job on this machine: a tiny MoE learns arithmetic; a report and a picture
	requirements/demo.sh $(EXAMPLE)

test: $(STAMP)  ## all tests but the long ones
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not long"

test-long: $(STAMP)  ## learning and other long tests; the result goes to docs/benchmarks
	$(BIN)/pytest -m long

chaos: $(STAMP)  ## a run that is hit by forty faults, against one that is not (17 minutes on two cores)
	$(BIN)/python tests/chaos/run.py

check: $(STAMP)  ## style, shell scripts, types, import rules, sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck .ci/run requirements/*.sh slurm/*.sh tests/launchers/golden/*.sbatch tests/launchers/golden/*.sh
	rm -rf build && $(BIN)/pip install --quiet --no-deps --no-build-isolation --target build/wheel .
	cd build/wheel && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p miles_hpc
	cd build/wheel && MYPYPATH=$(CURDIR)/tests/train $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml $(CURDIR)/tests/bench
	$(BIN)/pytest tests/test_imports.py tests/test_sizes.py

bench: $(STAMP)  ## benchmarks, each beside its baseline; results go to docs/benchmarks
	$(BIN)/python tests/bench/all.py

bench-gpu: $(STAMP)  ## the same on one or more GPUs: generation, training, exactness, sync
	$(BIN)/python tests/bench/gpu.py

cluster-up: $(STAMP)  ## a private Slurm of virtual nodes
	$(BIN)/miles-submit cluster up

cluster-down: $(STAMP)  ## stop it
	$(BIN)/miles-submit cluster down

clean:  ## remove the environment and what tools left; runs/ and the private cluster stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml $(wildcard requirements/*)
	PYTHON="$(PYTHON)" BUILD="$(BUILD)" TORCH_INDEX="$(TORCH_INDEX)" requirements/install.sh $(VENV)
	touch $@
