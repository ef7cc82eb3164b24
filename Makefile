# Two commands on a fresh machine: `make demo`, `make test`. Each first makes the environment.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help env demo demo-pd serve test test-gpu compat releases identity soak fuzz check docs \
	bench-acceptance clean

# The SGLang of the environment. Each release but the default has an environment of its own.
DEFAULT_SGLANG := 0.5.17
SGLANG ?= $(DEFAULT_SGLANG)
VENV ?= $(if $(filter $(DEFAULT_SGLANG),$(SGLANG)),.venv,.venv-$(SGLANG))
MODEL ?= models/demo-5m
PORT ?= 30000
# More arguments for the server (serve) or the benchmark (bench-acceptance).
ARGS ?=
PYTEST_ARGS ?=

PYTHON := $(VENV)/bin/python
UNIT_TESTS = $(filter-out %.md tests/__pycache__ tests/sglang tests/gpu_server,$(wildcard tests/*))
# Tests of servers that share none with the others, behind the unit tests, so that both lanes take
# about as long.
SECOND_LANE := $(addprefix tests/sglang/,test_disaggregation.py test_prefix_server.py test_teeth.py)
INSTALLED := $(VENV)/.installed
# pyenv leaves commands behind for versions that are not active, so candidates are run, not found.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
HOST_PYTHON ?= $(shell for python in python3.12 python3.11 python3; do \
	$$python -c '$(SUPPORTED)' 2>/dev/null && echo $$python && break; done)

# Thread pools of several server processes on few cores slow one another down tenfold.
export OMP_NUM_THREADS := 1
# uv leaves compiling to the first import; unless that may be kept, every server start compiles
# thousands of modules in three processes again.
unexport PYTHONDONTWRITEBYTECODE
CPU_SERVER := --device cpu --dtype float32 --mem-fraction-static 0.1 --sleep-on-idle

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(INSTALLED) ## make the environment in .venv (done by itself where needed)

demo: $(INSTALLED) ## one program on KVSpec and on plain SGLang: same text? how fast? how many bytes?
	$(PYTHON) examples/demo.py

demo-pd: $(INSTALLED) ## prefill and decode on two servers: same text as one? and a picture of a request
	$(PYTHON) examples/demo_pd.py

serve: $(INSTALLED) ## serve MODEL with --kvspec on PORT until Ctrl-C; more server flags in ARGS
	$(PYTHON) -m sglang.launch_server --model-path $(MODEL) --port $(PORT) \
		$(CPU_SERVER) --kvspec $(ARGS)

# In two lanes: servers wait for one core most of the time. What the second says comes at the end.
test: $(INSTALLED) ## unit tests beside tests on the real server; one after the other with PYTEST_ARGS
ifeq ($(strip $(PYTEST_ARGS)),)
	@mkdir -p .kvspec; \
	(failed=0; $(PYTHON) -m pytest $(UNIT_TESTS) || failed=1; \
		$(PYTHON) -m pytest $(SECOND_LANE) || failed=1; \
		exit $$failed) > .kvspec/second-lane.log 2>&1 & second=$$!; \
	trap "kill $$second" INT TERM; \
	$(PYTHON) -m pytest tests/sglang $(addprefix --ignore=,$(SECOND_LANE)) && first=0 || first=$$?; \
	wait $$second && second=0 || second=$$?; \
	cat .kvspec/second-lane.log; \
	test $$first -eq 0 -a $$second -eq 0
else
	$(PYTHON) -m pytest $(UNIT_TESTS) tests/sglang $(PYTEST_ARGS)
endif

# The Python of a machine with a GPU, with SGLang, pytest and hypothesis: no environment here.
test-gpu: ## tests of kernels and servers on CUDA devices: make test-gpu PYTHON=/path/to/python
	PYTHONPATH=.:kernels:patches:testkit $(PYTHON) -m pytest \
		$(wildcard tests/unit/kernels tests/gpu tests/gpu_server) $(PYTEST_ARGS)

compat: $(INSTALLED) ## a sample of the tests on every SGLang that is supported: 15 minutes each
	$(PYTHON) benchmarks/check_compat.py $(ARGS)

releases: $(INSTALLED) ## names that KVSpec uses in SGLang's wheels, which are downloaded: 1 minute
	$(PYTHON) benchmarks/check_releases.py $(ARGS)

identity: $(INSTALLED) ## every prompt, model, codec and scenario against plain SGLang: hours
	$(PYTHON) -m pytest tests/sglang -m identity \
		--identity-report benchmarks/results/identity.json $(PYTEST_ARGS)

soak: $(INSTALLED) ## half an hour of random traffic against plain SGLang's answers
	$(PYTHON) -m pytest tests/sglang/test_soak.py -m soak \
		--soak-report benchmarks/results/soak.json $(PYTEST_ARGS)

fuzz: $(INSTALLED) ## 10,000 generated requests to servers of every role: about 15 minutes
	$(PYTHON) benchmarks/bench_hardening.py --pairs 0 --refusals 1 --out .kvspec/fuzz.json $(ARGS)

check: $(INSTALLED) ## formatting, lint, types, layers, language, names of SGLang, documentation
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy $(addprefix sglang_kvspec/,core codecs scorers kv planning runtime engine \
		transport door cli.py) kernels/kvspec_kernels testkit/kvspec_testkit \
		benchmarks/planner
	$(PYTHON) -m pytest -q tests/test_layers.py
	$(PYTHON) benchmarks/check_words.py
	$(PYTHON) benchmarks/check_releases.py --cached
	$(PYTHON) -m mkdocs build

docs: $(INSTALLED) ## tables from results and code, then the site in .kvspec/site; broken links fail
	$(PYTHON) benchmarks/doc_tables.py
	$(PYTHON) -m mkdocs build

bench-acceptance: $(INSTALLED) ## mean accepted draft length per codec, with a curve
	$(PYTHON) benchmarks/bench_acceptance.py $(ARGS)

clean: ## delete caches and build output; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache .kvspec
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# uv installs in a quarter of pip's time. Its cache lies in the environment, on the same disk, so
# that files are linked, not copied, and it goes afterwards. Where uv cannot run or reach an index,
# pip can.
$(INSTALLED): export UV_CACHE_DIR := $(abspath $(VENV))/uv-cache
$(INSTALLED): export UV_HTTP_TIMEOUT := 180
$(INSTALLED): pyproject.toml testkit/pyproject.toml
	@if [ -z "$(HOST_PYTHON)" ]; then \
		echo "Python 3.11 or 3.12 is needed, found: $$(python3 --version 2>&1 || true)." \
			"Name one with: make HOST_PYTHON=/path/to/python3.12 ..." >&2; \
		exit 1; \
	fi
	@echo "Making $(VENV) with SGLang $(SGLANG) and PyTorch: about 9 GB, 2 to 8 minutes. Once only."
	@$(PYTHON) -c '$(SUPPORTED)' 2>/dev/null || { \
		rm -rf $(VENV); \
		$(HOST_PYTHON) -m venv $(VENV) 2>/dev/null || { \
			echo "No ensurepip here, taking pip from $(HOST_PYTHON)."; \
			$(HOST_PYTHON) -m venv --clear --without-pip $(VENV); \
			$(HOST_PYTHON) -m pip --python $(PYTHON) install pip; \
		}; \
	}
	@set -x; $(PYTHON) -m pip install --quiet --disable-pip-version-check uv || true
	@index="$${PIP_INDEX_URL:-$$($(PYTHON) -m pip config get global.index-url 2>/dev/null || true)}"; \
	if [ -n "$$index" ]; then export UV_DEFAULT_INDEX="$$index"; fi; \
	set -x; \
	$(PYTHON) -m uv pip install --python $(PYTHON) --override .ci/no-gpu.txt \
		'sglang==$(SGLANG)' -e '.[test,bench,docs]' -e testkit \
		|| $(PYTHON) -m pip install 'sglang==$(SGLANG)' -e '.[test,bench,docs]' -e testkit
	@rm -rf $(UV_CACHE_DIR)
	@touch $@
