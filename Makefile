# The two commands a newcomer needs: `make demo` and `make test`. Both prepare .venv by themselves.
PYTHON ?= python3
BIN := .venv/bin
PACKAGES := builder calibration graph_passes plugins
CPP := $(shell git ls-files '*.cu' '*.cuh' '*.cpp' '*.h')
# Container images set it; then every process would compile torch and all else that it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: build/types reference help demo demo-llm demo-serve test test-all test-fast docs lint format install wheel clean

help:
	@echo "make demo       a real model to a verified NVFP4 engine, no GPU needed"
	@echo "make demo-llm   a language model with its cache to an engine and to text, no GPU needed"
	@echo "make demo-serve a language model behind OpenAI's HTTP API and a page to try it, no GPU needed"
	@echo "make test       fast tests, then a variant of each slow one (GPU tests skip without a GPU)"
	@echo "make test-fast  the fast tests only"
	@echo "make test-all   all tests, with every variant, architecture and family: before a release"
	@echo "make docs       the documentation as a site, in build/site"
	@echo "make lint       ruff, mypy, import-linter, clang-format"
	@echo "make format     rewrite the sources in the project's format"
	@echo "make wheel TARGETS=rtx-blackwell,thor   wheels with compiled plugin libraries, in dist"
	@echo "make clean      remove the environment and everything built"

install: .venv/.installed

# A .venv that was never finished may be another Python's, too old for the packages; venv would keep it.
.venv/.installed: pyproject.toml constraints.txt
	@echo "Preparing .venv: a few minutes on the first run"
	$(PYTHON) -m venv $(if $(wildcard $@),,--clear) .venv
	$(BIN)/pip install -qq --upgrade pip
	# Byte code of the few modules that are imported is made then, not of all that packages hold.
	$(BIN)/pip install -qq --no-compile --constraint constraints.txt --editable '.[test,lint]'
	@touch $@

demo: install
	$(BIN)/python examples/minilm_demo.py

demo-llm: install
	$(BIN)/python examples/llm_demo.py

demo-serve: install
	$(BIN)/trt-nvfp4 serve tests/trained_models/llama

# Fast tests first, so that a mistake shows early. A process for each CPU that is there for them (xdist's auto takes half of
# what clouds call CPUs, and all of a machine that others share), one thread each; a file's tests stay together, because
# they share what they export and build. In the order given: xdist would put files of few tests, which take long, last.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $$(nproc) --dist loadfile --no-loadscope-reorder --durations=25

# The files that keep one core busy for long go first, so that the other does not wait for them at the end.
LONGEST := tests/plugins/test_emulated_w4a4.py \
	$(filter-out %_w4a4.py,$(wildcard tests/plugins/test_emulated*.py)) tests/graph_passes/patterns/test_zoo.py
TESTS := $(wildcard tests/*/test_*.py tests/*/*/test_*.py tests/*/*/*/test_*.py)

test: test-fast
	$(PYTEST) -m "slow and not nightly" $(LONGEST) $(filter-out $(LONGEST),$(TESTS))

test-fast: install
	$(PYTEST) -m "not slow"

# Before a release: the variants of slow tests, too, and architectures and families whose kernels or code another one has.
test-all: test
	$(PYTEST) -m nightly

# mypy follows links, not the import hook of an editable install.
build/types: 
	mkdir -p build/types/trt_nvfp4
	ln -sfn $(addprefix ../../../trt_nvfp4/,$(notdir $(wildcard trt_nvfp4/*))) build/types/trt_nvfp4/
	for p in $(PACKAGES); do ln -sfn ../../../$$p build/types/trt_nvfp4/$$p; done

lint: install build/types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=build/types $(BIN)/mypy -p trt_nvfp4
	MYPYPATH=build/types $(BIN)/mypy --strict examples/build_minilm.py
	cd build/types && $(CURDIR)/$(BIN)/lint-imports --config $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.import_linter_cache
	$(BIN)/clang-format --dry-run --Werror $(CPP)

# The tables of options on the reference page, from the commands.
reference: install
	$(BIN)/python -m trt_nvfp4.builder.cli.reference docs/reference/command_line.md

# The documentation as a site, in build/site.
docs: install
	$(BIN)/python -m mkdocs build

# With compiled plugin libraries inside, for machines without nvcc: make wheel TARGETS=rtx-blackwell,thor
wheel: install
	$(BIN)/python -m trt_nvfp4.builder.cli.wheels --targets $(TARGETS) --output dist

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf .venv build dist demo-output *.egg-info
