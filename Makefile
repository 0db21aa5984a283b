# `make demo` and `make test` need nothing but Python 3.11+: they make .venv and install into it first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint clean

demo: .venv/.recipes-installed
	$(BIN)/python recipes/quickstart.py

test: .venv/.test-installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q

lint: .venv/.test-installed
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:
	rm -rf .venv runs build *.egg-info

# One stamp per extra, made anew when what it installs changes.
.venv/.%-installed: setup.cfg constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[$*]'
	touch $@
