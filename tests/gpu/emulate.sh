#!/usr/bin/env bash
# Runs the GPU checks and small models on an emulated card: the kernels' own sources compiled as C++, behind a
# driver library of our own, driven by the same lab program as on a real card. Slow, so small
# shapes. It shows indexing, barriers, copies and order of sums; not the card's arithmetic or speed.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=${CARGO_TARGET_DIR:-target}/gpu/emulate
mkdir -p "$work"
cp kernels/cuda/include/*.cuh "$work"/
cp tests/gpu/emulate/* "$work"/
# Declarations of shared memory become pointers to the emulated block's, or plain statics where
# blocks run one after the other.
for source in kernels/cuda/*.cu; do
    sed -e 's/extern __shared__ __align__([0-9]*) uint8_t shared\[\];/uint8_t* shared = block_memory();/' \
        -e 's/__shared__ /static /' "$source" >"$work/$(basename "$source" .cu).cpp"
done
printf '#pragma once\n#include "cuda.h"\n' >"$work/cuda_bf16.h"
cd "$work"
# No contraction of a*b+c: the kernels are built without it too.
flags="-std=c++20 -O1 -fPIC -ffp-contract=off -I. -include cuda.h -Wno-unknown-pragmas"
objects=""
: >names.inc
for unit in $(cd "$OLDPWD"/kernels/cuda && ls *.cu); do
    unit=${unit%.cu}
    c++ $flags -c "$unit.cpp" -o "$unit.o"
    nm "$unit.o" | sed -n 's/^[0-9a-f]* T \([a-z][a-z0-9_]*\)$/KERNEL(\1)/p' >>names.inc
    objects="$objects $unit.o"
done
c++ $flags -c machine.cpp -o machine.o
c++ $flags -c driver.cpp -o driver.o
c++ -shared -o libcuda.so $objects machine.o driver.o
cd "$OLDPWD"
# The loader wants images; what is in them does not matter here.
stub=$PWD/$work/nvcc
printf '#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && echo emulated >"$2"; shift; done\n' >"$stub"
chmod +x "$stub"
export MARATHON_NVCC=$stub CARGO_TARGET_DIR=$work/cargo LD_LIBRARY_PATH=$PWD/$work
cargo build --quiet -p marathon-kernels --bin gpu-lab
"$work"/cargo/debug/gpu-lab --part small --out "$work"/report.json
# The whole back end: a reference model in fp32, a bf16 one beside the processor, drafts.
cargo test --quiet -p brain --test cuda -- --ignored --exact small_parts_of_everything --nocapture
