# make run     set up .venv and generate text with the shipped model on two ranks
# make test    set up .venv and run the tests
# The rest is for development. A target that has been set up once starts at once.
#
# VENV=DIR            another virtual environment
# CONSTRAINTS=        the newest releases instead of the tested ones
# ARGS="-k lowering"  more arguments for pytest
# JOBS=N              test processes at once (3: tests of ranks and of faults mostly wait)

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
JOBS ?= 3
CONSTRAINTS ?= .ci/constraints.txt
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
PROMPT ?= And it came to pass in the days of

.PHONY: run test dev lint types fmt golden-update wheel clean

run: $(VENV)/.run
	$(BIN)/moec run examples/tiny/tiny.moe --prompt "$(PROMPT)" --max-new-tokens 48

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

fmt: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden-update: $(VENV)/.test
	$(BIN)/python -m pytest --update-golden $(ARGS)

wheel: $(VENV)/.dev
	$(BIN)/python -m build -o dist .

dev: $(VENV)/.dev

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# What each target needs, installed once; again only when pyproject.toml or the constraints change.
$(VENV)/.run: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.test: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) -e '.[test]'
	@touch $@ $(VENV)/.run

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) -e '.[test,dev]'
	@touch $@ $(VENV)/.test $(VENV)/.run

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "moec needs Python 3.11 or newer: set PYTHON=/path/to/it" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
