# Two commands do everything: `make demo` and `make test`. Both set up .venv first if it is missing.
# On a machine with a GPU none of this is needed: pip install ".[prune,serve]".

PYTHON ?= python3
BIN := .venv/bin
TORCH := torch==2.13.0+cpu
# Two processes of one thread each: most of a test is start-up, which uses one. A file stays in one of them: its engine
# starts once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile

.PHONY: install demo check test lint clean

install: .venv/.installed

# PyPI's plain torch brings gigabytes of CUDA; the CPU build comes from wherever pip finds it, else from PyTorch's index.
.venv/.installed: pyproject.toml requirements/cpu.txt $(wildcard requirements/stubs/*/pyproject.toml)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q $(TORCH) || $(BIN)/pip install -q --index-url https://download.pytorch.org/whl/cpu $(TORCH)
	$(BIN)/pip install -q -r requirements/cpu.txt
	touch $@

demo: install
	$(BIN)/python benchmarks/demo.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The fast loop: lint, types, tests without vLLM.
check: lint
	$(PYTEST) -m "not vllm and not gpu and not real_model"

test: lint
	$(PYTEST)

clean:
	rm -rf .venv demo-output .mypy_cache .pytest_cache .ruff_cache
