# make demo   sets everything up, answers one prompt on the embedded model, and stops
# make test   lint, types, layers and the tests that need neither a GPU nor patience; test-all adds the slow ones
#
# VENV=DIR is the virtual environment (default .venv), PYTHON=python3.12 what makes it, VVLLM_BACKEND=cuda|cpu
# chooses the build of vLLM (default: what the machine has).

VENV ?= .venv
PYTHON ?= python3

BIN := $(VENV)/bin
CODE := daemon client shared tests tools/install $(wildcard benchmarks)
# Both stamps lie in the environment, so that they go with it.
INSTALLED := $(VENV)/.vvllm-installed
DEV_INSTALLED := $(VENV)/.vvllm-dev-installed

.PHONY: venv demo test test-all record lint clean-venv

venv: $(DEV_INSTALLED)

$(INSTALLED): pyproject.toml tools/install
	$(PYTHON) tools/install $(VENV)
	touch $@

$(DEV_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/vvllm-msd demo

lint: $(DEV_INSTALLED)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -m "not slow and not gpu"

# Tests that need a GPU skip themselves where there is none.
test-all: lint
	$(BIN)/python -m pytest

# What `vvllm-msd models` says, from runs on this machine; a GPU's come from pytest's --record there.
record: $(DEV_INSTALLED)
	$(BIN)/python -m pytest --record daemon/vvllm_msd/parity.json tests/unit/checkpoint \
	  tests/engine/test_parity.py tests/engine/test_format_parity.py tests/engine/test_layout_parity.py \
	  tests/engine/test_refusals.py

clean-venv:
	rm -rf $(VENV)
