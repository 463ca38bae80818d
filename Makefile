# These commands do all the set-up on a machine that has python3 (with venv), a C++17 compiler and make:
#
#   make demo      train the digits example with two workers
#   make dev       an environment that runs the sources as they are; again: compile what has changed
#   make test      run unit, parallel and integration tests; docs/contract.md says with how many workers
#
# Choices:  PYTHON=python3.12   MXNET=1.9.1 | 2.0.0b1   MPI=openmpi | mpich | none   TESTS='--help'
# Each choice has its own environment, .venv-py<version>-mx<version>[-<mpi>], made once and renewed when
# setup.cfg, the package or the native sources change.

.DELETE_ON_ERROR:
.NOTPARALLEL:
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
MXNET ?= 1.9.1
MPI ?= openmpi
JOBS ?= $(shell nproc)

PYVER := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(PYVER),)
$(error $(PYTHON) does not run; choose an interpreter with PYTHON=...)
endif
ifeq ($(filter $(MXNET),1.9.1 2.0.0b1),)
$(error MXNET=$(MXNET) is not one of 1.9.1, 2.0.0b1)
endif

# Open MPI needs no word in the name of the environment: it is the default.
VENV := .venv-py$(PYVER)-mx$(MXNET)$(if $(filter openmpi,$(MPI)),,-$(MPI))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What the examples with digits need beside it, in a folder of its own: MXNet imports SciPy wherever there is one, and an
# import takes more than half as long again then, which is much of the time that the tests need.
DEMO := $(VENV)/demo

mpi-extra-openmpi := ,mpi-openmpi
mpi-extra-mpich := ,mpi
mpi-extra-none :=
ifeq ($(origin mpi-extra-$(MPI)),undefined)
$(error MPI=$(MPI) is not one of openmpi, mpich, none)
endif
mxnet-extra-1.9.1 := ,mxnet
mxnet-extra-2.0.0b1 := ,mxnet2
# Both MXNets declare numpy<2, of which there is no wheel for Python 3.13 and later; the package's shim makes NumPy 2
# work, so there MXNet is installed without the dependencies it declares.
NEW_PYTHON := $(shell $(PYTHON) -c 'import sys; print("yes" if sys.version_info >= (3, 13) else "")')
# The compilers of kernels for GPUs, which need no GPU, and a second type checker, in the first environment only: they
# are large.
large-extra-1.9.1-openmpi := ,test-gpu,test-types
EXTRAS := test,lint,native$(large-extra-$(MXNET)-$(MPI))$(mpi-extra-$(MPI))$(if $(NEW_PYTHON),,$(mxnet-extra-$(MXNET)))

INPUTS := setup.cfg setup.py pyproject.toml Makefile \
          $(shell find kvstore_hvd native startup -type f \( -name '*.py' -o -name '*.pyi' -o -name '*.pth' \
                  -o -name 'py.typed' -o -name '*.[ch]pp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null)
CPP := $(shell find native tests/native -type f \( -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name '*.cu' \
                -o -name '*.cuh' \) 2>/dev/null)

.PHONY: help venv dev demo test test-mpich soak fuzz api lint format native-test tsan tsan-gpu asan bench clean distclean

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))
	@echo "Targets: demo dev test test-mpich soak fuzz api lint format native-test tsan tsan-gpu asan bench clean distclean"

# $(1): the command that installs packages
mxnet_for_new_python = $(if $(NEW_PYTHON),$(1) --no-deps mxnet==$(MXNET) && $(1) 'graphviz<0.9' requests)

venv: $(STAMP)

