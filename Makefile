# SPDX-License-Identifier: Apache-2.0
#
# make setup     .venv with torch, the tools and PatrickStar itself (editable)
# make demo      a transformer trained larger than memory, next to plain PyTorch
# make test      C++ and Python tests, the sample: about 20 minutes on two cores
# make test-all  every test, and the C++ ones also under the sanitizers
# make check     format, lint, types, layers, sizes, docs, errors
# make bench     benchmarks, each with its baseline
#
# Needs a C++20 compiler, make, Python 3.10 or newer as python3, and PyPI.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-all check bench FORCE

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin

# The tools are those of .venv, whatever is active in the shell.
export PATH := $(BIN):$(PATH)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
unexport PYTHONHOME PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)

CREATED := $(VENV)/.stamp-created
REQUIREMENTS := $(VENV)/.stamp-requirements
PACKAGE := $(VENV)/.stamp-package
MODULES := $(VENV)/.modules

# What the installed package depends on. The text of Python sources is not among it: an
# editable install reads them where they are, but knows them by name.
BUILD_FILES := pyproject.toml CMakeLists.txt $(shell find cmake core glue -type f \
	\( -name '*.cc' -o -name '*.h' -o -name '*.in' -o -name '*.cmake' -o -name CMakeLists.txt \) \
	! -name '*_test.cc')

# Warnings are errors in CI; elsewhere a newer compiler must not stop an installation.
PIP_SETTINGS := $(if $(CI),--config-settings=cmake.define.PATRICKSTAR_WERROR=ON)

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup: $(PACKAGE)

$(CREATED):
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "Python 3.10 or newer is needed"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	touch $@

$(REQUIREMENTS): $(CREATED) requirements-torch.txt requirements-dev.txt
	$(BIN)/python -m pip install -q -r requirements-torch.txt
	$(BIN)/python -m pip install -q -r requirements-dev.txt
	touch $@

$(MODULES): $(CREATED) FORCE
	@find python -name '*.py' | sort | cmp -s - $@ || find python -name '*.py' | sort > $@

$(PACKAGE): $(REQUIREMENTS) $(MODULES) $(BUILD_FILES)
	$(BIN)/python -m pip install -q --no-build-isolation -e . $(PIP_SETTINGS)
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	scripts/test

test-all: setup
	scripts/test --all

check: setup
	scripts/check

bench: setup
	scripts/bench
