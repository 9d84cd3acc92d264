# make demo | test | lint | lib: each sets up what it needs in .venv on a fresh clone; nothing is done twice.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
NVCC := $(shell PATH="$$CUDA_HOME/bin:$$PATH:/usr/local/cuda/bin" command -v nvcc)
CMAKE := $(shell command -v cmake)
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11" \
	if sys.version_info < (3, 11) else None)'
JOBS := $(shell nproc 2>/dev/null || echo 2)
CAN_BUILD := $(and $(NVCC),$(CMAKE))
NOTICE = echo "==> NOTICE: nvcc or cmake is missing: libmoss_kernels.so is not built and its tests are skipped" >&2

.PHONY: demo test lint lib
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/moss-tts init-demo demo-checkpoint
	$(BIN)/moss-tts synth --model demo-checkpoint --reference runtime/assets/reference.wav --output demo.wav --seed 1 \
		"The quick brown fox jumps over the lazy dog, and the whole path from text to sound is real."

test: lint lib
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -m interpreter
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

ifneq ($(CAN_BUILD),)
lib:
	cmake -S . -B build/cmake -DCMAKE_CUDA_COMPILER=$(NVCC) -DMOSS_LIBRARY_DIR=$(CURDIR)/moss_kernels/lib
	cmake --build build/cmake --parallel $(JOBS)
else ifeq ($(CI),true)
lib:
	@echo "error: libmoss_kernels.so needs nvcc (found: $(or $(NVCC),none)) and cmake (found: $(or $(CMAKE),none))" >&2
	@exit 1
else
lib:
	@$(NOTICE)
endif

$(STAMP): requirements.txt pyproject.toml setup.py
	test -x $(BIN)/pip || { $(CHECK_PYTHON) && $(PYTHON) -m venv .venv; } || { rm -rf .venv; exit 1; }
	$(BIN)/pip install --quiet --requirement requirements.txt
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --editable .
	@$(if $(CAN_BUILD),,$(NOTICE))
	touch $(STAMP)
