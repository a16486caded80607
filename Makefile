# Two commands from a fresh clone: `make demo` trains the embedded model, `make test` runs every check.
# Both first make .venv with PYTHON (3.11 or newer) and install the pins of constraints.txt into it.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp
SHELL := /bin/bash

# Without bytecode files every start of Python would compile torch and diffusers anew, some 20 seconds each time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test bench constraints clean

demo: $(STAMP)
	$(BIN)/vgrpo train tiny
	@echo "The report: $$(ls -t runs/*/report.html | head -n 1)"

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest -q

bench: $(STAMP)
	$(BIN)/python bench/throughput.py
	$(BIN)/python bench/split.py tiny
	$(BIN)/python bench/shapes.py
	$(BIN)/python bench/seeds.py tiny --seeds 0 1 2

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "vgrpo needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,ocr]'
	@touch $@

# New pins: the newest versions that pyproject.toml admits, from an empty environment, with the torch that is named here,
# for its CPU build must be to be had where our runs are made.
TORCH ?= 2.13.0
constraints:
	rm -rf build/pins && $(PYTHON) -m venv build/pins
	build/pins/bin/python -m pip install -q torch==$(TORCH) -e '.[dev,ocr,trackers]'
	@{ echo "# What our own runs and tests use, all of it pinned. Made by \`make constraints\`: pip freeze of an empty environment"; \
	  echo "# with torch==$(TORCH) and '.[dev,ocr,trackers]' on Python $$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'), without the label of torch's build, so that any build fits."; \
	  build/pins/bin/python -m pip freeze --exclude-editable | sed -E 's/\+[a-z0-9.]+$$//'; } > constraints.txt
	rm -rf build/pins

clean: # build/ stays, it may hold hours of pretraining
	rm -rf .venv dist .ruff_cache .pytest_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
