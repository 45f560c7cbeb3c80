// The token at a position, by the definition of brain/src/sched/sampling.rs: penalties, biases, bans,
// temperature, top-k, top-p, min-p, Gumbel noise of (seed, position, token), argmax, ties to the
// lowest id. No state, and nothing that depends on other rows.
//
// Floor: 262144 logits of 4 bytes a row, read twice: 0.5 us of bandwidth, so the launches set the
// time. Blocks share a row to find its best, then to collect what can win; one block chooses among
// those few.
//
// Order never matters to a bit: maxima, counts, and masses as whole numbers. Where the processor's
// back end adds weights in fp64 for top-p, here a weight is a whole multiple of 2^-44, and one that
// noise cannot save (27 below the best) counts nothing.
#include "math.cuh"
#include "ptx.cuh"
#include "sample.cuh"

namespace {

constexpr float MOST = 3.40282347e38f;
constexpr float NOISE_SPAN = 27.0f;      // noise lies in [-3.14, 22.88]
constexpr float GREEDY_BELOW = 1e-6f;
constexpr uint32_t PICK_THREADS = 512;

__device__ __forceinline__ uint4 philox(uint4 counter, uint32_t key0, uint32_t key1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint32_t low0 = 0xd2511f53u * counter.x, high0 = __umulhi(0xd2511f53u, counter.x);
        const uint32_t low1 = 0xcd9e8d57u * counter.z, high1 = __umulhi(0xcd9e8d57u, counter.z);
        counter = make_uint4(high1 ^ counter.y ^ key0, low1, high0 ^ counter.w ^ key1, low0);
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
    return counter;
}

__device__ __forceinline__ float noise(uint64_t seed, uint64_t position, uint32_t token) {
    const uint4 w = philox(make_uint4(token / 4, position, position >> 32, 0), seed, seed >> 32);
    const uint32_t which = token % 4;
    return gumbel(which == 0 ? w.x : which == 1 ? w.y : which == 2 ? w.z : w.w);
}

// Floats as whole numbers in the same order.
__device__ __forceinline__ uint32_t ascending(float value) {
    const uint32_t bits = __float_as_uint(value + 0.0f);  // the two zeros are one
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ascending(uint32_t word) {
    return __uint_as_float(word >> 31 ? word & 0x7fffffffu : ~word);
}

// The largest is the winner: by value, then by the lowest id.
__device__ __forceinline__ uint64_t rank(float value, uint32_t id) {
    return static_cast<uint64_t>(ascending(value)) << 32 | static_cast<uint32_t>(~id);
}

// A NaN must not win, and infinities must not breed new ones.
__device__ __forceinline__ float clean(float logit) {
    return logit != logit ? MINUS_INFINITY : fminf(logit, MOST);
}

template <class T>
__device__ __forceinline__ T* rows_of(dptr base, uint64_t row, uint64_t pitch) {
    return reinterpret_cast<T*>(base) + row * pitch;
}

__device__ __forceinline__ uint32_t word_of(dptr base, uint64_t at) {
    return reinterpret_cast<const uint32_t*>(base)[at];
}

// What a row is about.
struct Row {
    const SampleParams& p;
    uint32_t row, before;
    uint64_t position;
    bool greedy, penalised, masked, banned, early, edited, ordered;

    __device__ __forceinline__ Row(const SampleArgs& a, uint32_t row)
        : p(reinterpret_cast<const SampleParams*>(a.params)[word_of(a.row_seq, row)]),
          row(row),
          before(word_of(a.before, row) + a.offset),
          position(static_cast<uint64_t>(word_of(a.positions, row)) + 1 + a.offset) {
        greedy = !(p.temperature >= GREEDY_BELOW);
        penalised = p.repetition != 1.0f || p.presence != 0.0f || p.frequency != 0.0f;
        masked = !a.drafts && before < p.masks;
        banned = !masked && p.banned;
        early = !masked && p.stops && p.generated + before < p.min_tokens;
        edited = penalised || p.biases || masked || banned || early;
        ordered = (p.top_k && p.top_k < a.width) || p.top_p < 1.0f;
    }

    __device__ __forceinline__ const float* logits(const SampleArgs& a) const {
        return rows_of<const float>(edited ? a.work : a.logits, row, a.ld);
    }

    __device__ __forceinline__ uint32_t token(const SampleArgs& a, uint32_t column) const {
        return a.ids ? rows_of<const uint32_t>(a.ids, row, a.width)[column] : column;
    }

    __device__ __forceinline__ const uint32_t* mask(const SampleArgs& a) const {
        const uint32_t* lists = reinterpret_cast<const uint32_t*>(a.lists);
        return lists + p.masks_at + before * ((a.width + 31) / 32);
    }

    __device__ __forceinline__ float warm(float logit) const {
        return fminf(logit / p.temperature, MOST);
    }
};

__device__ __forceinline__ uint64_t* room_of(const SampleArgs& a, uint32_t row) {
    return rows_of<uint64_t>(a.room, row, 2 * a.chunks + 1 + a.width);
}

template <class Op>
__device__ __forceinline__ uint64_t across_block(uint64_t mine, uint64_t (&warps)[32], Op op) {
#pragma unroll
    for (int step = 16; step; step /= 2) mine = op(mine, __shfl_xor_sync(0xffffffffu, mine, step));
    __syncthreads();  // the array may still be read from before
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
    __syncthreads();
    mine = threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : 0;
#pragma unroll
    for (int step = 16; step; step /= 2) mine = op(mine, __shfl_xor_sync(0xffffffffu, mine, step));
    return mine;
}

__device__ __forceinline__ uint64_t largest(uint64_t mine, uint64_t (&warps)[32]) {
    return across_block(mine, warps, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
}

// Where `token` stands in a list of pairs that ascends by token, or `count`.
__device__ __forceinline__ uint32_t find(const uint32_t* pairs, uint32_t count, uint32_t token) {
    uint32_t low = 0, high = count;
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (pairs[2 * middle] < token)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && pairs[2 * low] == token ? low : count;
}

__device__ __forceinline__ uint32_t times(const uint32_t* tokens, uint32_t count, uint32_t token) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < count; i++) n += tokens[i] == token;
    return n;
}

__device__ __forceinline__ float penalty(const SampleParams& p, float logit, uint32_t generated) {
    if (p.repetition != 1.0f) logit = logit > 0.0f ? logit / p.repetition : logit * p.repetition;
    if (generated) {
        logit = logit - p.frequency * static_cast<float>(generated);
        logit = logit - p.presence;
    }
    return clean(logit);
}

// Every edit of a row that says which token each column is: a column looks its token up. Only
// drafts are chosen so, and they know no masks.
__device__ __forceinline__ float edited_column(const SampleArgs& a, const Row& r, float logit,
                                               uint32_t token, const uint32_t* recent) {
    const uint32_t* lists = reinterpret_cast<const uint32_t*>(a.lists);
    if (r.penalised) {
        const uint32_t* seen = lists + r.p.seen_at;
        const uint32_t at = find(seen, r.p.seen, token);
        const uint32_t now = times(recent, r.before, token);
        if (at < r.p.seen || now)
            logit = penalty(r.p, logit, now + (at < r.p.seen ? seen[2 * at + 1] : 0));
    }
    if (r.p.biases) {
        const uint32_t* biases = lists + r.p.bias_at;
        const uint32_t at = find(biases, r.p.biases, token);
        if (at < r.p.biases) logit = clean(logit + __uint_as_float(biases[2 * at + 1]));
    }
    if (r.banned && times(lists + r.p.banned_at, r.p.banned, token)) logit = MINUS_INFINITY;
    if (r.early && times(lists + r.p.stops_at, r.p.stops, token)) logit = MINUS_INFINITY;
    return logit;
}

// Likewise where a column is a token: only the lists are walked.
__device__ __forceinline__ void edit_by_lists(const SampleArgs& a, const Row& r, float* work,
                                              const uint32_t* recent) {
    const uint32_t* lists = reinterpret_cast<const uint32_t*>(a.lists);
    if (r.penalised) {
        const uint32_t* seen = lists + r.p.seen_at;
        for (uint32_t i = threadIdx.x; i < r.p.seen; i += blockDim.x) {
            const uint32_t token = seen[2 * i];
            if (token < a.width)
                work[token] = penalty(r.p, work[token],
                                      seen[2 * i + 1] + times(recent, r.before, token));
        }
        const uint32_t i = threadIdx.x;
        if (i < r.before && recent[i] < a.width && !times(recent, i, recent[i]) &&
            find(seen, r.p.seen, recent[i]) == r.p.seen)
            work[recent[i]] = penalty(r.p, work[recent[i]], times(recent, r.before, recent[i]));
    }
    __syncthreads();
    const uint32_t* biases = lists + r.p.bias_at;
    for (uint32_t i = threadIdx.x; i < r.p.biases; i += blockDim.x) {
        const uint32_t token = biases[2 * i];
        if (token < a.width)
            work[token] = clean(work[token] + __uint_as_float(biases[2 * i + 1]));
    }
    __syncthreads();
    if (r.masked) {
        const uint32_t* mask = r.mask(a);
        for (uint32_t i = threadIdx.x; i < a.width; i += blockDim.x)
            if (!(mask[i / 32] >> i % 32 & 1)) work[i] = MINUS_INFINITY;
    }
    for (uint32_t i = threadIdx.x; r.banned && i < r.p.banned; i += blockDim.x)
        if (lists[r.p.banned_at + i] < a.width) work[lists[r.p.banned_at + i]] = MINUS_INFINITY;
    if (!r.early) return;
    for (uint32_t i = threadIdx.x; i < r.p.stops; i += blockDim.x)
        if (lists[r.p.stops_at + i] < a.width) work[lists[r.p.stops_at + i]] = MINUS_INFINITY;
}

// Candidates in order: the smallest is the likeliest, ties to the lowest column.
__device__ __forceinline__ uint64_t candidate(float value, uint32_t column) {
    return static_cast<uint64_t>(~ascending(value)) << 32 | column;
}

__device__ __forceinline__ float value_of(uint64_t key) {
    return from_ascending(~static_cast<uint32_t>(key >> 32));
}

struct Selection {
    unsigned long long sums[256];
    uint32_t digit, whole;
    uint64_t left;
};

// The last candidate, in order, that brings the sum of weights up to `goal`; all of them if their
// sum is less.
template <class Weight>
__device__ __forceinline__ uint64_t limit_of(const uint64_t* keys, uint32_t count, uint64_t goal,
                                             Selection& s, Weight weight) {
    uint64_t prefix = 0, known = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (uint32_t i = threadIdx.x; i < 256; i += blockDim.x) s.sums[i] = 0;
        if (threadIdx.x == 0) s.digit = 256;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
            const uint64_t key = keys[i];
            if ((key & known) != prefix) continue;
            const uint64_t w = weight(key);
            if (w) atomicAdd(&s.sums[key >> shift & 255], static_cast<unsigned long long>(w));
        }
        __syncthreads();
        const uint32_t t = threadIdx.x;
        const uint64_t own = t < 256 ? s.sums[t] : 0;
        for (uint32_t step = 1; step < 256; step *= 2) {  // sums of all digits up to each
            const unsigned long long more = t < 256 && t >= step ? s.sums[t - step] : 0;
            __syncthreads();
            if (t < 256) s.sums[t] += more;
            __syncthreads();
        }
        if (t < 256 && s.sums[t] >= goal && s.sums[t] - own < goal) {
            s.digit = t;
            s.left = goal - (s.sums[t] - own);
            s.whole = s.left == own;
        }
        __syncthreads();
        if (s.digit == 256) return ~0ull;
        prefix |= static_cast<uint64_t>(s.digit) << shift;
        known |= 255ull << shift;
        goal = s.left;
        const bool whole = s.whole;
        __syncthreads();
        if (whole) return prefix | ~known;
    }
    return prefix;
}

}  // namespace

