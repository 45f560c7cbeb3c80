#!/usr/bin/env bash
# Runs brain's CUDA back end on the card of this machine: the reference's logits, the processor's
# tokens, every invariance, the demo marathon. About four minutes.
#   tests/gpu/brain.sh [FOLDER [PROGRAMS]]
# FOLDER gets the reports (default: target/gpu/report). PROGRAMS is a folder with `cuda` (the test
# program brain/tests/cuda.rs), `deps/brain_killed` (tests/tests/brain_killed.rs), `brain` and `pilot`
# built elsewhere with kernels; without it they are built here, with the compiler that
# tests/gpu/compile.sh installs.
set -uo pipefail
cd "$(dirname "$0")/../.."

out=${1:-target/gpu/report}
programs=${2:-}
mkdir -p "$out"
if [ -z "$programs" ]; then
    tests/gpu/compile.sh || exit 1
    tools=$(echo "$PWD"/.cuda/lib/python3*/site-packages/nvidia/cu13/bin)
    export MARATHON_NVCC=${MARATHON_NVCC:-$tools/nvcc} CARGO_TARGET_DIR=target/gpu
    cargo build --quiet --release --bin brain --bin pilot || exit 1
    programs=target/gpu/release
    built() {
        cargo test --release -p "$1" --test "$2" --no-run 2>&1 |
            sed -n 's/.*Executable.*(\(.*\))/\1/p'
    }
    cp "$(built brain cuda)" $programs/cuda
    cp "$(built marathon-tests brain_killed)" $programs/deps/brain_killed
fi

table=$out/brain.txt
json=$out/brain.json
: >"$table"
printf '{\n' >"$json"
failed=0
part() {
    local name=$1 limit=$2
    shift 2
    local begin=$SECONDS
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    local status=$?
    # A name that no test has runs none, and ends well.
    [[ " $* " != *' --exact '* ]] || grep -q '1 passed' "$out/$name.log" || status=99
    [ $status = 0 ] || failed=1
    local seconds=$((SECONDS - begin))
    printf '%-52s status %3d  %4d s\n' "$name" $status $seconds | tee -a "$table"
    grep -E 'within|compared|panicked|assert|tokens the same|left:|right:|error' "$out/$name.log" |
        cut -c1-240 | head -24 | sed 's/^/    /' | tee -a "$table"
    printf '  "%s": {"status": %d, "seconds": %d},\n' "$name" $status $seconds >>"$json"
}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,memory.used --format=csv,noheader | tee -a "$table"
for test in goldens_agree_with_the_reference \
    fp32_models_choose_the_tokens_that_the_processor_chooses \
    bf16_models_are_near_the_processor \
    fewer_bits_are_near_the_processor \
    masks_confine_the_card_as_they_confine_the_processor \
    drafts_pieces_and_company_change_no_bit \
    recorded_rounds_draft_what_single_launches_draft \
    restarts_and_sizes_change_no_bit \
    long_prompts_in_any_pieces_have_the_same_bits \
    runs::runs_of_many_rows_have_the_bits_of_few \
    saved_blocks_go_on_in_another_executor \
    fp8::a_cache_in_fp8_keeps_every_promise \
    a_card_that_traps_is_given_up \
    a_card_that_hangs_is_given_up; do
    part $test 150 "$programs/cuda" --ignored --exact $test --nocapture
done
test=a_card_that_traps_ends_its_brain_and_the_next_one_goes_on
part $test 60 "$programs/deps/brain_killed" --ignored --exact $test --nocapture
export BRAIN_DEVICE=cuda
for seed in 1 2; do
    part demo_$seed 60 "$programs/pilot" demo --seed $seed --brain-program "$programs/brain"
    tail -12 "$out/demo_$seed.log" | tee -a "$table"
done
printf '  "failed": %d\n}\n' $failed >>"$json"
exit $failed
