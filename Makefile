# Two commands matter: `make demo` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find src -name '*.py' -o -name '*.cpp' -o -name '*.h') pyproject.toml CMakeLists.txt

.PHONY: demo test test-long lint types native bench format clean

demo: $(VENV)/.installed
	$(BIN)/brickline demo

test: $(VENV)/.test-installed lint types native
	$(BIN)/python -m pytest -q -m "not long"

test-long: $(VENV)/.test-installed
	$(BIN)/python -m pytest -q -m long

lint: $(VENV)/.test-installed
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples

types: $(VENV)/.test-installed
	$(BIN)/mypy

native: $(VENV)/.test-installed
	$(BIN)/python tests/native/run_sanitized.py

bench: $(VENV)/.bench-installed
	$(BIN)/brickline bench

format: $(VENV)/.test-installed
	$(BIN)/ruff check --fix src tests benchmarks examples
	$(BIN)/ruff format src tests benchmarks examples

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet .
	touch $@

$(VENV)/.test-installed: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet ".[test]"
	touch $(VENV)/.installed $@

$(VENV)/.bench-installed: $(VENV)/.test-installed
	$(BIN)/python -m pip install --quiet ".[bench]"
	touch $@

clean:
	rm -rf $(VENV) build dist
