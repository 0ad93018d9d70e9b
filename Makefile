# make demo       load real prompts, and compare with the baseline: template and tokenizer, row by row
# make test       lint, types, documentation, and the core of the tests: minutes. PART=0 to 3 adds a quarter of the rest
# make test-all   the same with the whole rest and five times as many random examples, from SEED, which is printed. Not in it:
#                 exact, damage, browser-test, and what needs an environment of its own
# make docs       the documentation site, into site/; warnings are errors
# make verl-test  the integration with verl, against verl 0.9.1 itself, in a separate environment
# make verl-matrix  the same with each supported version of verl: 0.7.1, 0.8.0, 0.9.0 and 0.9.1
# make trl-matrix  the integration with TRL, with the other releases that it knows: 1.14.2 and 1.15.0
# make trainers-test  the integrations and stores for other trainers, with their own code, each in an environment of its own:
#                 make automodel-test, llamafactory-test, axolotl-test, megatron-test, torchtitan-test; and those of which there is only a repository, where
#                 SLIME_REPO, NEMO_RL_REPO, SKYRL_REPO and AREAL_REPO name checkouts
# make ray-test  Ray Data on clusters of three nodes on this machine, processes of which are killed, in a separate environment
# make browser-test  the page of gpuload inspect in headless Chromium, which has to be installed
# make transformers4-test  the tests with transformers 4.57.6, in a separate environment
# make tokenizers1-test  the encoder of tokenizers 1.0, which is installed into a folder of its own, and the core on objects of it
# make images-test  processors of images that need torchvision, which is installed into a folder of its own
# make exact      every row of ../shared with the kernels of ten tokenizers, on the host; 74 variants of tokenizers
# make damage     100 loads killed while they fill the token cache, and 1,000 damaged parquet files
# make cubins     machine code of the kernels, with nvcc, as wheels have it; without it, NVRTC compiles them on the GPU's machine
# make wheel      a wheel in dist, with that machine code: how releases are built
# make bench      measure against verl 0.9.1 and others (python -m bench); records in bench/results/
PYTHON ?= python3
BIN := .venv/bin

# Which tests run: tests/tiers.py.
PART ?=
SEED := $(or $(SEED),$(shell date +%s))

.PHONY: demo test test-all checks tests browser-test transformers4-test docs verl-test verl-matrix trl-matrix ray-test trainers-test automodel-test
.PHONY: images-test tokenizers1-test llamafactory-test axolotl-test megatron-test torchtitan-test slime-test nemo-rl-test exact damage bench
.PHONY: verl-env cubins wheel clean

demo: .venv/installed
	$(BIN)/gpuload demo

# The checks run next to the tests, and say nothing if they pass.
test: .venv/installed-dev
	$(MAKE) --no-print-directory -j 2 checks tests

test-all: .venv/installed-dev
	@echo "SEED=$(SEED)"
	$(MAKE) --no-print-directory -j 2 checks tests PART=all SEED=$(SEED)

checks: .venv/installed-dev
	$(BIN)/ruff check -q .
	$(BIN)/ruff format -q --check .
	$(BIN)/mypy
	$(BIN)/python docs/build.py

tests: .venv/installed-dev
	PART=$(PART) $(BIN)/python -m pytest -n auto --dist worksteal $(if $(filter all,$(PART)),--hypothesis-seed=$(SEED))

browser-test: .venv/installed-dev
	$(BIN)/python -m pytest -m browser tests/test_page_browser.py

transformers4-test: .venv-transformers4/installed
	.venv-transformers4/bin/python -m pytest -n auto

