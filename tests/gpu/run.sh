#!/usr/bin/env bash
# Runs the kernels on the card of this machine: checks, the sanitizer, timings. About two minutes.
#   tests/gpu/run.sh [FOLDER [PROGRAM]]
# FOLDER gets the reports (default: target/gpu/report). PROGRAM is a gpu-lab built elsewhere;
# without it, it is built here, with the compiler that tests/gpu/compile.sh installs.
set -uo pipefail
cd "$(dirname "$0")/../.."

out=${1:-target/gpu/report}
program=${2:-}
mkdir -p "$out"
if [ -z "$program" ]; then
    tests/gpu/compile.sh || exit 1
    tools=$(echo "$PWD"/.cuda/lib/python3*/site-packages/nvidia/cu13/bin)
    MARATHON_NVCC=${MARATHON_NVCC:-$tools/nvcc} CARGO_TARGET_DIR=target/gpu \
        cargo build --quiet --release -p marathon-kernels --bin gpu-lab || exit 1
    program=target/gpu/release/gpu-lab
fi

failed=0
part() {
    local name=$1 limit=$2
    shift 2
    echo "== $name"
    local begin=$SECONDS
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    local status=$?
    [ $status = 0 ] || failed=1
    grep -v '^ok ' "$out/$name.log" | tail -140
    echo "== $name: status $status, $((SECONDS - begin)) s"
}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,memory.used --format=csv,noheader
part check 60 "$program" --part check --out "$out/check.json"
part time 90 "$program" --part time --out "$out/time.json"
if command -v compute-sanitizer >/dev/null; then
    part memcheck 40 compute-sanitizer --tool memcheck --error-exitcode 9 \
        "$program" --part small --out "$out/memcheck.json"
    part racecheck 40 compute-sanitizer --tool racecheck --error-exitcode 9 \
        "$program" --part small --out "$out/racecheck.json"
else
    echo "no compute-sanitizer on this machine: not run"
fi
exit $failed
