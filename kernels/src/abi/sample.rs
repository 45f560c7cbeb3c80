//! Choosing tokens, and the steps of a speculative round between its products.

use std::mem::{offset_of, size_of};

use super::DevicePtr;

/// Tokens of a round that [`SampleArgs::recent`] holds for a sequence, drafts included.
pub const RECENT: usize = 32;
/// Most blocks that share a row of logits.
pub const SAMPLE_CHUNKS: usize = 64;
/// Threads of a block of each kernel of the unit `sample`.
pub const SAMPLE_THREADS: SampleThreads = SampleThreads {
    edit: 1024,
    scan: 256,
    pick: 512,
};

/// Threads of a block, by kernel.
#[derive(Clone, Copy, Debug)]
pub struct SampleThreads {
    /// `sample_edit`.
    pub edit: u32,
    /// `sample_scan` and `sample_gather`.
    pub scan: u32,
    /// `sample_pick` and `sample_logprobs`.
    pub pick: u32,
}

/// How a sequence's tokens are chosen. Lists are places in [`SampleArgs::lists`].
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct SampleParams {
    /// Key of the noise.
    pub seed: u64,
    /// Below 1e-6: greedy.
    pub temperature: f32,
    /// 1: all.
    pub top_p: f32,
    /// 0: all.
    pub min_p: f32,
    /// 1: off.
    pub repetition: f32,
    /// 0: off.
    pub presence: f32,
    /// 0: off.
    pub frequency: f32,
    /// 0: all.
    pub top_k: u32,
    /// Tokens before which stop tokens are not emitted.
    pub min_tokens: u32,
    /// Tokens generated before the step's first row.
    pub generated: u32,
    /// (token, times generated), tokens ascending.
    pub seen_at: u32,
    /// Pairs of it.
    pub seen: u32,
    /// (token, fp32 bits), tokens ascending.
    pub bias_at: u32,
    /// Pairs of it.
    pub biases: u32,
    /// Tokens never emitted.
    pub banned_at: u32,
    /// How many.
    pub banned: u32,
    /// Tokens not emitted before `min_tokens`.
    pub stops_at: u32,
    /// How many.
    pub stops: u32,
    /// Bits of tokens that may come, `u32 [masks][width / 32]`: of the first rows, which know no
    /// other bans. Drafting knows no masks.
    pub masks_at: u32,
    /// Rows with a mask.
    pub masks: u32,
    /// Log-probabilities wanted: the token's own and the n - 1 likeliest; 0: none.
    pub logprobs: u32,
}

impl SampleParams {
    /// The block word by word, as it lies on the card.
    #[must_use]
    pub fn words(&self) -> [u32; 22] {
        [
            self.seed as u32,
            (self.seed >> 32) as u32,
            self.temperature.to_bits(),
            self.top_p.to_bits(),
            self.min_p.to_bits(),
            self.repetition.to_bits(),
            self.presence.to_bits(),
            self.frequency.to_bits(),
            self.top_k,
            self.min_tokens,
            self.generated,
            self.seen_at,
            self.seen,
            self.bias_at,
            self.biases,
            self.banned_at,
            self.banned,
            self.stops_at,
            self.stops,
            self.masks_at,
            self.masks,
            self.logprobs,
        ]
    }
}

const _: () = assert!(size_of::<SampleParams>() == 88 && offset_of!(SampleParams, logprobs) == 84);

/// A row chooses the token at position `positions[row] + 1 + offset`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SampleArgs {
    /// fp32 `[rows][ld]`.
    pub logits: DevicePtr,
    /// fp32 `[rows][ld]`: room for logits with penalties, biases and bans.
    pub work: DevicePtr,
    /// `u32 [rows][width]`: tokens of the columns; 0: a column is a token.
    pub ids: DevicePtr,
    /// [`SampleParams`] `[seqs]`.
    pub params: DevicePtr,
    /// `u32 [rows]`.
    pub row_seq: DevicePtr,
    /// `u32 [rows]`.
    pub positions: DevicePtr,
    /// `u32 [rows]`: tokens of this round before the row's own, less `offset`.
    pub before: DevicePtr,
    /// `u32`: those tokens, from `recent_at[row]` on.
    pub recent: DevicePtr,
    /// `u32 [rows]`.
    pub recent_at: DevicePtr,
    /// `u32`.
    pub lists: DevicePtr,
    /// `u64 [rows][sample_room(width, chunks)]`.
    pub room: DevicePtr,
    /// `u32 [rows]`: the result.
    pub token: DevicePtr,
    /// `u32 [rows]`: the result once more, and it is appended to `recent`; or 0.
    pub drafts: DevicePtr,
    /// fp32 `[rows][logprob_pitch]`: chosen, then (id bits, value) of the likeliest.
    pub logprobs: DevicePtr,
    /// Columns.
    pub width: u32,
    /// Pitch of the logits.
    pub ld: u32,
    /// Drafts made before in this round.
    pub offset: u32,
    /// Blocks that share a row, at most [`SAMPLE_CHUNKS`].
    pub chunks: u32,
    /// Pitch of the log-probabilities.
    pub logprob_pitch: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<SampleArgs>() == 136 && offset_of!(SampleArgs, width) == 112);

