# Each target creates .venv and installs the pinned versions of constraints.txt if needed, so each works by itself on a
# fresh clone, given python3 with venv and pip. Once installed, no target uses the network. `demo` installs what it needs,
# `docs` the tools for the site, and the others all that is left; each has a stamp in .venv.
PYTHON ?= python3
ARGS ?=
COMPAT_TORCH ?= 2.11.0 2.15.0
# Of `make gpu`. GPU_PYTHON: a Python that has everything already.
DEVICE ?= cuda
TORCH ?=
GPU_PYTHON ?=

BIN := .venv/bin
DEMO_INSTALLED := .venv/.demo-installed
INSTALLED := .venv/.installed
DOCS_INSTALLED := .venv/.docs-installed
PIP_INSTALL := -m pip install -qq --disable-pip-version-check

# One process for each core, up to 4: each test has one thread. worksteal: test files take very different times.
IN_PARALLEL := -n auto --maxprocesses 4 --dist worksteal --durations 25

# What the test suite needs besides torch and the package itself.
COMPAT_PACKAGES := numpy transformers accelerate tabulate tqdm ninja pytest pytest-timeout pytest-xdist hypothesis \
  expecttest

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow device-coverage lint format docs bench bench-quick bench-report gpu zoo compat clean
.NOTPARALLEL: # two targets would install into .venv at a time

help: ## list the targets
	@echo "make TARGET [ARGS='...']"
	@sed -n 's/^\([a-z-]*\):.*## /  \1|/p' Makefile | awk -F'|' '{ printf "%-18s%s\n", $$1, $$2 }'

demo: $(DEMO_INSTALLED) ## run examples/packed_training.py; ARGS= adds arguments
	@$(BIN)/python examples/packed_training.py $(ARGS)

test: $(INSTALLED) ## run all tests but the slow ones; gpu tests skip themselves without CUDA; ARGS= adds pytest arguments
	@$(BIN)/python -m pytest $(IN_PARALLEL) -m "not slow" $(ARGS)

test-slow: $(INSTALLED) ## run the slow tests: more seeds, more arrangements, whole programs under Inductor; THOROUGH=1: all of them
	@$(BIN)/python -m pytest $(IN_PARALLEL) -m slow $(ARGS)

device-coverage: $(INSTALLED) ## print the lines of device code that no test reaches; fails under 95 %; ARGS= names parts to run anew
	@$(BIN)/python -m tests.device.reached $(ARGS)

lint: $(INSTALLED) ## ruff check, ruff format --check, mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy fxpasses

format: $(INSTALLED) ## sort imports, apply safe fixes, format
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .

docs: $(DOCS_INSTALLED) ## build the documentation's site, site/index.html; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict # with --quiet, it would not count warnings

bench: $(INSTALLED) ## measure every case and write bench/RESULTS.md; takes hours; ARGS= names cases, or --device cuda
	@$(BIN)/python -m bench run --resume $(ARGS)
	@$(BIN)/python -m bench report

bench-quick: $(INSTALLED) ## the same, reduced, in about 15 minutes on 2 cores, into bench/scratch; ARGS= adds arguments
	@$(BIN)/python -m bench run --quick --out bench/scratch $(ARGS)
	@$(BIN)/python -m bench report bench/scratch

bench-report: $(INSTALLED) ## write bench/RESULTS.md from bench/results/*.json
	@$(BIN)/python -m bench report

