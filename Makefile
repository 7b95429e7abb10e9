# Needs make, sh and a Python 3.12 or 3.13, which scripts/find_python.sh finds. PYTHON=/path/to/python overrides it.

BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

# A lock that changes, or an installation that failed, makes the next `make` install again: each stamp is written last.
RUN_STAMP := .venv/.installed-run
TEST_STAMP := .venv/.installed-test
STUDY_STAMP := .venv/.installed-study
EVAL_STAMP := .venv/.installed-eval
NEMO_STAMP := .venv-nemo/.installed
INSTALLER := scripts/make_venv.sh scripts/find_python.sh pyproject.toml requirements/build.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help venv quickstart kernels test fuzz test-nemo test-megatron lint format lock docs study-env eval-env nemo-env clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(TEST_STAMP) ## .venv with everything to run, test and develop

$(RUN_STAMP): requirements/run.txt $(INSTALLER)
	@rm -f $@
	@sh scripts/make_venv.sh .venv '3.12 3.13' requirements/run.txt
	@touch $@

$(TEST_STAMP): requirements/test.txt requirements/run.txt $(INSTALLER)
	@rm -f $(RUN_STAMP) $(STUDY_STAMP) $(EVAL_STAMP) $@
	@sh scripts/make_venv.sh .venv '3.12 3.13' requirements/test.txt
	@touch $(RUN_STAMP) $@

quickstart: $(RUN_STAMP) ## pretrain a small GPT with 16-bit and with Echo communication, compare; ABLATION=1, SP=1, OUT=folder, ARGS="--steps 100"
	@$(BIN)/python -m echo_megatron.quickstart --out $(or $(OUT),runs/quickstart) $(if $(filter-out 0,$(ABLATION)),--ablation) $(if $(filter-out 0,$(SP)),--sequence-parallel) $(ARGS)

kernels: $(RUN_STAMP) ## build the CUDA kernels, which otherwise happens on first use; needs nvcc, no GPU. ARCH="80 90", OUT=file, ARGS=--verbose
	@$(BIN)/python -m echo_megatron.kernel_build $(if $(ARCH),--arch $(ARCH)) $(if $(OUT),--out $(OUT)) $(ARGS)

# In as many processes as tests/conftest.py says: none beside where there are GPUs.
test: lint ## environment, ruff, mypy, and the whole test suite on CPU, API reference and links among it (PYTEST_ARGS="-n0 -k name")
	$(BIN)/python -m pytest -n auto --dist worksteal $(PYTEST_ARGS)

fuzz: $(TEST_STAMP) ## new examples of records and schedules of the kernels for MINUTES=60; `make test` draws a few
	$(BIN)/python -m pytest -n0 --timeout 0 tests/test_fuzz.py --fuzz-minutes $(or $(MINUTES),60)

# What tests NeMo, and what tests Megatron-core where versions differ. megatron-core 0.15.3 compiles a CUDA extension when it
# is imported, and without a GPU has to be told for which.
NEMO_TESTS := tests/nemo $(addprefix tests/test_megatron,.py _models.py)

test-nemo: $(NEMO_STAMP) ## .venv-nemo, then the tests of NeMo and of megatron-core 0.15.3 in it (PYTEST_ARGS="-k name")
	TORCH_CUDA_ARCH_LIST=$(or $(TORCH_CUDA_ARCH_LIST),9.0) .venv-nemo/bin/python -m pytest $(NEMO_TESTS) $(PYTEST_ARGS)

# Beside .venv, not in it: one folder that comes first on the path.
MEGATRON := $(or $(VERSION),0.16.1)
MEGATRON_FOLDER := build/megatron-core-$(MEGATRON)

$(MEGATRON_FOLDER)/.installed: $(TEST_STAMP)
	$(BIN)/python -m pip install --no-input --disable-pip-version-check --no-deps --upgrade \
		--target $(MEGATRON_FOLDER) megatron-core==$(MEGATRON)
	@touch $@

test-megatron: $(MEGATRON_FOLDER)/.installed ## Megatron-core's tests on another of its versions (VERSION=0.16.1)
	PYTHONPATH=$(MEGATRON_FOLDER) $(BIN)/python -m pytest $(addprefix tests/test_megatron,.py _models.py _sequence.py) $(PYTEST_ARGS)

lint: $(TEST_STAMP) ## ruff, its format, and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(TEST_STAMP) ## rewrite the Python files in ruff's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# -c run.txt in test.in keeps the two in step. The header names no index, and no option of this machine's pip gets in.
LOCK := CUSTOM_COMPILE_COMMAND="make lock" ../$(BIN)/python -m piptools compile --quiet --allow-unsafe --strip-extras \
	--no-emit-options --no-emit-index-url --no-emit-find-links --no-emit-trusted-host

lock: $(TEST_STAMP) ## write requirements/*.txt anew from *.in; versions move only as far as they must (LOCK_ARGS=--upgrade)
	cd requirements && for name in build run test study eval nemo; do \
		$(LOCK) $(LOCK_ARGS) --output-file $$name.txt $$name.in || exit 1; done

study-env: $(STUDY_STAMP) ## what scripts/quantizer_study.py needs besides .venv: gguf and a small model, 90 MB

$(STUDY_STAMP): requirements/study.txt requirements/study_nodeps.txt $(TEST_STAMP)
	@rm -f $@
	@sh scripts/make_venv.sh .venv '3.12 3.13' requirements/study.txt nodeps:requirements/study_nodeps.txt
	@touch $@

eval-env: $(EVAL_STAMP) ## what echo-megatron lm-eval needs besides .venv: lm-evaluation-harness, 500 MB

$(EVAL_STAMP): requirements/eval.txt $(TEST_STAMP)
	@rm -f $@
	@sh scripts/make_venv.sh .venv '3.12 3.13' requirements/eval.txt
	@touch $@

docs: $(TEST_STAMP) ## API reference from the docstrings in build/api, half a minute; `make test` builds it, too
	@$(BIN)/python -W ignore scripts/build_docs.py --out build/api

nemo-env: $(NEMO_STAMP) ## .venv-nemo with NeMo 2.7.3 and megatron-core 0.15.3

$(NEMO_STAMP): requirements/nemo.txt requirements/nemo_nodeps.txt $(INSTALLER)
	@rm -f $@
	@sh scripts/make_venv.sh .venv-nemo 3.12 requirements/nemo.txt nodeps:requirements/nemo_nodeps.txt
	@touch $@

clean: ## remove environments, caches and build outputs (runs/ stays)
	rm -rf .venv .venv-nemo build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
