#!/usr/bin/env bash
# Prove and measure the GPU path on this machine's first GPU: every kernel, captured steps, costs. Needs cuda-python,
# Triton, NumPy and pytest; torch with CUDA and TensorRT where they are. Nothing need be installed of ostinato itself.
#   scripts/gpu_tests.sh                 writes gpu-NAME-DATE.json and .md to $OUT (else build/gpu), prints a table
#   scripts/gpu_tests.sh --compile 9.0   only compiles the kernels, on any machine, for that compute capability
# LIMIT: seconds for all (280). PYTHON: else .venv's, else python3. Fewer tests: name files or -k after the options.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD links=$PWD/build/gpu/import
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi

# The rooms under the names that they are installed by, and `tests` as a package that no other can hide.
mkdir -p "$links/ostinato" "$links/tests"
for room in engines plugins builder runtime; do
    ln -sfn "$root/$room" "$links/ostinato/$room"
done
printf '__path__ = [%s]\n' "\"$root/tests\"" > "$links/tests/__init__.py"
export PYTHONPATH=$links${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

if [ "${1:-}" = --compile ]; then
    shift
    exec "$PYTHON" -m tests.gpu.compile_ahead "$@"
fi
export OUT=${OUT:-$root/build/gpu}
mkdir -p "$OUT"
files=("$@")
[ $# -gt 0 ] || files=(tests/gpu/test_{kernels,replay,measures,bundle}.py)
# INT, so that what was measured until then is written.
timeout --signal=INT --kill-after=15 "${LIMIT:-280}" \
    "$PYTHON" -m pytest -p no:cacheprovider -W default -q -rs --durations=12 --timeout=120 "${files[@]}" |
    tee "$OUT/gpu.log" || {
    code=$?
    [ $code -ne 5 ] || echo "gpu_tests: nothing ran: run it on a machine with an NVIDIA GPU and driver, or --compile 9.0" >&2
    exit $code
}
