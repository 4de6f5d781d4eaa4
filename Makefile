# make demo: a small GPT survives an out-of-memory error and a kill.   make test: the suite; make test-all: with its slow tests and matrices.   All do their own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The demo needs Headway alone, the suite everything; one environment grows from the first stage into the second.
BASE := $(VENV)/.base
STAMP := $(VENV)/.installed
DOCS := build/docs-venv
CUDA := build/cuda
CANARY := build/canary

# Without bytecode on disk every process of the suite would compile the library again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-core test-all matrix again check unit docs bench walks guard gpu cuda canary cluster sweep dist clean

setup: $(STAMP)

# torch comes first and by its pinned version, so that a local build is preferred to gigabytes from the index.
$(BASE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $(BASE)

$(STAMP): $(BASE)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

demo: $(BASE)
	$(BIN)/python examples/demo.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: setup
	$(BIN)/pytest -q -n 2 --dist loadfile -m "not slow and not matrix" tests/unit tests/house

# What a change in the core needs while one works on it: two minutes of two cores. `make test` follows before a merge.
CORE_TESTS := tests/house tests/unit/common tests/unit/core tests/unit/test_accelerator.py \
	$(addprefix tests/distributed/,test_accumulation.py test_collectives.py test_loader.py test_resume.py)
test-core: setup
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not matrix" $(CORE_TESTS)

test: check
	$(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "not slurm and not matrix and not slow" tests || $(MAKE) --no-print-directory again

# What `make test` leaves out beside the matrices: runs that are killed, hang, restart or train in many layouts.
slow: setup
	$(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "slow and not matrix and not slurm" tests || $(MAKE) --no-print-directory again

test-all: check
	$(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "not slurm" tests || $(MAKE) --no-print-directory again

# The matrices alone; with LIMIT=30, in a new order, and those that have not begun after 30 minutes are skipped.
matrix: setup
	$(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "matrix and not slurm" $(if $(LIMIT),--minutes $(LIMIT)) tests || $(MAKE) --no-print-directory again

# Real processes on a busy machine: what failed runs once more, alone. Both results are printed; what fails twice is broken.
again:
	@echo "== what failed runs once more, alone; see above what failed first =="
	$(BIN)/pytest -q -m "not slurm" --last-failed --last-failed-no-failures none tests

# The site, in build/site; of the source, only names are imported, so neither Headway nor torch is installed.
docs: $(DOCS)/.installed
	PYTHONPATH=src $(DOCS)/bin/python scripts/pages.py $(PAGES)
	PATH="$(CURDIR)/$(DOCS)/bin:$$PATH" $(DOCS)/bin/zensical build --clean --strict --config-file build/mkdocs.yml
	PYTHONPATH=src $(DOCS)/bin/python scripts/llms.py

$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --upgrade "pip>=25.1"
	$(DOCS)/bin/pip install --quiet --constraint constraints.txt --group docs
	touch $@

# Wheel and source archive in dist/, checked in an empty environment. URL=https://... makes README's links absolute.
# TAG=1 adds the annotated tag of the version to this commit, or checks the one that is there; it never pushes.
dist: setup
	$(BIN)/python scripts/release.py --url "$(URL)" $(if $(TAG),--tag)

# Machines as network namespaces, a real SLURM and mpirun (root; Debian: iproute2 slurmctld slurmd slurm-client munge openmpi-bin mpich).
cluster: setup
	$(BIN)/pytest -q tests/cluster

# Saves in which one call fails (strace), an hour of runs that are ended at random moments, another of sharded ones, random
# loops beside plain PyTorch, and checkpoints of every layout loaded under every other; tests/sweep says how one is repeated.
SEED ?= 7
MINUTES ?= 60
sweep: setup
	$(BIN)/python -m tests.sweep.failed_calls; calls=$$?; \
	$(BIN)/python -m tests.sweep.runs --seed $(SEED) --count 200 --minutes $(MINUTES); runs=$$?; \
	$(BIN)/python -m tests.sweep.runs --seed $(SEED) --count 60 --minutes $(MINUTES) --sharded; sharded=$$?; \
	$(BIN)/python -m tests.sweep.memory --seed $(SEED) --count 100; memory=$$?; \
	$(BIN)/python -m tests.sweep.loops --count 200; loops=$$?; \
	$(BIN)/python -m tests.sweep.layouts && $(BIN)/python -m tests.sweep.layouts --model moe && exit $$((calls + runs + sharded + memory + loops))

bench: setup
	$(BIN)/python benchmarks/run.py

# Calls inside the library for one micro-step, save, load and launch, beside the recorded ones; exact, 30 seconds.
walks: setup
	$(BIN)/python -m benchmarks.walks.measure $(ARGS)

# What Headway adds to plain PyTorch in a step, loader, import, launch, save and load, beside the recorded figures; two minutes.
guard: setup
	$(BIN)/python -m benchmarks.guard.measure $(ARGS)

# All that only an accelerator can show, in ten minutes; without one: make gpu ARGS="--device cpu" (CONTRIBUTING.md).
# Installs nothing, since such a machine may have no network: .venv's Python where there is one, else the one that has torch.
gpu:
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks.gpu $(ARGS)

# torch's CUDA build over a simulated runtime (tests/simulated_cuda), without a card: an environment of its own, 2.2 GB.
cuda: $(CUDA)/.installed
	@if [ -e $(CUDA)/missing ]; then cat $(CUDA)/missing; else tests/simulated_cuda/run; fi

$(CUDA)/.installed: constraints.txt tests/simulated_cuda/install
	PYTHON="$(PYTHON)" tests/simulated_cuda/install $(CUDA)
	touch $@

# The newest torch and transformers that can be installed, in an environment of their own: private names and the unit tier.
# TORCH=2.13.0 and TRANSFORMERS=5.24.0 choose versions (the newest torch may be a CUDA build of gigabytes), TESTS= a part.
canary:
	$(PYTHON) -m venv $(CANARY)
	grep -vE "^(torch|transformers)==" constraints.txt > $(CANARY)/constraints.txt
	$(CANARY)/bin/pip install --quiet --upgrade --constraint $(CANARY)/constraints.txt \
		"torch$(if $(TORCH),==$(TORCH))" "transformers$(if $(TRANSFORMERS),==$(TRANSFORMERS))" --editable ".[dev]"
	$(CANARY)/bin/python -c "import torch, transformers; print('torch', torch.__version__, 'transformers', transformers.__version__)"
	$(CANARY)/bin/pytest -q tests/house/test_torch_names.py
	$(CANARY)/bin/pytest -q -n 2 --dist loadfile -m "not slow and not matrix" $(or $(TESTS),tests/unit tests/house)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache runs