# Not in the second run: tests that name another encoder or ask the object of 0.23, and other processes, which have that.
tokenizers1-test: export GPULOAD_TOKENIZERS1 = $(CURDIR)/.venv-tokenizers1
tokenizers1-test: .venv/installed-dev .venv-tokenizers1/installed
	PART=all $(BIN)/python -m pytest -n auto tests/test_tokenizers1.py
	$(BIN)/python -m pytest -n auto -p on_tokenizers1 tests/test_acceptance.py tests/test_cache.py tests/test_chat_loaders.py \
		tests/test_chats.py tests/test_exact.py tests/test_pairs.py tests/test_prompts.py tests/test_tokenizers.py \
		-k "not gigatoken and not every_code_point and not test_kinds and not differs and not side_by_side and not start_together and not freed_with and not changed_during"

images-test: .venv/installed-dev .venv-images/installed
	PART=all PYTHONPATH=$(CURDIR)/.venv-images $(BIN)/python -m pytest -n auto -p on_torchvision tests/test_image*.py tests/test_inspect_images.py

docs: .venv/installed-dev
	$(BIN)/python docs/build.py

exact: .venv/installed-dev
	$(BIN)/python -m pytest -n auto --dist loadgroup -m exact tests/test_device_encode.py tests/test_encoder_matrix.py

damage: .venv/installed-dev
	$(BIN)/python -m pytest -s -m damage tests/test_kills.py tests/test_damage.py

verl-test: .venv-verl/installed
	PYTHONPATH=$(CURDIR) .venv-verl/bin/python -m pytest -n auto tests/verl

ray-test: .venv-ray/installed
	.venv-ray/bin/python -m pytest tests/test_ray_*.py tests/test_shared_store.py

trainers-test: automodel-test llamafactory-test axolotl-test megatron-test torchtitan-test $(if $(SLIME_REPO),slime-test) \
	$(if $(NEMO_RL_REPO),nemo-rl-test)

llamafactory-test: .venv-llamafactory/installed
	PYTHONPATH=$(CURDIR) .venv-llamafactory/bin/python -m pytest tests/trainers/test_llamafactory.py

# With MEGATRON_REPO, a checkout of Megatron-LM, also against its SFT dataset.
megatron-test: .venv-megatron/installed
	PYTHONPATH=$(CURDIR) .venv-megatron/bin/python -m pytest tests/trainers/test_megatron.py

# With TORCHTITAN_REPO, a checkout of torchtitan, its loader of today as well.
torchtitan-test: .venv-torchtitan/installed
	PYTHONPATH=$(CURDIR) .venv-torchtitan/bin/python -m pytest tests/trainers/test_torchtitan.py
	$(if $(TORCHTITAN_REPO),PYTHONPATH=$(CURDIR):$(TORCHTITAN_REPO) .venv-torchtitan/bin/python -m pytest tests/trainers/test_torchtitan.py)

# SkyRL and AReaL are tested in the same environment.
axolotl-test: .venv-axolotl/installed
	PYTHONPATH=$(CURDIR) .venv-axolotl/bin/python -m pytest \
		tests/trainers/test_axolotl.py tests/trainers/test_skyrl.py tests/trainers/test_areal.py

verl-matrix:
	$(PYTHON) tests/verl/matrix.py

# Without the tests that train: TRL 1.15 needs Triton for it.
trl-matrix: .venv/installed-dev
	for version in 1.14.2 1.15.0; do \
		$(BIN)/python -m pip install -q --no-deps --target .venv-trl-$$version trl==$$version && \
		PYTHONPATH=.venv-trl-$$version $(BIN)/python -m pytest -n auto tests/test_trl.py tests/test_trl_fallbacks.py \
			tests/test_trl_contract.py tests/test_trl_changed.py tests/test_trl_batches.py tests/test_trl_images.py || exit 1; \
	done

slime-test: .venv-slime/installed
	.venv-slime/bin/python -m pytest tests/test_slime_contract.py tests/test_slime.py tests/test_slime_rollout.py

nemo-rl-test: .venv-nemo-rl/installed
	.venv-nemo-rl/bin/python -m pytest tests/test_nemo_rl.py tests/test_nemo_rl_contract.py

