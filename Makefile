# make demo       load real prompts, and compare with the baseline: template and tokenizer, row by row
# make test       everything that must hold: lint, types, documentation, tests
# make docs       the documentation site, into site/; warnings are errors
# make verl-test  the integration with verl, against verl 0.9.1 itself, in a separate environment
# make verl-matrix  the same with each supported version of verl: 0.7.1, 0.8.0, 0.9.0 and 0.9.1
# make trainers-test  the integration with NeMo Automodel 0.7.0, in a separate environment
# make browser-test  the page of gpuload inspect in headless Chromium, which has to be installed
# make transformers4-test  the tests with transformers 4.57.6, in a separate environment
# make exact      every row of ../shared with the kernels of ten tokenizers, on the host; 74 variants of tokenizers
# make damage     100 loads killed while they fill the token cache, and 1,000 damaged parquet files
# make bench      measure against verl 0.9.1 and others (python -m bench); records in bench/results/
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test trainers-test browser-test transformers4-test docs verl-test verl-matrix exact damage bench verl-env clean

demo: .venv/installed
	$(BIN)/gpuload demo

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/build.py
	$(BIN)/python -m pytest -n auto

browser-test: .venv/installed-dev
	$(BIN)/python -m pytest -m browser tests/test_page_browser.py

transformers4-test: .venv-transformers4/installed
	.venv-transformers4/bin/python -m pytest -n auto

docs: .venv/installed-dev
	$(BIN)/python docs/build.py

exact: .venv/installed-dev
	$(BIN)/python -m pytest -n auto --dist loadgroup -m exact tests/test_device_encode.py tests/test_encoder_matrix.py

damage: .venv/installed-dev
	$(BIN)/python -m pytest -s -m damage tests/test_kills.py tests/test_damage.py

verl-test: .venv-verl/installed
	PYTHONPATH=$(CURDIR) .venv-verl/bin/python -m pytest -n auto tests/verl

verl-matrix:
	$(PYTHON) tests/verl/matrix.py

trainers-test: .venv-automodel/installed
	.venv-automodel/bin/python -m pytest tests/test_automodel.py

bench: .venv/installed-dev .venv-verl/installed
	$(BIN)/python -m bench

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[html]'
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

# The second command replaces what the first one installs for transformers 5.
.venv-transformers4/installed: pyproject.toml constraints.txt
	test -x .venv-transformers4/bin/python || $(PYTHON) -m venv .venv-transformers4
	.venv-transformers4/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	.venv-transformers4/bin/python -m pip install -q transformers==4.57.6 datasets==4.8.5 s3fs==2026.2.0
	touch $@

# Without Automodel's dependencies, most of which are for GPUs: its datasets and tokenizers need none of them.
.venv-automodel/installed: pyproject.toml constraints.txt
	test -x .venv-automodel/bin/python || $(PYTHON) -m venv .venv-automodel
	.venv-automodel/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	.venv-automodel/bin/python -m pip install -q --no-deps nemo_automodel==0.7.0 transformers==5.18.0
	touch $@

verl-env: .venv-verl/installed

.venv-verl/installed: bench/verl/requirements.txt
	test -x .venv-verl/bin/python || $(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python -m pip install -q -r bench/verl/requirements.txt
	touch $@

clean:
	rm -rf .venv .venv-* build site *.egg-info
