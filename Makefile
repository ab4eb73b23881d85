# Two commands: `make quickstart` trains a model, `make test` runs the tests. Each makes what it needs, once.
#
# PYTHON   interpreter for .venv; by default the first of python3.12, 3.11, 3.10 that works
# EXTRA    cpu (default) or gpu: which build of Paddle
# VENV     where the environment is made

VENV  ?= .venv
EXTRA ?= cpu
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed-$(EXTRA)
PROTO := trainer/coordinator/coordinator_pb2.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart test test-slow test-fast lint format proto environment clean

help:  ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

environment: $(STAMP)  ## .venv with paddlewheel, Paddle and the tools of development

$(STAMP): pyproject.toml setup.py
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
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRA),dev,plot,tune]'
	@touch $@

proto: $(PROTO)  ## the coordinator's gRPC code, after an edit of its .proto file

$(PROTO): trainer/coordinator/coordinator.proto setup.py | $(STAMP)
	$(BIN)/python setup.py --quiet build_proto
	@touch $@

quickstart: $(STAMP) $(PROTO)  ## makes click data, trains on it with 2 servers and 2 trainers, evaluates
	@if [ ! -f data/quickstart/best.json ]; then $(BIN)/paddlewheel data synth data/quickstart --rows 400k --seed 1; fi
	$(BIN)/paddlewheel train --fresh jobs/quickstart.yaml
	$(BIN)/paddlewheel evaluate jobs/quickstart.yaml

test: $(STAMP) $(PROTO)  ## the test suite, but for the tests marked slow
	$(BIN)/python -m pytest -m 'not slow' $(ARGS)

test-slow: $(STAMP) $(PROTO)  ## the tests marked slow: accuracy, chaos, memory, benchmarks
	$(BIN)/python -m pytest -m slow $(ARGS)

test-fast: $(STAMP) $(PROTO)  ## the tests that take seconds
	$(BIN)/python -m pytest -m 'not slow' tests/unit tests/property tests/contract $(ARGS)

lint: $(STAMP) $(PROTO)  ## ruff, mypy and the import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/vermin --target=3.10- --violations --eval-annotations --no-tips --quiet --no-parse-comments --exclude tomllib pserver trainer data_pipeline deploy tests setup.py
	$(BIN)/lint-imports

format: $(STAMP)  ## formats the code
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:  ## removes .venv, caches, generated code, and what the quickstart made
	rm -rf $(VENV) build dist ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf data/quickstart runs/quickstart
	rm -f trainer/coordinator/coordinator_pb2*