// Grid (rows): the logits with penalties, biases and bans, for the rows that have any.
extern "C" __global__ void __launch_bounds__(1024) sample_edit(const __grid_constant__ SampleArgs a) {
    let_dependents_start();
    wait_for_inputs();
    const Row r(a, blockIdx.x);
    if (!r.edited) return;
    const float* logits = rows_of<const float>(a.logits, r.row, a.ld);
    float* work = rows_of<float>(a.work, r.row, a.ld);
    const uint32_t* recent =
        reinterpret_cast<const uint32_t*>(a.recent) + word_of(a.recent_at, r.row);
    for (uint32_t i = threadIdx.x; i < a.width; i += blockDim.x) {
        const float logit = clean(logits[i]);
        work[i] = a.ids ? edited_column(a, r, logit, r.token(a, i), recent) : logit;
    }
    if (a.ids) return;
    __syncthreads();
    edit_by_lists(a, r, work, recent);
}

// Grid (chunks, rows): the best of a chunk of columns.
extern "C" __global__ void __launch_bounds__(256) sample_scan(const __grid_constant__ SampleArgs a) {
    __shared__ uint64_t warps[32];
    let_dependents_start();
    wait_for_inputs();
    const Row r(a, blockIdx.y);
    const float* logits = r.logits(a);
    uint64_t best = 0;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < a.width;
         i += gridDim.x * blockDim.x) {
        const uint64_t mine = rank(clean(logits[i]), i);
        best = mine > best ? mine : best;
    }
    best = largest(best, warps);
    uint64_t* room = room_of(a, r.row);
    if (threadIdx.x == 0) {
        room[blockIdx.x] = best;
        if (blockIdx.x == 0) room[2 * a.chunks] = 0;
    }
}

