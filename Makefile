# Two commands: `make quickstart` trains a model, `make test` runs the tests. Each makes what it needs, once.
#
# PYTHON   interpreter for .venv; by default the first of python3.12, 3.11, 3.10 that works
# EXTRA    cpu (default) or gpu: which build of Paddle
# VENV     where the environment is made
# WORKERS  how many tests run at once: auto (one for each processor) or a number
# ARGS     more words for pytest: make test ARGS=tests/unit/deploy/cli/test_cli.py

VENV  ?= .venv
EXTRA ?= cpu
BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable
# What runs a job, and what develops paddlewheel. Installing also generates the coordinator's gRPC code.
RUN   := $(VENV)/.installed-$(EXTRA)
DEV   := $(VENV)/.installed-$(EXTRA)-dev
WORKERS ?= auto
PYTEST := $(BIN)/python -m pytest
# Each file to one worker, in the order of tests/conftest.py
SPREAD := --dist loadfile --no-loadscope-reorder
PROTO := trainer/coordinator/coordinator.proto

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart test test-slow test-fast lint format docs proto environment clean

help:  ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

environment: $(DEV)  ## .venv with paddlewheel, Paddle and the tools of development

$(BIN)/python:
	@python="$(PYTHON)"; \
	works() { "$$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' >/dev/null 2>&1; }; \
	if [ -z "$$python" ]; then \
		for name in python3.12 python3.11 python3.10 python3 python; do \
			if works "$$name"; then python="$$name"; break; fi; \
		done; \
	elif ! works "$$python"; then \
		echo "make: PYTHON=$$python is not a working Python 3.10, 3.11 or 3.12 with its venv module." >&2; exit 1; \
	fi; \
	if [ -z "$$python" ]; then \
		echo "make: no Python 3.10, 3.11 or 3.12 (with its venv module) was found; Paddle 2.6.2 has wheels for no other." >&2; \
		echo "      Install one (Debian, Ubuntu: apt-get install python3.11 python3.11-venv), or name it: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$python" --version); Paddle is large, this takes a minute or two."; \
	"$$python" -m venv --clear "$(VENV)"

$(RUN): pyproject.toml setup.py $(PROTO) | $(BIN)/python
	$(PIP) '.[$(EXTRA),plot]'
	@test -s trainer/coordinator/coordinator_pb2_grpc.py || { echo "make: the gRPC code was not generated" >&2; exit 1; }
	@touch $@

$(DEV): $(RUN)
	$(PIP) '.[$(EXTRA),plot,tune,docs,dev]'
	@touch $@

proto: $(DEV)  ## the coordinator's gRPC code anew (done by itself after an edit of its .proto file)
	$(BIN)/python setup.py --quiet build_proto

quickstart: $(RUN)  ## makes click data, trains on it with 2 servers and 2 trainers, evaluates
	@if [ ! -f data/quickstart/best.json ]; then $(BIN)/paddlewheel data synth data/quickstart --rows 400k --seed 1; fi
	$(BIN)/paddlewheel train --from-scratch jobs/quickstart.yaml
	$(BIN)/paddlewheel evaluate jobs/quickstart.yaml

test: $(DEV)  ## the test suite, but for the tests marked slow
	$(PYTEST) -n $(WORKERS) $(SPREAD) -m 'not slow' $(ARGS)

# One after the other: they measure memory and speed, or kill and wait.
test-slow: $(DEV)  ## the tests marked slow: accuracy, chaos, memory, benchmarks
	$(PYTEST) -m slow $(ARGS)

test-fast: $(DEV)  ## the tests that start no jobs and do not build all models
	$(PYTEST) -n $(WORKERS) $(SPREAD) -m 'not slow and not processes and not zoo' tests/unit tests/property tests/contract $(ARGS)

lint: $(DEV)  ## ruff, mypy and the import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/vermin --target=3.10- --violations --eval-annotations --no-tips --quiet --no-parse-comments --exclude tomllib pserver trainer data_pipeline deploy tests setup.py
	$(BIN)/lint-imports

format: $(DEV)  ## formats the code
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: $(DEV)  ## the documentation as a site, in build/site; a broken link or anchor fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:  ## removes .venv, caches, generated code, and what the quickstart made
	rm -rf $(VENV) build dist ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf data/quickstart runs/quickstart
	rm -f trainer/coordinator/coordinator_pb2*
