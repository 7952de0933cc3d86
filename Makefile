# The two commands of the README are `make demo` and `make test`; both make the environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: demo test lint unit docs clean

demo: $(STAMP)  ## eight virtual ranks, every all-reduce schedule: predicted and simulated times
	$(BIN)/python examples/schedules.py

test: lint docs unit  ## everything that must hold before a change lands

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet --site-dir build/site

unit: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadgroup

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the pinned environment needs Python 3.11 or later; name one: make PYTHON=python3.12 " + "demo")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