// Grid (chunks, rows): where no order is asked for, the winner of a chunk; else the candidates.
extern "C" __global__ void __launch_bounds__(256)
    sample_gather(const __grid_constant__ SampleArgs a) {
    __shared__ uint64_t warps[32];
    let_dependents_start();
    wait_for_inputs();
    const Row r(a, blockIdx.y);
    if (r.greedy) return;
    uint64_t* room = room_of(a, r.row);
    const uint64_t top = largest(threadIdx.x < a.chunks ? room[threadIdx.x] : 0, warps);
    const float best = r.warm(from_ascending(top >> 32));
    const float* logits = r.logits(a);
    uint64_t winner = 0;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < a.width;
         i += gridDim.x * blockDim.x) {
        const float value = r.warm(clean(logits[i]));
        if (!(value > best - NOISE_SPAN)) continue;
        if (r.ordered) {
            const uint64_t at =
                atomicAdd(reinterpret_cast<unsigned long long*>(room + 2 * a.chunks), 1ull);
            room[2 * a.chunks + 1 + at] = candidate(value, i);
        } else if (r.p.min_p <= 0.0f || exp_ours(value - best) >= r.p.min_p) {
            const uint32_t token = r.token(a, i);
            const uint64_t mine = rank(value + noise(r.p.seed, r.position, token), token);
            winner = mine > winner ? mine : winner;
        }
    }
    if (r.ordered) return;
    winner = largest(winner, warps);
    if (threadIdx.x == 0) room[a.chunks + blockIdx.x] = winner;
}

