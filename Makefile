# simkit: `make verify` proves the kernels against the model, `make test` runs the tests.
# Every target sets up .venv by itself.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# On a machine with an NVIDIA driver, verify adds the CuPy for the CUDA version that the driver supports.
CUDA_MAJOR := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9][0-9]*\).*/\1/p' | head -n 1)
CUPY_EXTRA := $(if $(CUDA_MAJOR),$(if $(shell [ $(CUDA_MAJOR) -ge 13 ] && echo yes),cuda13,cuda12))

.PHONY: docs help setup verify test proof lint bench clean

help:
	@echo "make verify   prove the CUDA kernels against the NumPy model (on the GPU if there is one)"
	@echo "make test     run the tests"
	@echo "make proof    the full tier of the arithmetic's tests (minutes)"
	@echo "make lint     ruff and mypy"
	@echo "make bench    timings of the executor"
	@echo "make docs     write docs/ptx-support.md, docs/published.md and docs/pictures"
	@echo "make clean    remove .venv and caches"

setup: $(VENV)/.ready-dev

# The stamps depend on pyproject.toml alone: sources are used in place.
$(VENV)/.ready: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable .$(if $(CUPY_EXTRA),[$(CUPY_EXTRA)])
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev,triton]"
	@touch $@

verify: $(VENV)/.ready
	@$(BIN)/simkit verify

test: $(VENV)/.ready-dev
	@$(BIN)/python -m pytest -n auto

proof: $(VENV)/.ready-dev
	@$(BIN)/python -m pytest tests/simkit/numerics -m proof -n 2 --durations=5

lint: $(VENV)/.ready-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(VENV)/.ready-dev
	@$(BIN)/python -m pytest tests/bench --benchmark-only --benchmark-columns=min,median,rounds

docs: $(VENV)/.ready
	@$(BIN)/python -m gpu.ptx.support
	@$(BIN)/python -m simkit.cli.pictures docs/pictures
	@$(BIN)/simkit report published --markdown docs/published.md

clean:
	rm -rf $(VENV) .simkit .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks build *.egg-info
