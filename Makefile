# make demo | make test [ARGS="-k walk"] | make lint
# Each works alone on a fresh clone: it creates .venv and installs what it needs, once per change of pyproject.toml.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP := $(PY) -m pip --disable-pip-version-check install -qq
TORCH := torch==2.13.*
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: demo test lint format clean

demo: $(STAMP)
	$(PY) -m experiments.demo $(ARGS)

test: $(STAMP)
	$(PY) -m pytest $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache

# Linux without an NVIDIA GPU: take the CPU build, which saves gigabytes of CUDA libraries. Its index is asked once,
# for at most three seconds; where it can't be reached, pip's own sources decide.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "dcoco needs Python 3.11 or newer; name one: make PYTHON=python3.11 ..." >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (the first time takes a few minutes) ..."
	@index=; \
	if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null 2>&1 && \
	   $(PY) -c 'import urllib.request; urllib.request.urlopen("$(TORCH_CPU_INDEX)/torch/", timeout=3)' 2>/dev/null; \
	then index="--index-url $(TORCH_CPU_INDEX)"; fi; \
	$(PIP) '$(TORCH)' $$index
	@$(PIP) --editable '.[dev]'
	@touch $(STAMP)
