# Thin names. The work is in scripts/, the CMake presets, pytest, examples/demo.py and benchmarks/; ARGS goes to it:
#   make test ARGS="--only release,python"    make demo ARGS="--size 4GB"    make bench ARGS="--only cpu"
.PHONY: help setup build test demo bench lint docs format asan tsan wheel clean
.DEFAULT_GOAL := help
ARGS ?=

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## install what all of the commands below need (apt packages as root, Python packages into .venv)
	@scripts/setup.sh

build:  ## compile the library, the command line and the C++ tests: build/release
	@scripts/setup.sh build test
	@scripts/run_tests.py --build-only --only release

test:  ## every test: C++ plain and under sanitizers, Python, the outside example, fuzzing
	@scripts/setup.sh test
	@scripts/run_tests.py $(ARGS)

asan:  ## the C++ tests under the address and undefined-behaviour sanitizers
	@scripts/setup.sh test
	@scripts/run_tests.py --only asan

tsan:  ## the C++ tests under the thread sanitizer
	@scripts/setup.sh test
	@scripts/run_tests.py --only tsan

demo:  ## a Llama-shaped model loaded, saved, and generating in half its memory, beside torch, safetensors and fio
	@scripts/setup.sh demo
	@scripts/install_package.sh
	@.venv/bin/python examples/demo.py $(ARGS)

bench:  ## the measurements of docs/performance.md, beside fio
	@scripts/setup.sh bench
	@scripts/install_package.sh
	@.venv/bin/python benchmarks/bench.py $(ARGS)

lint:  ## formatting, static analysis, types, layers and documentation
	@scripts/setup.sh lint
	@scripts/lint.py $(ARGS)

docs:  ## the documentation site: build/docs/index.html
	@scripts/setup.sh docs
	@scripts/install_package.sh
	@scripts/build_docs.sh

format:  ## bring C++ and Python into the project's layout
	@scripts/setup.sh lint
	@scripts/lint.py --fix

wheel:  ## dist/*.whl, with all it needs inside
	@scripts/setup.sh package
	@scripts/install_package.sh

clean:  ## remove what was built (.venv stays)
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache
