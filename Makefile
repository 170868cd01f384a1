# make demo          set up, then train a policy whose weights reach a live engine every step
# make demo ENGINE=sglang    the same against a real SGLang server (see make engines)
# make test          set up, then run the tests: those on real engines beside all others
# make engines       install the real engines for the CPU, each in its own environment, but for the
#                    optional ones (scripts/engines/optional.txt); or those that are named:
#                    make engines ENGINES="sglang-0.5.23 vllm-0.27.1"
# make test-torchrl  the TorchRL face on another TorchRL (scripts/torchrl), beside the pinned one
# make check         ruff, formatting, types
# make soak          1,000 updates with faults under traffic (half an hour); soak.svg is its picture
#
# PYTHON       the interpreter of the new environment
# TORCH        what pip installs as torch; on Linux the package index serves the CUDA build
#              (several GB). For the CPU build elsewhere: make TORCH_INDEX_URL=... test

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX_URL ?=
ENGINE ?= reference
ENGINES ?=
TORCHRL ?= 0.13.3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test test-torchrl check soak engines clean

setup: $(READY)

$(READY): pyproject.toml requirements/dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || \
	  $(BIN)/python -m pip install -q $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) "$(TORCH)"
	$(BIN)/python -m pip install -q -r requirements/dev.txt
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation \
	  --config-settings editable_mode=compat -e .
	touch $@

demo: ENGINES = sglang-0.5.23
demo: $(READY) $(if $(filter sglang,$(ENGINE)),engines)
	$(BIN)/weight-update demo --engine $(ENGINE)

test: $(READY)
	$(BIN)/python -m pytest

test-torchrl: $(READY)
	PYTHON=$(BIN)/python bash scripts/torchrl/install.sh $(TORCHRL)
	WEIGHT_UPDATE_TORCHRL=$(TORCHRL) PYTHONPATH=$(CURDIR)/.engines/torchrl-$(TORCHRL) \
	  $(BIN)/python -m pytest $$(grep -v '^#' scripts/torchrl/tests.list)

check: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

soak: $(READY)
	$(BIN)/weight-update bench soak --plot soak.svg

engines:
	bash scripts/engines/install.sh $(ENGINES)

clean:
	rm -rf $(VENV) .engines demo-report.json soak.svg
