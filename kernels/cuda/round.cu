// Between the rows that emit and the rows that draft: acceptance by equality, all on the card, so
// that a round needs no word from the host.
//
// Floor: a launch; the bytes are a few hundred.
#include "ptx.cuh"
#include "sample.cuh"

// One block: how much each sequence emits, then the rows that draft: last emitted token, its
// position, the emitting row whose hidden state they start from.
extern "C" __global__ void __launch_bounds__(256) verify(const __grid_constant__ VerifyArgs a) {
    let_dependents_start();
    wait_for_inputs();
    const uint32_t* token = reinterpret_cast<const uint32_t*>(a.token);
    const uint32_t* input = reinterpret_cast<const uint32_t*>(a.input);
    const uint32_t* source = reinterpret_cast<const uint32_t*>(a.out_source);
    const uint32_t* first = reinterpret_cast<const uint32_t*>(a.out_first);
    const uint32_t* count = reinterpret_cast<const uint32_t*>(a.out_count);
    const auto emitted = [&](uint32_t seq) {
        uint32_t n = 0;
        // Row j is followed by the draft that it should have chosen.
        while (n < count[seq]) {
            const uint32_t row = first[seq] + n++;
            if (n == count[seq] || input[source[row] + 1] != token[row]) break;
        }
        return n;
    };
    for (uint32_t seq = threadIdx.x; seq < a.seqs; seq += blockDim.x) {
        uint32_t* recent = reinterpret_cast<uint32_t*>(a.recent) + seq * RECENT;
        const uint32_t n = emitted(seq);
        for (uint32_t i = 0; i < n; i++) recent[i] = token[first[seq] + i];
    }
    for (uint32_t row = threadIdx.x; row < a.draft_rows; row += blockDim.x) {
        const uint32_t seq = reinterpret_cast<const uint32_t*>(a.draft_seq)[row];
        const uint32_t n = emitted(seq), last = first[seq] + n - 1;
        reinterpret_cast<uint32_t*>(a.hidden)[row] = last;
        reinterpret_cast<uint32_t*>(a.draft_token)[row] = token[last];
        reinterpret_cast<uint32_t*>(a.draft_position)[row] =
            reinterpret_cast<const uint32_t*>(a.positions)[last] + 1;
        reinterpret_cast<uint32_t*>(a.before)[row] = n;
    }
}
