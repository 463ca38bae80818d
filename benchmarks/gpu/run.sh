#!/usr/bin/env bash
# Everything that needs a GPU, in one call of at most nine minutes: builds, tests, measures. One GPU is enough.
#
#   benchmarks/gpu/run.sh [folder for what comes out; default: $OUT, or benchmarks/results]
#
# Needs: NVIDIA's driver, Python 3.9 or newer with NumPy, CuPy 13 or 14 and pytest; a C++ compiler and pybind11 for the
# part that starts processes (left out without them); NCCL, compute-sanitizer and matplotlib where they are there. What
# is missing is installed with pip, for PYTHON (the interpreter to use), if there is a GPU and an index can be reached;
# nothing is when all is there, so that a machine without a network works with wheels that were installed before.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${1:-${OUT:-benchmarks/results}}
python=${PYTHON:-python3}
export PYTHONPATH="$PWD:$PWD/tests:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32
# Compiled kernels are kept in the cache, or compiled again and again.
cache=${XDG_CACHE_HOME:-${HOME:-}/.cache}
mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ] || export XDG_CACHE_HOME="$(mktemp -d)"
mkdir -p "$out"
log="$out/gpu-run.log"
: >"$log"
failed=()

say() { printf '\n==== [%3ds] %s\n' "$SECONDS" "$*" | tee -a "$log"; }

# step LIMIT_S NAME COMMAND...: none takes longer than its limit, nor all together than nine minutes; one that fails does
# not end the others.
step() {
  local limit=$1 name=$2 left=$((530 - SECONDS))
  shift 2
  if [ "$left" -lt 10 ]; then
    say "$name: no time left"
    failed+=("$name")
    return
  fi
  [ "$limit" -lt "$left" ] || limit=$left
  say "$name"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee -a "$log" | tail -n 60
  [ "${PIPESTATUS[0]}" -eq 0 ] || failed+=("$name")
}

has() { "$python" -c "import $1" 2>/dev/null; }

major=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p' | head -1)
major=${major:-12}
[ "$major" -gt 13 ] && major=13
missing=()
has numpy || missing+=(numpy)
has pytest || missing+=(pytest)
has pytest_timeout || missing+=(pytest-timeout)
has cupy || missing+=("cupy-cuda${major}x>=13,<15")
if [ ${#missing[@]} -gt 0 ] && nvidia-smi >/dev/null 2>&1; then
  # Not elsewhere: CuPy may bring a newer NumPy than the interpreter's other packages take. Without a network it is soon
  # known.
  step 120 install "$python" -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 10 "${missing[@]}"
fi
for module in numpy pytest pytest_timeout cupy; do
  has "$module" || { say "needed, but not there: $module ($python)" && failed+=("$module"); }
done

step 20 machine bash -c "nvidia-smi; nvidia-smi topo -m; $python -m pip list 2>/dev/null |
  grep -i -E 'cupy|nccl|nvrtc|numpy|pytest|mpi4py|pybind11'; git log -1 --format='commit %h' 2>/dev/null; true"
if ! "$python" -c 'import glob, sys; sys.exit(not glob.glob("kvstore_hvd/_native*.so"))' ||
  ! "$python" -c 'from kvstore_hvd import native; native.abi()' 2>/dev/null; then
  if has pybind11; then
    step 150 build env KVHVD_BUILD_JOBS="$(nproc)" "$python" setup.py --quiet build_ext --inplace
  else
    say "no pybind11: nothing is built, and no processes are started through the launcher"
  fi
fi

# What fails may wait some seconds for it: a few failures tell enough, and leave time for the rest.
step 150 test_kernels "$python" -m pytest -q -m gpu -p no:cacheprovider --maxfail 12 tests/gpu/test_kernels.py
step 120 test_executors "$python" -m pytest -q -m gpu -p no:cacheprovider --maxfail 12 tests/gpu/test_executors.py
step 150 measure "$python" benchmarks/gpu/device.py --json "$out/gpu-device.json"
if "$python" -c 'from kvstore_hvd import native; native.abi()' 2>/dev/null && [ -f examples/digits_cupy.py ] && has sklearn; then
  step 60 example "$python" -m kvstore_hvd.launch -np 2 "$python" examples/digits_cupy.py
fi
step 150 test_processes "$python" -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_processes.py -k "not access"
# Two ranks of NCCL on one GPU: an experiment of NCCL 2.30 and newer, which may hang.
NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=8 \
  step 45 test_nccl_shared "$python" -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_executors.py \
  -k 'TestNccl and batch'
step 160 memcheck "$python" -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_processes.py -k access

if [ ${#failed[@]} -gt 0 ]; then
  say "FAILED: ${failed[*]}"
  exit 1
fi
say "all right"
