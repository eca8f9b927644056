# Every target sets up .venv first, once.
#   PYTHON        interpreter to build .venv with (3.11 or newer)
#   TORCH_INDEX   package index with CPU builds of torch, if the default index serves CUDA builds:
#                 make TORCH_INDEX=https://download.pytorch.org/whl/cpu demo
PYTHON      ?= $(shell command -v python3.11 || command -v python3)
TORCH       ?= torch==2.13.0
TORCH_INDEX ?=
VENV        ?= .venv
PY          := $(VENV)/bin/python
# pip unpacks and compiles on one core. uv unpacks on all; if it cannot read the configured package index, pip does the
# work. All cores compile at the end, except what a run hardly imports.
PIP         := $(PY) -m pip --disable-pip-version-check install --quiet --no-compile
UV          := $(or $(shell command -v uv),$(VENV)/bin/uv) pip install --quiet --python $(PY)
# In a variable, because the comma would end an argument of call.
OWN         := .[cpu,dev]
INSTALL      = $(UV) $(1) || $(PIP) $(1)
SELDOM      := transformers/models|anthropic|Cryptodome|fontTools|modelscope|mypy|numba|pandas
COMPILE     := $(PY) -W ignore -m compileall -qq -j 0 -x 'site-packages/(.*/(tests?|multimodal_gen)|$(SELDOM))/'
STAMP       := $(VENV)/.complete
PINS        := requirements/cpu-engines-no-deps.txt requirements/constraints.txt
PYTEST      := $(PY) -m pytest
# .venv has a CPU build of torch. On a machine with GPUs, this is the Python in which slime[gpu,dev] is installed.
GPU_PY      ?= $(or $(shell command -v python),$(PYTHON))
# Two threads leave room for engine and trainer on a small machine.
export OMP_NUM_THREADS ?= 2
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all test-gpu test-recipes test-pages test-wheel check format docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## .venv with the CPU stack (stock SGLang, sglang-router, Megatron-core, Ray)

$(STAMP): pyproject.toml $(PINS)
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || \
	  { echo "no virtual environment from '$(PYTHON)': install python3.11 and python3.11-venv, or set PYTHON" >&2; exit 1; }
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "slime needs Python 3.11 or newer" >&2; exit 1; }
	@echo "setting up $(VENV) (some minutes, once)"
	$(PIP) 'pip>=25' uv
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(call INSTALL,-c requirements/constraints.txt -e '$(OWN)' '$(TORCH)')
	$(call INSTALL,--no-deps -r requirements/cpu-engines-no-deps.txt)
	@$(COMPILE) "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true # some are templates
	@touch $@

demo: $(STAMP) ## GRPO of a real 135M model on two CPU cores, accuracy before and after, a report
	PY=$(PY) bash recipes/demo/run.sh

# Three sessions side by side, one thread each, because tests that start engines, ranks or runs mostly wait; each costs
# its imports. Tests of the first share an engine, those of the second share training ranks, the last makes whole runs
# and has what the others have not. It shows its output as it comes, the output of the others comes at the end. On
# Ctrl-C, each of them ends what it started.
IN_ROOM         = $(wildcard $(addprefix tests/$(1)/,$(2)))
SESSION_1      := $(call IN_ROOM,unit,rollout) $(call IN_ROOM,contract,agent rollout serving weights)
SESSION_2      := $(call IN_ROOM,unit,data rewards settings) $(call IN_ROOM,contract,training)
SESSION_3      := $(addprefix --ignore=,$(SESSION_1) $(SESSION_2)) tests
define SESSIONS
@export OMP_NUM_THREADS=1; logs=$$(mktemp -d); pids=; failed=0; \
trap 'kill $$pids 2>/dev/null; rm -rf $$logs' EXIT; trap 'wait; exit 130' INT; trap 'exit 143' TERM; \
$(foreach n,1 2,$(PYTEST) $(SELECT) -p no:cacheprovider $(SESSION_$(n)) >$$logs/$(n) 2>&1 & pids="$$pids $$!";) \
$(PYTEST) $(SELECT) $(SESSION_3) || failed=1; \
for pid in $$pids; do wait $$pid || failed=1; done; cat $$logs/*; exit $$failed
endef

test: SELECT := -m "not slow and not style"
test: $(STAMP) ## all tests but the slow ones, real engines included
	$(SESSIONS)

test-all: SELECT := --hypothesis-profile=explore
test-all: $(STAMP) ## all tests, and new examples for property tests
	$(SESSIONS)

test-gpu: ## tests/gpu on one GPU or two, side by side, with a report in build/gpu; needs slime[gpu,dev]
	$(GPU_PY) tests/gpu/run_gpu_tests.py

test-recipes: $(STAMP) ## the recipes for GPUs, made tiny, each through one real step on this machine
	$(PYTEST) -p no:cacheprovider tests/e2e/test_recipes_for_gpus.py

test-pages: $(STAMP) ## the pages of docs/path, each as it stands, with what it shows compared to what it prints
	$(PY) tests/pages/run_pages.py

test-wheel: $(STAMP) ## the wheel and the source distribution, and the demo from the wheel in an empty folder
	$(PYTEST) $(SELECT) -p no:cacheprovider tests/unit/project/test_wheel.py

check: $(STAMP) ## lint, format, types, import contracts, house rules; how much code each room has
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports
	$(PYTEST) -p no:cacheprovider -q -m style tests/unit/project
	$(PY) tests/project/tokens_per_room.py

format: $(STAMP) ## rewrite the sources in the house format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# The site needs none of slime's own packages, so its builder has an environment of its own.
SITE_VENV  := build/site-venv
SITE_PINS   = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])

$(SITE_VENV)/.complete: pyproject.toml
	$(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/pip --disable-pip-version-check install --quiet $$($(PYTHON) -c '$(SITE_PINS)')
	@touch $@

docs: $(SITE_VENV)/.complete ## the documentation as a site in build/site; a broken link fails
	$(SITE_VENV)/bin/python -m sphinx -q -E -W --keep-going -c docs/site docs build/site
	@echo "open build/site/index.html"

clean: ## caches and build leftovers; runs/, assets/ and .venv stay
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find slime tests recipes examples -name __pycache__ -type d -prune -exec rm -rf {} +
