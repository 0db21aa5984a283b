# `make demo`, `make test` and `make methods` need nothing but Python 3.11+: they make .venv and install into it first.
PYTHON ?= python3
# What `make gpu-test` and `make gpu` run with: an interpreter that has PyTorch and Triton. It installs nothing.
GPU_PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow coverage lower-bounds methods evidence figures docs gpu-test gpu cpu-test lint lint-check dist wheel clean

demo: .venv/.recipes-installed
	$(BIN)/python recipes/quickstart.py

# The checks run beside the tests, and what they say comes last.
test: .venv/.test-installed
	@mkdir -p build; $(MAKE) --no-print-directory lint-check > build/lint-check.log 2>&1 & checks=$$!; \
		$(BIN)/python -m pytest -q -n 2 --dist loadfile; tests=$$?; \
		wait $$checks; failed=$$?; cat build/lint-check.log; \
		test $$tests = 0 -a $$failed = 0 || { echo "make test: failed (tests $$tests, lint-check $$failed)"; exit 1; }

# What takes long: engines are installed, real models run, processes are killed. None of these tests compares times. Files
# that take minutes come first, or one core waits for the other at the end.
MINUTES := $(patsubst %,tests/%.py,serving/test_vllm_plugin recipes/test_notebooks kernels/cpu/test_safety \
	recipes/test_scaling recipes/test_launch training/test_kill serving/test_onnx)
test-slow: .venv/.test-installed
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu and slow" $(MINUTES) \
		$(filter-out $(MINUTES),$(shell grep -rl --include='test_*.py' mark.slow tests))

# Which lines the CPU tests run, by module, and build/coverage/html/index.html; CONTRIBUTING.md says what it cannot see.
coverage: .venv/.test-installed
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q -n 2 --dist loadfile
	$(BIN)/coverage combine -q && $(BIN)/coverage html -q && $(BIN)/coverage report

# The oldest versions that setup.cfg allows, after a change of one: some tests in a venv of their own, and a record that
# `make test` compares. LOWER_BOUNDS_ARGS='torch==2.13.0+cpu' takes another version of torch.
lower-bounds: .venv/.test-installed
	$(BIN)/python tests/support/lower_bounds.py $(LOWER_BOUNDS_ARGS)

# Every method on a small Llama, its learning rate searched, three seeds: the runs that recipes/results/methods/ lacks
# (from nothing some 50, each several minutes of one core), then the page.
methods: .venv/.recipes-installed
	$(BIN)/python recipes/compare_methods.py

# The page of a real pretrained model: its material in runs/pretrained, what recipes/results/pretrained/ lacks (from nothing
# some 15 hours of one core), then the page.
evidence: .venv/.recipes-installed
	$(BIN)/python recipes/pretrained/material.py
	$(BIN)/python recipes/pretrained/measure.py
	$(BIN)/python recipes/pretrained/baselines.py
	$(BIN)/python recipes/pretrained/encoder.py
	$(BIN)/python docs/pretrained_page.py

# Every picture of the README and the site, from committed results.
figures: .venv/.docs-installed
	$(BIN)/python docs/figures/make.py

# The documentation site, in build/site; warnings are errors. DOCS_ARGS=--serve shows changes as they are made.
docs: .venv/.docs-installed
	$(BIN)/python docs/build_site.py $(DOCS_ARGS)

# On a GPU: whether kernels, GEMMs and layers compute the right thing. GPU_PYTHON needs torch, triton, transformers,
# accelerate, peft and pytest. Within ten minutes: `timeout -s INT 570 make gpu-test GPU_TEST_ARGS=-v` says what failed.
gpu-test:
	$(GPU_PYTHON) -m pytest -q -m gpu $(GPU_TEST_ARGS)

# On a GPU: kernels, GEMMs and a training step timed. GPU_ARGS='--sections kernels --minutes 4'.
gpu:
	$(GPU_PYTHON) recipes/benchmarks/gpu.py $(GPU_ARGS)

# Fix what ruff can fix, then check.
lint: .venv/.test-installed
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .
	$(MAKE) lint-check

# The one list of checks: for `make test`, for CI and for pre-commit.
SCHEMA := $(BIN)/check-jsonschema -q --builtin-schema
lint-check: .venv/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	@test ! -e kernels/__init__.py || { echo "kernels/ is a source root: its __init__.py shadows PyPI's kernels"; exit 1; }
	$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	$(SCHEMA) vendor.dependabot .github/dependabot.yml
	$(SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA) vendor.github-issue-forms $(filter-out %/config.yml, $(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(SCHEMA) vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor -q --offline --pedantic .github

# A source distribution and a wheel in dist/, made as a release makes them, each tried in a new venv without a compiler.
dist: .venv/.release-installed
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/support/try_wheel.py dist/*

# A wheel for this platform in dist/, with the kernels for CPUs compiled, tried where no compiler is.
wheel: .venv/.release-installed
	rm -rf dist build/lib build/bdist*
	SPARSE24_BUILD_KERNELS=1 $(BIN)/python -m build --wheel --outdir dist/built
	if test "$$(uname)" = Linux; then PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair dist/built/*.whl -w dist; \
		else mv dist/built/*.whl dist; fi
	rm -r dist/built
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/support/try_wheel.py dist/*.whl

# On another CPU: whether the kernels in C++ compute the right thing.
cpu-test: .venv/.test-installed
	$(BIN)/python -m pytest -q tests/kernels/cpu

# Not runs/, where trained models are.
clean:
	rm -rf .venv build dist *.egg-info

# One stamp per extra, replaced when what it installs changes.
.venv/.%-installed: setup.cfg constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[$*]'
	touch $@