# Modules that were removed since the last build would still lie in build/lib*, and would be installed from there.
# Compiled objects (build/temp*) are kept: they are compared with their sources and headers.
$(STAMP): $(INPUTS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	rm -rf build/lib* build/bdist*
	KVHVD_BUILD_JOBS=$(JOBS) $(BIN)/python -m pip install --quiet '.[$(EXTRAS)]'
	$(call mxnet_for_new_python,$(BIN)/python -m pip install --quiet)
	@test -d $(DEMO) || { rm -rf $(DEMO).part && $(BIN)/python -m pip install --quiet --target $(DEMO).part \
		scikit-learn "numpy==$$($(BIN)/python -c 'import numpy; print(numpy.__version__)')" && \
		rm -rf $(DEMO).part/numpy* && mv $(DEMO).part $(DEMO); }
	@touch $@

# In an environment of its own, which needs no MPI and no compilers of kernels: a quarter of the size.
demo: $(VENV)-demo/.installed examples/digits.py
	$(VENV)-demo/bin/kvhvdrun -np 2 $(VENV)-demo/bin/python examples/digits.py

$(VENV)-demo/.installed: $(INPUTS)
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	rm -rf build/lib* build/bdist*
	KVHVD_BUILD_JOBS=$(JOBS) $(@D)/bin/python -m pip install '.[demo$(if $(NEW_PYTHON),,$(mxnet-extra-$(MXNET)))]'
	$(call mxnet_for_new_python,$(@D)/bin/python -m pip install)
	@touch $@

# One test: .venv-...-dev/bin/python -m pytest tests/unit/store/test_keys.py
dev: $(VENV)-dev/.installed
	KVHVD_BUILD_JOBS=$(JOBS) $(VENV)-dev/bin/python setup.py --quiet build_ext --inplace

$(VENV)-dev/.installed: setup.cfg pyproject.toml startup
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install 'setuptools>=64' wheel 'pybind11>=2.12'
	KVHVD_BUILD_JOBS=$(JOBS) $(@D)/bin/python -m pip install --no-build-isolation --editable \
	  '.[test,lint,native$(mpi-extra-$(MPI))$(if $(NEW_PYTHON),,$(mxnet-extra-$(MXNET)))]'
	$(call mxnet_for_new_python,$(@D)/bin/python -m pip install)
	@touch $@

test: $(STAMP)
	$(BIN)/python tests/run.py --out build/tests/$(VENV:.venv-%=%) $(TESTS)

test-mpich:
	$(MAKE) test MPI=mpich

# For ten minutes, or as many seconds as KVHVD_TEST_SOAK_S says. From another folder: the package is the installed one.
soak: $(STAMP)
	cd tests && $(abspath $(BIN))/kvhvdrun -np 4 $(abspath $(BIN))/python -m pytest -q -m soak parallel/test_soak.py parallel/test_resets.py
	cd tests && $(abspath $(BIN))/python -m pytest -q -m soak integration/test_elastic_faults.py integration/test_pauses.py integration/test_ulfm.py

# Random programs at four ranks, jobs that lose a worker, elastic jobs that are disturbed at random, and attacks on the
# sockets of such jobs. The files say how to choose them.
fuzz: $(STAMP)
	cd tests && $(abspath $(BIN))/kvhvdrun -np 4 $(abspath $(BIN))/python -m pytest -q -m fuzz parallel/test_fuzz.py
	cd tests && $(abspath $(BIN))/python -m pytest -q -m fuzz integration/test_fuzz_faults.py
	cd tests && $(abspath $(BIN))/python -m pytest -q -m fuzz integration/test_fuzz_elastic.py
	cd tests && $(abspath $(BIN))/python -m pytest -q -m fuzz integration/test_elastic_daemon.py integration/test_elastic_sockets.py

# The reference of all public names: build/api/index.html. Names that MXNet is needed for are made when they are asked for.
api: $(STAMP)
	$(BIN)/python -m pip install --quiet 'pdoc>=14'
	$(BIN)/python -c 'import kvstore_hvd.elastic as e, kvstore_hvd.mxnet as m; from pdoc.__main__ import cli; \
	  [setattr(x, n, getattr(x, n)) for x in (e, m) for n in x.__all__]; cli()' --docformat numpy -o build/api \
	  kvstore_hvd kvstore_hvd.mxnet kvstore_hvd.elastic kvstore_hvd.join kvstore_hvd.timeline kvstore_hvd.errors

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# $(1): name of the build folder, $(2): sanitizers, as native/CMakeLists.txt names them, $(3), $(4): what to build and to
# run if not all
comma := ,
define native
	$(BIN)/cmake -S native -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DKVHVD_SANITIZE=$(2)
	$(BIN)/cmake --build build/$(1) --parallel $(JOBS) $(3)
	$(BIN)/ctest --test-dir build/$(1) $(4) --parallel $(JOBS) --output-on-failure --no-tests=error --timeout 600
endef

native-test: $(STAMP) native/CMakeLists.txt
	$(call native,native,none)

tsan: $(STAMP) native/CMakeLists.txt
	$(call native,native-tsan,thread)

# Of the kernels for GPUs only, in a minute or two.
tsan-gpu: $(STAMP) native/CMakeLists.txt
	$(call native,native-tsan,thread,--target test_gpu_order,-R gpu)

asan: $(STAMP) native/CMakeLists.txt
	$(call native,native-asan,address$(comma)undefined)

bench: $(STAMP) benchmarks/allreduce.py benchmarks/gradients.py benchmarks/train.py
	mkdir -p build/bench
	for name in allreduce gradients train; do \
	  $(BIN)/python benchmarks/$$name.py --json build/bench/$$name.json; \
	done

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find kvstore_hvd tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv-py*-mx* kvstore_hvd/_native*.so
