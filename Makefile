# Every target sets up what it needs: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
ARGS   ?=

VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.installed
SPEC  := specs/llama.yaml

# Also for the isolated environment in which pip builds gradgen (the second name is pip's new one for that).
export PIP_CONSTRAINT       := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test lint format generate wheel clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | awk -F '|' '{printf "%-14s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and f"gradgen needs Python 3.10 or newer and $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --editable '.[dev]'
	@touch $@

setup: $(STAMP)  ## install gradgen and everything that its tests and examples need into .venv

demo: $(STAMP)  ## build specs/llama.yaml and train a small Llama with it on two CPU ranks
	$(PY) -m gradgen build $(SPEC) --output generated
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node 2 examples/train_llama.py $(ARGS)

test: $(STAMP)  ## run the tests (ARGS='-k cli' passes arguments on to pytest)
	@$(PY) -m pytest $(ARGS)

lint: $(STAMP)  ## style, types, format of the C++ sources, and whether generated/ is current
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict gradgen
	find gradgen/runtime -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | sort | xargs $(VENV)/bin/clang-format --dry-run --Werror
	$(PY) -m gradgen generate --check

format: $(STAMP)  ## rewrite Python and C++ sources in the project's format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	find gradgen/runtime -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | sort | xargs $(VENV)/bin/clang-format -i

generate: $(STAMP)  ## render specs/ into generated/
	$(PY) -m gradgen generate

wheel: $(STAMP)  ## build the wheel into dist/
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:  ## remove what builds and tests left behind; .venv stays
	rm -rf dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find generated -name '*.so' -o -name build.json -o -name '__pycache__' | xargs rm -rf
