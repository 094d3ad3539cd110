# Two commands do everything: `make demo` and `make test`. Both set up .venv first if it is missing.
# On a machine with a GPU none of this is needed: pip install ".[prune,serve]".

PYTHON ?= python3
BIN := .venv/bin
TORCH := torch==2.13.0+cpu
# Processes of one thread each, one more than cores that are there: most of a test is start-up, which waits and uses one. A
# file stays in one of them: its engine starts once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 3 --dist loadfile

.PHONY: install demo check test test-all gpu gpu-tests gpu-kernel gpu-step gpu-serve lint clean

install: .venv/.installed

# PyPI's plain torch brings gigabytes of CUDA; the CPU build comes from wherever pip finds it, else from PyTorch's index.
.venv/.installed: pyproject.toml requirements/cpu.txt requirements/quantize.txt $(wildcard requirements/stubs/*/pyproject.toml)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q $(TORCH) || $(BIN)/pip install -q --index-url https://download.pytorch.org/whl/cpu $(TORCH)
	$(BIN)/pip install -q -r requirements/cpu.txt
	$(BIN)/pip install -q --no-deps --upgrade --target .venv/quantize -r requirements/quantize.txt
	touch $@

demo: install
	$(BIN)/python benchmarks/demo.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The fast loop: lint, types, tests without vLLM.
check: lint
	$(PYTEST) -m "not vllm and not gpu and not real_model and not nightly"

test: lint
	$(PYTEST) -m "not nightly"

# With the long tests: fuzzing, kills, a busy server, compiled models, other GPUs.
test-all: lint
	$(PYTEST)

# What only a machine with a GPU can say, in an environment where `pip install ".[prune,serve,eval,dev]"` was run. One
# part that fails does not stop the others.
MODEL ?= HuggingFaceTB/SmolLM2-135M-Instruct
gpu:
	$(MAKE) --keep-going gpu-tests gpu-kernel gpu-step gpu-serve

gpu-tests gpu-kernel gpu-step gpu-serve: | gpu-results
gpu-results:
	mkdir $@

gpu-tests:
	$(PYTHON) -m pytest -q -m gpu > gpu-results/tests.txt

gpu-kernel:
	$(PYTHON) -m ddp_vllm bench kernel --shape all --overwrite -o gpu-results/kernel.json

# 8,192 tokens a step, as `prune` has in flight; cases in turn, since twelve at once fit no GPU
gpu-step:
	$(PYTHON) benchmarks/lab/step_cost.py $(MODEL) --device cuda --batch-size 4 --seq-len 2048 --one-at-a-time \
		> gpu-results/step_cost.txt

gpu-serve:
	$(PYTHON) -m ddp_vllm prune $(MODEL) --sparsity 0.5 --overwrite -o gpu-results/pruned
	$(PYTHON) -m ddp_vllm bench sharegpt --dense $(MODEL) --pruned gpu-results/pruned --overwrite -o gpu-results/sharegpt.json

clean:
	rm -rf .venv demo-output gpu-results .mypy_cache .pytest_cache .ruff_cache
