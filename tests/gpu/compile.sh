#!/usr/bin/env bash
# Compiles the GPU kernels for every target without a GPU and checks the machine code:
# all images present, no stack, no spills, tensor-core instructions where they belong.
# Uses MARATHON_NVCC if set, else installs the compiler from PyPI into .cuda/ (271 MB).
set -euo pipefail
cd "$(dirname "$0")/../.."

targets="90a 100a 103a 120a 121a"
tensor_units="linear linear_large attention"

venv=.cuda
if [ ! -x $venv/bin/python ]; then
    python3 -m venv $venv
fi
# All pinned: naming nvcc alone brings newer parts of another release along.
packages="nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85"
if [ ! -e $venv/ready ]; then
    $venv/bin/python -m pip install --quiet $packages
    $venv/bin/python -m pip install --quiet --no-deps nvidia-cuda-cuobjdump==13.2.86 \
        nvidia-cuda-nvdisasm==13.2.86
    touch $venv/ready
fi
tools=$(echo "$PWD"/$venv/lib/python3*/site-packages/nvidia/cu13/bin)
export MARATHON_NVCC=${MARATHON_NVCC:-$tools/nvcc}

# A folder of its own: the variable's value is part of what cargo compares.
target=${CARGO_TARGET_DIR:-target}/gpu
CARGO_TARGET_DIR=$target nice cargo build --quiet -p marathon-kernels

out=$(ls -td "$target"/debug/build/marathon-kernels-*/out | head -1)
failed=0
fail() {
    echo "FAILED $1" >&2
    failed=1
}
for image in "$out"/*.fatbin; do
    unit=$(basename "$image" .fatbin)
    listing=$("$tools"/cuobjdump -lelf "$image")
    for arch in $targets; do
        case $listing in
            *".sm_$arch.cubin"*) ;;
            *) fail "$unit has no image for sm_$arch" ;;
        esac
        case " $tensor_units " in
            *" $unit "*)
                count=$("$tools"/cuobjdump -sass -arch "sm_$arch" "$image" |
                    grep -c 'HMMA.16816.F32.BF16' || true)
                [ "$count" -gt 0 ] || fail "$unit sm_$arch has no bf16 tensor-core instruction"
                ;;
        esac
    done
    case $unit in
        linear_large | attention_tiles)
            "$tools"/cuobjdump -sass -arch sm_90a "$image" | grep -q HGMMA ||
                fail "$unit sm_90a has no instruction of a group of warps"
            ;;
    esac
    usage=$("$tools"/cuobjdump -res-usage "$image" | grep -A1 'Function' || true)
    spilled=$(printf '%s\n' "$usage" | grep -E 'STACK:[1-9]|LOCAL:[1-9]' || true)
    [ -z "$spilled" ] || fail "$unit uses local memory: $spilled"
    most=$(printf '%s\n' "$usage" | grep -o 'REG:[0-9]*' | cut -d: -f2 | sort -n | tail -1)
    kernels=$(printf '%s\n' "$usage" | grep -c 'REG:' || true)
    echo "$unit: $(stat -c %s "$image") bytes, $kernels kernels over all targets, at most $most registers"
done
[ $failed = 0 ] || exit 1
echo "all images present, no spills"
