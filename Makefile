# make demo   plan a real model, run the plan on two local processes, compare
# make test   ruff, mypy, import-linter and the tests without the slow ones
# Both create .venv and install into it first, once.

export OMP_NUM_THREADS := 1

PYTHON ?= python3
BIN := .venv/bin
DEMO := build/demo

.PHONY: demo test test-all lint clean
.DEFAULT_GOAL := test

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv/installed
	mkdir -p $(DEMO)
	$(BIN)/autopipe plan examples/gpt2.py --devices 2 --global-batch 8 --replicas 1 -o $(DEMO)/plan.json
	$(BIN)/autopipe check $(DEMO)/plan.json

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest

test-all: lint
	$(BIN)/pytest -m "not gpu"

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