// Grid (rows): the token.
extern "C" __global__ void __launch_bounds__(PICK_THREADS)
    sample_pick(const __grid_constant__ SampleArgs a) {
    __shared__ uint64_t warps[32];
    __shared__ Selection selection;
    let_dependents_start();
    wait_for_inputs();
    const Row r(a, blockIdx.x);
    const uint64_t* room = room_of(a, r.row);
    const uint32_t t = threadIdx.x;
    const uint64_t top = largest(t < a.chunks ? room[t] : 0, warps);
    const uint32_t first = ~static_cast<uint32_t>(top);
    uint32_t token = r.token(a, first);
    const float best = r.warm(from_ascending(top >> 32));
    if (!r.greedy && best != MINUS_INFINITY) {
        uint64_t winner = 0;
        if (!r.ordered) {
            winner = largest(t < a.chunks ? room[a.chunks + t] : 0, warps);
        } else {
            const uint32_t count = room[2 * a.chunks];
            const uint64_t* keys = room + 2 * a.chunks + 1;
            uint64_t limit = ~0ull;
            if (r.p.top_k && r.p.top_k < count)
                limit = limit_of(keys, count, r.p.top_k, selection, [](uint64_t) { return 1ull; });
            if (r.p.top_p < 1.0f) {
                const auto mass = [&](uint64_t key) -> unsigned long long {
                    if (key > limit) return 0;
                    return static_cast<unsigned long long>(exp_ours(value_of(key) - best) *
                                                           17592186044416.0f);  // 2^44
                };
                uint64_t mine = 0;
                for (uint32_t i = t; i < count; i += blockDim.x) mine += mass(keys[i]);
                const uint64_t total =
                    across_block(mine, warps, [](uint64_t x, uint64_t y) { return x + y; });
                const double share = static_cast<double>(r.p.top_p) * static_cast<double>(total);
                uint64_t goal = static_cast<uint64_t>(share);
                goal += static_cast<double>(goal) < share;
                const uint64_t nucleus = limit_of(keys, count, goal ? goal : 1, selection, mass);
                limit = nucleus < limit ? nucleus : limit;
            }
            for (uint32_t i = t; i < count; i += blockDim.x) {
                const uint64_t key = keys[i];
                const float value = value_of(key);
                if (key > limit) continue;
                if (r.p.min_p > 0.0f && !(exp_ours(value - best) >= r.p.min_p)) continue;
                const uint32_t id = r.token(a, static_cast<uint32_t>(key));
                const uint64_t one = rank(value + noise(r.p.seed, r.position, id), id);
                winner = one > winner ? one : winner;
            }
            winner = largest(winner, warps);
        }
        if (winner) token = ~static_cast<uint32_t>(winner);
    }
    if (t) return;
    reinterpret_cast<uint32_t*>(a.token)[r.row] = token;
    if (!a.drafts) return;
    reinterpret_cast<uint32_t*>(a.drafts)[r.row] = token;
    reinterpret_cast<uint32_t*>(a.recent)[word_of(a.recent_at, r.row) + r.before] = token;
}

