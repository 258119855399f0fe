# Every target works on a fresh clone with Python 3.11, make and a C++ compiler: it makes its
# own virtual environment first. `make help` lists the targets.

SHELL := /bin/bash
.DEFAULT_GOAL := help

# The first interpreter that really starts: a version manager's shim may exist and refuse.
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c '' 2>/dev/null && { echo $$p; break; }; done)
ARGS ?=

VENV := .venv
VENV_OLD := .venv-2.13
BENCHMARKS = $(filter-out benchmarks/common.py benchmarks/device_check.py,$(wildcard benchmarks/*.py))

# $(call environment,FOLDER,REQUIREMENTS): pip is silent unless it fails.
define environment
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo 'fxboundary needs Python 3.11 or newer; set PYTHON=/path/to/python3.11' >&2; exit 1; }
	@echo 'setting up $(1) from $(2) (torch is large: this takes a minute or more)'
	@"$(PYTHON)" -m venv $(1)
	@{ $(1)/bin/python -m pip install --disable-pip-version-check --no-input -r $(2) && \
	   $(1)/bin/python -m pip install --disable-pip-version-check --no-input \
	       --no-deps --no-build-isolation -e . ; \
	 } > $(1)/install.log 2>&1 || { cat $(1)/install.log >&2; exit 1; }
	@touch $(1)/.installed
endef

.PHONY: help demo test test-all lint format bench docs device-check clean distclean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | \
	    while IFS=$$'\t' read -r name text; do printf '  %-14s %s\n' "$$name" "$$text"; done

$(VENV)/.installed: requirements/dev-2.14.txt pyproject.toml
	$(call environment,$(VENV),requirements/dev-2.14.txt)

$(VENV_OLD)/.installed: requirements/dev-2.13.txt pyproject.toml
	$(call environment,$(VENV_OLD),requirements/dev-2.13.txt)

demo: $(VENV)/.installed ## train a small Llama three ways and compare; options in ARGS="--steps 10"
	@$(VENV)/bin/python -m fxboundary demo $(ARGS)

test: $(VENV)/.installed ## run the tests; options in ARGS="-k name"
	@$(VENV)/bin/python -m pytest $(ARGS)

test-all: $(VENV)/.installed $(VENV_OLD)/.installed ## all tests, on the newest and the oldest torch supported
	@$(VENV)/bin/python -m pytest -m '' $(ARGS)
	@$(VENV_OLD)/bin/python -m pytest -m '' $(ARGS)

lint: $(VENV)/.installed ## check format, lint and types
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy

format: $(VENV)/.installed ## rewrite the sources in the project's format
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

bench: $(VENV)/.installed ## run every benchmark
	@set -e; for script in $(BENCHMARKS); do \
	    echo "== $$script"; $(VENV)/bin/python $$script $(ARGS); done

docs: $(VENV)/.installed ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo 'documentation: site/'

device-check: $(VENV)/.installed ## run the checks that need a GPU
	@$(VENV)/bin/python benchmarks/device_check.py $(ARGS)

clean: ## remove what the tools leave behind
	@rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name '.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## and the virtual environments
	@rm -rf $(VENV) $(VENV_OLD)
