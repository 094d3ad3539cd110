# Two commands do everything: `make demo` and `make test`. Both set up .venv first if it is missing.
# On a machine with a GPU none of this is needed: pip install ".[prune,serve,eval]".

PYTHON ?= python3
BIN := .venv/bin
# Processes of one thread each, one more than cores that are there: most of a test is start-up, which waits and uses one. A
# file stays in one of them: its engine starts once. Files start in the order of tests/conftest.py.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: install demo check test test-all pytest test-newest gpu lint clean

install: .venv/.installed

.venv/.installed: pyproject.toml requirements/install.py requirements/cpu.txt requirements/constraints.txt requirements/quantize.txt $(wildcard requirements/stubs/*/pyproject.toml)
	$(PYTHON) -m venv .venv
	$(BIN)/python requirements/install.py
	touch $@

demo: install
	$(BIN)/python benchmarks/demo.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The fast loop: lint, types, and the tests without vLLM and without long training.
check: lint
	$(PYTEST) -m "not vllm and not gpu and not real_model and not slow and not nightly"

# Lint beside the tests, whose summary comes last. What fails first lets the other end.
test: install
	@$(MAKE) --no-print-directory --jobs=2 lint pytest CHOSEN='-m "not nightly"'

# With the long tests: fuzzing, kills, a busy server, compiled models, other GPUs.
test-all: install
	@$(MAKE) --no-print-directory --jobs=2 lint pytest

pytest: install
	$(PYTEST) $(CHOSEN)

# Nightly: the tests without vLLM on the newest transformers, peft and torchao, whatever pyproject.toml allows.
test-newest: install
	$(BIN)/pip install -q --no-deps --upgrade --target .venv/newest transformers peft torchao
	PYTHONPATH=.venv/newest $(PYTEST) -m "not vllm and not gpu and not nightly"

# What only a machine with a GPU can say, in an environment where `pip install ".[prune,serve,eval,dev]"` was run:
# `make gpu`, or `make gpu-correct` for a step. Without a network: MODEL= is a folder and DATA= a file of conversations.
# A step that fails does not stop the others; a finished one is not run again. GPU=cpu tries all of it in tiny sizes.
MODEL ?= HuggingFaceTB/SmolLM2-135M-Instruct
DATA ?=
GPU ?= cuda
OUT ?= gpu-results
GPU_STEPS = $(if $(filter cpu,$(GPU)),LEASE_DRY=1) $(PYTHON) benchmarks/borrowed_gpu/run.py gpu \
	--model "$(MODEL)" --data "$(DATA)" --out "$(OUT)"
gpu:
	$(GPU_STEPS)

gpu-%:
	$(GPU_STEPS) --only $*

clean:
	rm -rf .venv demo-output gpu-results .mypy_cache .pytest_cache .ruff_cache
