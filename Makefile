# Every target installs what it needs into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo bench test torture check format lint types layers clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)  ## a small English model learns Korean: about 5 minutes on 2 cores
	$(BIN)/python scripts/demo.py

bench: $(STAMP)  ## speed, memory and FLOPs of every method against their bars: about 15 minutes on one core
	OMP_NUM_THREADS=1 $(BIN)/python scripts/benchmark.py

test: $(STAMP)  ## the whole test suite: under 8 minutes on 2 cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

torture: $(STAMP)  ## kills, damage, full disks, fuzzed input and attacks, in full length
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/torture --torture --numprocesses 2

check: format lint types layers test  ## what continuous integration holds

format: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

clean:
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