automodel-test: .venv-automodel/installed
	.venv-automodel/bin/python -m pytest tests/test_automodel.py

cubins: .venv/installed
	$(BIN)/python -m gpuload.engines.device.cubins

wheel: cubins
	$(PYTHON) -m pip wheel --no-deps -w dist .

bench: .venv/installed-dev .venv-verl/installed
	$(BIN)/python -m bench

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e .
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

.venv-tokenizers1/installed: .venv/installed
	$(BIN)/python -m pip install -q --no-deps --target .venv-tokenizers1 tokenizers==1.0.0rc3
	touch $@

# The torchvision that fits the torch of constraints.txt.
.venv-images/installed: .venv/installed
	$(BIN)/python -m pip install -q --no-deps --target .venv-images torchvision==0.28.0
	touch $@

.venv-ray/installed: pyproject.toml constraints.txt
	test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install -q -c constraints.txt -e '.[dev,ray]'
	touch $@

verl-env: .venv-verl/installed

.venv-verl/installed: bench/verl/requirements.txt
	test -x .venv-verl/bin/python || $(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python -m pip install -q -r bench/verl/requirements.txt
	touch $@

# What slime's modules import for data sources and rollouts; its requirements have servers and trackers too.
.venv-slime/installed: pyproject.toml constraints.txt
	test -x .venv-slime/bin/python || $(PYTHON) -m venv .venv-slime
	.venv-slime/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	.venv-slime/bin/python -m pip install -q httpx pillow pylatexenc sympy
	touch $@

# What NeMo-RL's modules import for datasets; its requirements have servers and kernels for GPUs too.
.venv-nemo-rl/installed: pyproject.toml constraints.txt
	test -x .venv-nemo-rl/bin/python || $(PYTHON) -m venv .venv-nemo-rl
	.venv-nemo-rl/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	.venv-nemo-rl/bin/python -m pip install -q transformers==5.8.1 hydra-core mlflow-skinny prometheus_client pynvml pyzmq ray \
		scipy sentencepiece soundfile swanlab tensorboard wandb
	touch $@

# torchvision and torchaudio that fit this torch need CUDA; LLaMA-Factory imports torchaudio, and uses neither for text.
.venv-llamafactory/installed: bench/trainers/llamafactory-requirements.txt
	test -x .venv-llamafactory/bin/python || $(PYTHON) -m venv .venv-llamafactory
	.venv-llamafactory/bin/python -m pip install -q -r bench/trainers/llamafactory-requirements.txt
	.venv-llamafactory/bin/python -m pip uninstall -q -y torchvision torchaudio
	echo > $$(.venv-llamafactory/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/torchaudio.py
	touch $@

.venv-axolotl/installed: bench/trainers/axolotl-requirements.txt
	test -x .venv-axolotl/bin/python || $(PYTHON) -m venv .venv-axolotl
	.venv-axolotl/bin/python -m pip install -q -r bench/trainers/axolotl-requirements.txt
	.venv-axolotl/bin/python -m pip install -q --no-deps axolotl==0.19.0
	touch $@

# Without the dependencies of both, most of which are for GPUs.
.venv-megatron/installed: pyproject.toml constraints.txt
	test -x .venv-megatron/bin/python || $(PYTHON) -m venv .venv-megatron
	.venv-megatron/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	.venv-megatron/bin/python -m pip install -q --no-deps megatron-core==0.16.1
	touch $@

.venv-torchtitan/installed: pyproject.toml constraints.txt
	test -x .venv-torchtitan/bin/python || $(PYTHON) -m venv .venv-torchtitan
	.venv-torchtitan/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	.venv-torchtitan/bin/python -m pip install -q tyro grain torchdata spmd_types
	.venv-torchtitan/bin/python -m pip install -q --no-deps torchtitan==0.3.0
	touch $@

clean:
	rm -rf .venv .venv-* build site *.egg-info
