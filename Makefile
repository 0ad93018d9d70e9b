# make demo   load real prompts, compare with the row-wise way
# make test   everything that must hold: lint, types, tests
PYTHON ?= python3
BIN := .venv/bin
export TOKENIZERS_PARALLELISM ?= true

.PHONY: demo test bench clean

demo: .venv/installed
	$(BIN)/gpuload demo

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto

bench: .venv/installed-dev
	$(BIN)/python -m bench

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-verl build *.egg-info
