# make demo    sets everything up, shows the relay at work
# make why     the wrong ways to start a job beside the right one, with counts
# make test    sets everything up, runs linters and all tests; PG=15|16|17|18, ARGS="-k purge";
#              JOBS=3 at a time, each with servers of its own, since most of the time they wait
# make bench   measures; make lint; make clean
PYTHON ?= python3
PG ?= 18
JOBS ?= 3
ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check

.PHONY: demo why test bench bench-purge lint clean

demo: .venv/demo.stamp
	@$(BIN)/cdc-outbox demo $(ARGS)

why: .venv/demo.stamp
	@$(BIN)/python -m examples.why

test: lint
	@$(BIN)/pytest --pg $(PG) -n $(JOBS) $(ARGS)

bench: .venv/dev.stamp
	@$(BIN)/python -m benchmarks $(ARGS)

bench-purge: .venv/dev.stamp
	@$(BIN)/python -m benchmarks.purge $(ARGS)

lint: .venv/dev.stamp
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

clean:
	@rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/pip.stamp: tests/setup.sh
	@PYTHON="$(PYTHON)" sh tests/setup.sh
	@touch $@

.venv/demo.stamp: .venv/pip.stamp pyproject.toml
	@$(PIP) -e '.[demo]'
	@touch $@

.venv/dev.stamp: .venv/pip.stamp pyproject.toml
	@$(PIP) -e . --group dev
	@touch $@
