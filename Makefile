# make demo: train a small GPT on this machine.   make test: the whole suite.   Both do their own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Without bytecode on disk every process of the suite would compile the library anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test again check unit docs bench cluster sweep clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

demo: setup
	$(BIN)/headway launch $$($(BIN)/python -c "import torch; print('' if torch.accelerator.is_available() else '--cpu -n 2')") examples/text.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: setup
	$(BIN)/pytest -q -n 2 --dist loadfile -m "not slow" tests/unit tests/house

test: check
	$(BIN)/pytest -q -n 2 --dist loadfile -m "not slurm" tests || $(MAKE) --no-print-directory again

# Real processes on a busy machine: what failed runs once more, alone. Both results are printed; what fails twice is broken.
again:
	@echo "== what failed runs once more, alone; see above what failed first =="
	$(BIN)/pytest -q -m "not slurm" --last-failed --last-failed-no-failures none tests

# Machines as network namespaces, a real SLURM and mpirun (root; Debian: iproute2 slurmctld slurmd slurm-client munge openmpi-bin).
cluster: setup
	$(BIN)/pytest -q tests/cluster

# Saves in which one call fails (strace), and an hour of runs that are ended at random moments; tests/sweep says how one is repeated.
SEED ?= 7
sweep: setup
	$(BIN)/python -m tests.sweep.failed_calls; calls=$$?; \
	$(BIN)/python -m tests.sweep.runs --seed $(SEED) --count 200 --minutes 60 && exit $$calls

bench: setup
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache runs
