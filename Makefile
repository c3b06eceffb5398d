# Two commands: `make demo` and `make test`. They need Python 3.11 to 3.13, and set up the rest in .venv.

BIN := .venv/bin
ifeq ($(shell uname -s),Linux)
RUN_EXTRAS := cpu,demo
else
RUN_EXTRAS := demo
endif
# What a test computes beside a stage must be equal to the last bit.
PYTEST = $(BIN)/python scripts/like_a_stage.py -m pytest
# Four at a time: most of them wait for a process of their own. A file's tests stay together, for several files
# make a cluster of hosts first and share it. ARGS="-n 0" runs them in turn.
SIDE_BY_SIDE = -n 4 --dist loadfile --no-loadscope-reorder
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# A Python that was upgraded away takes .venv with it. Before anything else, for make looks at a stamp
# before it makes what the stamp depends on.
$(shell scripts/venv.sh sweep)

.PHONY: help demo test quick check fix bench clean venv openblas

help:
	@echo "make demo   build a small model, serve it, ask it one question (ONCE=1: then stop)"
	@echo "make test   every test            make quick  those that take seconds"
	@echo "make check  format, lint, types, import contracts, docs map, sizes"
	@echo "make fix    what of it can be mended by itself"
	@echo "make bench  measurements, one JSON line each"
	@echo "make clean  remove .venv and what tools left here (models stay in the user's cache folder)"

demo: .venv/demo.stamp
	$(BIN)/omlx demo $(if $(filter 1,$(ONCE)),--once)

test: .venv/dev.stamp openblas
	$(PYTEST) -rs $(SIDE_BY_SIDE) $(ARGS)

quick: .venv/dev.stamp
	$(PYTEST) -m "not slow" $(ARGS)

check: .venv/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/docs_map.py --check
	$(BIN)/python scripts/size_gate.py

fix: .venv/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python scripts/docs_map.py

bench: .venv/dev.stamp
	$(BIN)/python -m bench $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find omlx tests bench scripts -name __pycache__ -type d -prune -exec rm -rf {} +

venv:
	@scripts/venv.sh

openblas:
	@scripts/openblas.sh

# Stamps, so that a second run starts at once. venv comes first, but does not make a stamp old.
.venv/demo.stamp: pyproject.toml constraints.txt | venv
	$(PIP_INSTALL) -e '.[$(RUN_EXTRAS)]'
	@touch $@

.venv/dev.stamp: pyproject.toml constraints.txt | venv
	$(PIP_INSTALL) -e '.[$(RUN_EXTRAS),cluster,dev]'
	@touch $@ .venv/demo.stamp
