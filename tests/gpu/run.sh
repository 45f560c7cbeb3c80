#!/usr/bin/env bash
# Runs the kernels on the card of this machine: checks, the sanitizer, timings. About four minutes.
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
part check 180 "$program" --part check --out "$out/check.json"
part time 90 "$program" --part time --out "$out/time.json"
if command -v compute-sanitizer >/dev/null; then
    part memcheck 40 compute-sanitizer --tool memcheck --error-exitcode 9 \
        "$program" --part small --out "$out/memcheck.json"
    part racecheck 60 compute-sanitizer --tool racecheck --error-exitcode 9 \
        "$program" --part small --out "$out/racecheck.json"
    # What racecheck's word is worth where barriers are in shared memory (kernels/cuda/ring.cu): it must
    # pass a right ring and find the wrong one. It also reports a ring that is right, where one lane
    # arrives for its warp; so no kernel releases a slot that way.
    for ring in every elected early; do
        timeout 40 compute-sanitizer --tool racecheck --error-exitcode 9 \
            "$program" --part ring --only "ring_$ring" --out "$out/ring_$ring.json" \
            >"$out/ring_$ring.log" 2>&1
        status=$?
        echo "== ring_$ring: status $status, $(grep -o 'RACECHECK SUMMARY.*' "$out/ring_$ring.log")"
        case $ring:$status in
            every:0 | early:9 | elected:0 | elected:9) ;;
            *) failed=1 ;;
        esac
    done
else
    echo "no compute-sanitizer on this machine: not run"
fi
exit $failed
