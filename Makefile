# make demo    sets everything up, shows the relay at work
# make why     the wrong ways to start a job beside the right one, with counts
# make test    sets everything up, runs linters and all tests; PG=15|16|17|18, ARGS="-k purge";
#              JOBS=3 at a time, each with servers of its own, since most of the time they wait
# make test-lowest   the package's own tests, with the lowest versions of its libraries
# make dist    builds and checks what a release uploads
# make chaos   everything fails at random, and nothing is lost; SECONDS=600, SEED=… replays
# make kill9   N=100 times kill -9 of the relay under load; SEED=…
# make simulate    the relay among modelled servers, N=100000 schedules from SEED=1 on; N=1 SEED=… plays one again
# make failpoints  kill -9 at each of some named places, N=5 times
# make mutants     breaks the relay on purpose, many times: the tests find each
# make fuzz    garbage, guided by coverage, for whatever reads bytes that others wrote; SECONDS=600
# make bench   measures; make lint; make clean
PYTHON ?= python3
PG ?= 18
JOBS ?= 3
ARGS ?=
SECONDS ?= 120
SEED ?=
N ?= 100
BIN := .venv/bin
PIP := $(BIN)/python -m pip -q --disable-pip-version-check

.PHONY: demo why test chaos kill9 simulate failpoints mutants fuzz test-lowest bench bench-purge lint dist clean

demo: .venv/demo.stamp
	@$(BIN)/cdc-outbox demo $(ARGS)

why: .venv/demo.stamp
	@$(BIN)/python -m examples.why

test: lint
	@$(BIN)/pytest --pg $(PG) -n $(JOBS) --dist worksteal $(ARGS)

LOWEST := tests/unit tests/integration/test_gate.py tests/integration/test_record.py \
    tests/integration/test_init_slot.py tests/faults/test_kill.py

test-lowest: .venv/lowest.stamp
	@.venv/lowest/bin/pytest --pg $(PG) -n $(JOBS) $(LOWEST) $(ARGS)

chaos: .venv/dev.stamp
	@$(BIN)/python -m tests.chaos --pg $(PG) --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

kill9: .venv/dev.stamp
	@$(BIN)/python -m tests.chaos.kill9 --pg $(PG) --kills $(N) $(if $(SEED),--seed $(SEED)) $(ARGS)

simulate: N := $(if $(filter file,$(origin N)),100000,$(N))
simulate: .venv/dev.stamp
	@$(BIN)/python -m tests.simulation $(N) $(SEED)

failpoints: N := $(if $(filter file,$(origin N)),5,$(N))
failpoints: .venv/dev.stamp
	@FAILPOINT_ROUNDS=$(N) $(BIN)/pytest --pg $(PG) -o faulthandler_timeout=0 tests/failpoints $(ARGS)

mutants: .venv/dev.stamp
	@$(BIN)/python -m tests.mutants $(ARGS)

fuzz: .venv/dev.stamp
	@$(PIP) install --group fuzz
	@$(BIN)/python -m tests.fuzz $(SECONDS) $(ARGS)

bench: .venv/dev.stamp
	@$(BIN)/python -m benchmarks $(ARGS)

bench-purge: .venv/dev.stamp
	@$(BIN)/python -m benchmarks.purge $(ARGS)

lint: .venv/dev.stamp
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

dist: .venv/dev.stamp
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation >/dev/null
	@$(BIN)/twine check --strict dist/*

clean:
	@rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/pip.stamp: tests/setup.sh
	@PYTHON="$(PYTHON)" sh tests/setup.sh
	@touch $@

.venv/demo.stamp: .venv/pip.stamp pyproject.toml
	@$(PIP) install -e '.[demo]'
	@touch $@

.venv/dev.stamp: .venv/pip.stamp pyproject.toml
	@$(PIP) install -e . --group dev
	@touch $@

.venv/lowest.stamp: .venv/pip.stamp pyproject.toml tests/lowest.py
	@rm -rf .venv/lowest
	@$(BIN)/python -m venv --without-pip .venv/lowest
	@$(BIN)/python tests/lowest.py >.venv/lowest/versions.txt
	@$(PIP) --python .venv/lowest/bin/python install -r .venv/lowest/versions.txt -e . --group test
	@touch $@