/// Words of 64 bits that a row needs in [`SampleArgs::room`].
pub fn sample_room(width: usize, chunks: usize) -> usize {
    2 * chunks + 1 + width
}

/// Blocks that share a row of `width` logits.
pub fn sample_chunks(width: usize) -> usize {
    width.div_ceil(4096).clamp(1, SAMPLE_CHUNKS)
}

/// Acceptance of drafts by equality, and the rows that draft next.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct VerifyArgs {
    /// `u32 [out rows]`: chosen.
    pub token: DevicePtr,
    /// `u32 [rows]`: the step's input tokens.
    pub input: DevicePtr,
    /// `u32 [out rows]`: which input row it is.
    pub out_source: DevicePtr,
    /// `u32 [out rows]`.
    pub positions: DevicePtr,
    /// `u32 [seqs]`: a sequence's first emitting row.
    pub out_first: DevicePtr,
    /// `u32 [seqs]`.
    pub out_count: DevicePtr,
    /// `u32 [seqs][RECENT]`: gets what each sequence emits.
    pub recent: DevicePtr,
    /// `u32 [draft rows]`.
    pub draft_seq: DevicePtr,
    /// `u32 [draft rows]`: gets the emitting row of the last token.
    pub hidden: DevicePtr,
    /// `u32 [draft rows]`: gets that token.
    pub draft_token: DevicePtr,
    /// `u32 [draft rows]`: gets its position, which is its number of keys.
    pub draft_position: DevicePtr,
    /// `u32 [draft rows]`: gets the number of tokens emitted.
    pub before: DevicePtr,
    /// Sequences of the step.
    pub seqs: u32,
    /// Sequences that draft.
    pub draft_rows: u32,
}

const _: () = assert!(size_of::<VerifyArgs>() == 104);

/// The drafter's head by clusters.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ClusterArgs {
    /// `[rows][ld_scores]`: of the clusters.
    pub scores: DevicePtr,
    /// `[rows][ldh]`.
    pub h: DevicePtr,
    /// `[count * size][width]`, cluster by cluster.
    pub head: DevicePtr,
    /// `u32 [count * size]`: their tokens.
    pub ordering: DevicePtr,
    /// `u32 [rows][top]`: clusters, likeliest first.
    pub best: DevicePtr,
    /// `u32 [rows][top * size]`.
    pub ids: DevicePtr,
    /// fp32 `[rows][ld]`.
    pub logits: DevicePtr,
    /// Clusters.
    pub count: u32,
    /// Tokens of a cluster.
    pub size: u32,
    /// Clusters looked at.
    pub top: u32,
    /// Width of a row of the head.
    pub width: u32,
    /// Pitch of the scores.
    pub ld_scores: u32,
    /// Pitch of h.
    pub ldh: u32,
    /// Pitch of the logits.
    pub ld: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<ClusterArgs>() == 88);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_block_is_written_in_the_order_of_its_fields() {
        let p = SampleParams {
            seed: 0x0102_0304_0506_0708,
            temperature: 0.5,
            frequency: 2.0,
            top_k: 9,
            stops_at: 17,
            logprobs: 4,
            ..SampleParams::default()
        };
        let w = p.words();
        assert_eq!(w.len() * 4, size_of::<SampleParams>());
        assert_eq!((w[0], w[1]), (0x0506_0708, 0x0102_0304));
        assert_eq!((w[2], w[7]), (0.5f32.to_bits(), 2.0f32.to_bits()));
        assert_eq!((w[8], w[17], w[21]), (9, 17, 4));
    }
}
