# Two commands matter: `make demo` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One more than there are cores, up to four: many tests wait for a process, a page or a timer.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); [ $$n -lt 3 ] && echo $$((n + 1)) || echo 4)
PIP_BUILD := $(BIN)/python -m pip install --quiet --no-build-isolation --check-build-dependencies
SOURCES := $(shell find src -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -path '*/assets/*') pyproject.toml CMakeLists.txt

.PHONY: demo test test-long lint types native bench pictures format clean

demo: $(VENV)/.installed
	$(BIN)/brickline demo

# The sanitizers need no more than the tools, so they are built while the packages are installed. Then
# the tests, on more threads than cores: one that waits for its neighbour sleeps and does not spin.
test: $(VENV)/.tools-installed
	$(MAKE) --no-print-directory -j3 native lint types
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -m "not long" \
		-n $(JOBS) --dist loadfile --no-loadscope-reorder

test-long: $(VENV)/.test-installed
	BRICKLINE_LONG=1 $(BIN)/python tests/native/run_sanitized.py
	$(BIN)/python -m pytest -q -m long

lint: $(VENV)/.test-installed
	$(BIN)/ruff check src tests benchmarks examples docs/pictures
	$(BIN)/ruff format --check src tests benchmarks examples docs/pictures

types: $(VENV)/.test-installed
	$(BIN)/mypy

native: $(VENV)/.tools-installed
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

# What builds the core, kept: an isolated environment of pip's would be new each time, and so would all
# that was compiled against it.
$(VENV)/.tools-installed: $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet cmake nanobind ninja scikit-build-core
	touch $@

$(VENV)/.installed: $(VENV)/.tools-installed $(SOURCES)
	$(PIP_BUILD) .
	touch $@

$(VENV)/.test-installed: $(VENV)/.tools-installed $(SOURCES)
	$(PIP_BUILD) ".[test]"
	touch $(VENV)/.installed $@

$(VENV)/.bench-installed: $(VENV)/.test-installed
	$(PIP_BUILD) ".[bench]"
	touch $@

$(VENV)/.pictures-installed: $(VENV)/.test-installed
	$(PIP_BUILD) ".[pictures]"
	touch $@

clean:
	rm -rf $(VENV) build dist
