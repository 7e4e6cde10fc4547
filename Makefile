# make demo: from nothing to a trained model, its record and its pictures, in minutes.
# make test: every test. Both make their own virtual environment first, and ask nothing.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed

DEMO_FLAGS ?=
TEST_FLAGS ?=

.PHONY: demo test lint install clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/launch -n 4 --device cpu python3 -m mmm.examples.fsdp_tp --tpsize 2 --dim 128 --n_heads 4 --n_kv_heads 2 \
	    --max_iters 120 --log_every 10 --outdir outputs/demo --overwrite $(DEMO_FLAGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

test: $(READY) lint
	$(BIN)/python -m pytest $(TEST_FLAGS)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