// Grid (rows): raw log-probabilities of the chosen token and of the likeliest, for the rows that
// want any.
extern "C" __global__ void __launch_bounds__(512)
    sample_logprobs(const __grid_constant__ SampleArgs a) {
    __shared__ uint64_t warps[32];
    __shared__ float sums[32];
    let_dependents_start();
    wait_for_inputs();
    const Row r(a, blockIdx.x);
    if (!r.p.logprobs) return;
    const float* logits = rows_of<const float>(a.logits, r.row, a.ld);
    const auto raw = [&](uint32_t i) {
        return logits[i] != logits[i] ? MINUS_INFINITY : logits[i];
    };
    uint64_t top = 0;
    for (uint32_t i = threadIdx.x; i < a.width; i += blockDim.x) {
        const uint64_t one = rank(raw(i), i);
        top = one > top ? one : top;
    }
    top = largest(top, warps);
    const float best = from_ascending(top >> 32);
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < a.width; i += blockDim.x) sum += exp_ours(raw(i) - best);
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.0f;
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    const float total = ln_ours(sum);
    float* out = rows_of<float>(a.logprobs, r.row, a.logprob_pitch);
    if (threadIdx.x == 0) out[0] = (raw(word_of(a.token, r.row)) - best) - total;
    for (uint32_t n = 0; n + 1 < r.p.logprobs && n < a.width && 2 * n + 2 < a.logprob_pitch; n++) {
        if (threadIdx.x == 0) {
            const uint32_t id = ~static_cast<uint32_t>(top);
            out[1 + 2 * n] = __uint_as_float(id);
            out[2 + 2 * n] = (from_ascending(top >> 32) - best) - total;
        }
        uint64_t next = 0;
        for (uint32_t i = threadIdx.x; i < a.width; i += blockDim.x) {
            const uint64_t one = rank(raw(i), i);
            next = one < top && one > next ? one : next;
        }
        top = largest(next, warps);
    }
}
