// Parameter blocks of choosing tokens (sample.cu) and of a speculative round (round.cu).
#pragma once
#include "abi.cuh"

// How a sequence's tokens are chosen. Lists are places in SampleArgs::lists.
struct SampleParams {
    uint64_t seed;
    float temperature, top_p, min_p;
    float repetition, presence, frequency;  // penalties; 1, 0 and 0 are off
    uint32_t top_k;
    uint32_t min_tokens, generated;  // generated: before the first row of the step
    uint32_t seen_at, seen;          // (token, times generated), tokens ascending
    uint32_t bias_at, biases;        // (token, fp32 bits), tokens ascending
    uint32_t banned_at, banned;      // tokens never emitted
    uint32_t stops_at, stops;        // tokens not emitted before min_tokens
    uint32_t masks_at, masks;        // a row each: a bit for every token, 1 where it may come; such
                                     // a row knows no other bans, and drafting no masks
    uint32_t logprobs;               // the token's own and the n - 1 likeliest; 0: none
};
static_assert(sizeof(SampleParams) == 88, "mirrored in abi/sample.rs");
static_assert(offsetof(SampleParams, logprobs) == 84, "mirrored in abi/sample.rs");

// A row chooses the token at position `positions[row] + 1 + offset`.
struct SampleArgs {
    dptr logits;     // fp32 [rows][ld]
    dptr work;       // fp32 [rows][ld]: logits with penalties, biases and bans
    dptr ids;        // uint32 [rows][width]: tokens of the columns, or 0: a column is a token
    dptr params;     // SampleParams [seqs]
    dptr row_seq;    // uint32 [rows]
    dptr positions;  // uint32 [rows]
    dptr before;     // uint32 [rows]: tokens of this round before the row's own, less offset
    dptr recent;     // uint32: those tokens, from recent_at[row] on
    dptr recent_at;  // uint32 [rows]
    dptr lists;      // uint32
    dptr room;       // uint64 [rows][2 chunks + 1 + width]
    dptr token;      // uint32 [rows]
    dptr drafts;     // uint32 [rows], or 0: the token once more, and appended to recent
    dptr logprobs;   // fp32 [rows][logprob_pitch]: chosen, then (id bits, value) of the likeliest
    uint32_t width, ld;
    uint32_t offset;  // drafts made before in this round
    uint32_t chunks;  // blocks that share a row
    uint32_t logprob_pitch;
    uint32_t pad;
};
static_assert(sizeof(SampleArgs) == 136, "mirrored in abi/sample.rs");
static_assert(offsetof(SampleArgs, width) == 112, "mirrored in abi/sample.rs");

// Acceptance of drafts, and the rows that draft next.
struct VerifyArgs {
    dptr token;       // uint32 [out rows]: chosen
    dptr input;       // uint32 [rows]: the step's input tokens
    dptr out_source;  // uint32 [out rows]: which input row it is
    dptr positions;   // uint32 [out rows]
    dptr out_first;   // uint32 [seqs]: a sequence's first emitting row
    dptr out_count;   // uint32 [seqs]
    dptr recent;      // uint32 [seqs][32]: gets what each sequence emits
    dptr draft_seq;   // uint32 [draft rows]
    dptr hidden;      // uint32 [draft rows]: gets the emitting row of the last token
    dptr draft_token; // uint32 [draft rows]: gets that token
    dptr draft_position;  // uint32 [draft rows]: gets its position, which is its number of keys
    dptr before;      // uint32 [draft rows]: gets the number of tokens emitted
    uint32_t seqs, draft_rows;
};
static_assert(sizeof(VerifyArgs) == 104, "mirrored in abi/sample.rs");

constexpr uint32_t RECENT = 32;  // tokens of a round, drafts included, at most

// The drafter's head by clusters.
struct ClusterArgs {
    dptr scores;    // [rows][ld_scores]: of the clusters
    dptr h;         // [rows][ldh]
    dptr head;      // [count * size][width], cluster by cluster
    dptr ordering;  // uint32 [count * size]: their tokens
    dptr best;      // uint32 [rows][top]: clusters, likeliest first
    dptr ids;       // uint32 [rows][top * size]
    dptr logits;    // fp32 [rows][ld]
    uint32_t count, size, top, width;
    uint32_t ld_scores, ldh, ld;
    uint32_t pad;
};
static_assert(sizeof(ClusterArgs) == 88, "mirrored in abi/sample.rs");
