# `make demo`, `make test` and `make methods` need nothing but Python 3.11+: they make .venv and install into it first.
PYTHON ?= python3
# What `make gpu` runs with: an interpreter that has PyTorch and Triton. It installs nothing.
GPU_PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow lower-bounds methods figures docs gpu lint clean

demo: .venv/.recipes-installed
	$(BIN)/python recipes/quickstart.py

test: .venv/.test-installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/mypy
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

# What takes long, one after the other: most of these start several processes themselves.
test-slow: .venv/.test-installed
	$(BIN)/python -m pytest -q -m "not gpu and slow"

# The oldest versions that setup.cfg allows, after a change of one: some tests in a venv of their own, and a record that
# `make test` compares. LOWER_BOUNDS_ARGS='torch==2.13.0+cpu' takes another version of torch.
lower-bounds: .venv/.test-installed
	$(BIN)/python tests/lower_bounds.py $(LOWER_BOUNDS_ARGS)

# Every method on two small models, three seeds: what is missing in recipes/results/methods/, then the page.
methods: .venv/.recipes-installed
	$(BIN)/python recipes/methods.py

# Every picture of the README and the site, from committed results.
figures: .venv/.docs-installed
	$(BIN)/python docs/figures/make.py

# The documentation site, in build/site; warnings are errors. DOCS_ARGS=--serve shows changes as they are made.
docs: .venv/.docs-installed
	$(BIN)/python docs/build_site.py $(DOCS_ARGS)

# On a GPU: kernels and GEMMs checked first, then timed, then models. GPU_ARGS='--sections kernels --minutes 4'.
gpu:
	$(GPU_PYTHON) recipes/benchmarks/gpu.py $(GPU_ARGS)

lint: .venv/.test-installed
	$(BIN)/ruff check --fix . && $(BIN)/ruff format . && $(BIN)/lint-imports && $(BIN)/mypy

clean:
	rm -rf .venv runs build *.egg-info

# One stamp per extra, made anew when what it installs changes.
.venv/.%-installed: setup.cfg constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[$*]'
	touch $@
