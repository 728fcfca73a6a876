# Two commands matter: `make demo` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); [ $$n -lt 4 ] && echo $$n || echo 4)
SOURCES := $(shell find src -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -path '*/assets/*') pyproject.toml CMakeLists.txt

.PHONY: demo test test-long lint types native bench pictures format clean

demo: $(VENV)/.installed
	$(BIN)/brickline demo

test: $(VENV)/.test-installed lint types native
	$(BIN)/python -m pytest -q -m "not long" -n $(JOBS) --dist loadfile

test-long: $(VENV)/.test-installed
	BRICKLINE_LONG=1 $(BIN)/python tests/native/run_sanitized.py
	$(BIN)/python -m pytest -q -m long

lint: $(VENV)/.test-installed
	$(BIN)/ruff check src tests benchmarks examples docs/pictures
	$(BIN)/ruff format --check src tests benchmarks examples docs/pictures

types: $(VENV)/.test-installed
	$(BIN)/mypy

native: $(VENV)/.test-installed
	$(BIN)/python tests/native/run_sanitized.py

bench: $(VENV)/.bench-installed
	$(BIN)/brickline bench

pictures: $(VENV)/.pictures-installed
	$(BIN)/python docs/pictures/make.py

format: $(VENV)/.test-installed
	$(BIN)/ruff check --fix src tests benchmarks examples docs/pictures
	$(BIN)/ruff format src tests benchmarks examples docs/pictures

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

$(VENV)/.pictures-installed: $(VENV)/.test-installed
	$(BIN)/python -m pip install --quiet ".[pictures]"
	touch $@

clean:
	rm -rf $(VENV) build dist