# .venv where its torch sees the device, and no other version is asked for; else .gpu/VERSION.
ifneq ($(filter gpu,$(MAKECMDGOALS)),)
  SEES_CUDA := -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
  ifeq ($(filter $(DEVICE),cuda cpu),)
    $(error DEVICE is "$(DEVICE)"; it takes cuda or cpu)
  else ifneq ($(GPU_PYTHON),)
    GPU_INSTALLED :=
  else ifeq ($(DEVICE),cpu)
    GPU_PYTHON := $(BIN)/python
    GPU_INSTALLED := $(INSTALLED)
  else ifneq ($(shell nvidia-smi -L >/dev/null 2>&1 && echo found),found)
    $(error No NVIDIA card is found here: `nvidia-smi -L` fails. Install NVIDIA's driver, run this where there is a card, \
      or try it on the CPU: make gpu DEVICE=cpu)
  else ifeq ($(TORCH)$(shell $(BIN)/python $(SEES_CUDA) 2>/dev/null && echo sees),sees)
    GPU_PYTHON := $(BIN)/python
    GPU_INSTALLED := $(INSTALLED)
  else
    GPU_PYTHON := .gpu/$(or $(TORCH),2.13.0)/bin/python
    GPU_INSTALLED := .gpu/$(or $(TORCH),2.13.0)/.installed
  endif
endif

gpu: $(GPU_INSTALLED) ## with an NVIDIA card: what works there and what it saves, in 10 minutes, into bench/GPU.md; DEVICE=cpu without
	@$(GPU_PYTHON) -m bench.gpu --device $(DEVICE) $(ARGS)

zoo: $(INSTALLED) ## run every architecture of transformers, tiny, against eager mode and stock; takes hours; ARGS= names tasks or types
	@$(BIN)/python -m tests.zoo.run $(ARGS)
	@$(BIN)/python -m tests.zoo.page

# Goes on to the next version when one fails, and fails at the end. Of several `-m`, pytest takes the last.
compat: ## run what `test` runs on the torch versions COMPAT_TORCH, each in .compat/VERSION; ARGS= adds pytest arguments
	@summary=; failed=0; \
	for version in $(COMPAT_TORCH); do \
	  if ! $(MAKE) -s --no-print-directory .compat/$$version/.installed; then result="install failed"; failed=1; \
	  elif .compat/$$version/bin/python -m pytest $(IN_PARALLEL) -m "not slow" $(ARGS); then result="passed"; \
	  else result="tests failed"; failed=1; fi; \
	  summary="$$summary"torch\ "$$version: $$result\n"; \
	done; \
	printf "$$summary"; exit $$failed

clean: ## remove caches and build outputs; .venv, .compat and .gpu stay
	@rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path ./.venv -prune -o -path ./.compat -prune -o -path ./.gpu -prune -o -path ./.git -prune -o \
	  -type d -name __pycache__ -exec rm -rf {} +

.venv/bin/pip:
	@$(PYTHON) -m venv .venv

# Order-only: the folder's age says nothing.
$(DEMO_INSTALLED): pyproject.toml constraints.txt | .venv/bin/pip
	@echo "Installing what the demo needs, with the versions of constraints.txt, into .venv ..."
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[hf]'
	@touch $@

$(INSTALLED): pyproject.toml constraints.txt | .venv/bin/pip
	@echo "Installing fxpasses with the versions of constraints.txt into .venv ..."
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[hf,trl,qlora,dev,bench,browser]'
	@touch $(DEMO_INSTALLED) $@ # the demo's packages are among these

$(DOCS_INSTALLED): pyproject.toml constraints.txt | .venv/bin/pip
	@echo "Installing what the site needs, with the versions of constraints.txt, into .venv ..."
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[docs]'
	@touch $@

# The pins of constraints.txt hold here too, less torch, triton and setuptools, whose bounds differ between versions of
# torch.
.compat/%/.installed: pyproject.toml constraints.txt
	@echo "Installing torch $* and what the tests need into .compat/$* ..."
	@test -x .compat/$*/bin/pip || $(PYTHON) -m venv .compat/$*
	@grep -vE '^(torch|triton|setuptools)==' constraints.txt > .compat/$*/constraints.txt
	@.compat/$*/bin/python $(PIP_INSTALL) -c .compat/$*/constraints.txt torch==$* $(COMPAT_PACKAGES)
	@.compat/$*/bin/python $(PIP_INSTALL) --no-deps -e .
	@touch $@

# PyPI's torch for Linux is a build for CUDA. Liger kernel is a peer in the benchmarks, which do without it.
.gpu/%/.installed: pyproject.toml constraints.txt
	@echo "Installing torch $* for CUDA and what the tests and benchmarks need into .gpu/$* ..."
	@test -x .gpu/$*/bin/pip || $(PYTHON) -m venv .gpu/$*
	@grep -vE '^(torch|triton|setuptools)==' constraints.txt > .gpu/$*/constraints.txt
	@.gpu/$*/bin/python $(PIP_INSTALL) -c .gpu/$*/constraints.txt torch==$* $(COMPAT_PACKAGES) matplotlib
	@.gpu/$*/bin/python $(PIP_INSTALL) --no-deps -e .
	@.gpu/$*/bin/python $(PIP_INSTALL) --no-deps liger-kernel || echo "Liger kernel was not installed; it is left out."
	@touch $@
