//! Counters of the scheduler, for metrics. They only grow, except where they say "now".

/// A copy of the scheduler's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Sequences being computed, now.
    pub running: usize,
    /// Sequences waiting, now.
    pub waiting: usize,
    /// Anchors of the prefix cache, now.
    pub anchors: usize,
    /// Blocks of the full group that sequences hold, now.
    pub full_blocks_used: usize,
    /// Blocks of the full group that the prefix cache alone holds, now. Free on demand.
    pub full_blocks_kept: usize,
    /// Blocks of the full group.
    pub full_blocks: usize,
    /// Blocks of the sliding group that sequences hold, now.
    pub sliding_blocks_used: usize,
    /// Blocks of the sliding group that the prefix cache alone holds, now. Free on demand.
    pub sliding_blocks_kept: usize,
    /// Blocks of the sliding group.
    pub sliding_blocks: usize,
    /// Prompt tokens of the sequences submitted.
    pub prompt_tokens: u64,
    /// Of those, taken from the prefix cache.
    pub cached_tokens: u64,
    /// Times that a sequence went on from an anchor.
    pub prefix_hits: u64,
    /// Of those, where others can go on at the same time.
    pub prefix_shared: u64,
    /// Times that a sequence went on from an anchor that came from below.
    pub lifted: u64,
    /// Times that a sequence went on from an anchor while more of its prompt was known, but no
    /// anchor lay there.
    pub anchor_misses: u64,
    /// Times that a sequence began with a part of its prompt, not all but the newest token, taken
    /// from the cache.
    pub partial_hits: u64,
    /// Rounds that asked for another number of drafts than the one before.
    pub depth_changes: u64,
    /// Tokens emitted.
    pub generated_tokens: u64,
    /// Drafts checked.
    pub drafted_tokens: u64,
    /// Drafts emitted.
    pub accepted_tokens: u64,
    /// Drafts checked that were looked up in the sequence itself.
    pub looked_up_tokens: u64,
    /// Of these, emitted.
    pub looked_up_accepted: u64,
    /// Drafts checked because a grammar allowed no other token.
    pub forced_tokens: u64,
    /// Drafts that were cut, with those behind them, for breaking a grammar.
    pub cut_drafts: u64,
    /// Tokens emitted under a grammar.
    pub constrained_tokens: u64,
    /// Rounds: times that a sequence emitted.
    pub rounds: u64,
    /// Steps committed.
    pub steps: u64,
    /// Rows computed.
    pub rows: u64,
    /// Times that a sequence lost its blocks to an older one.
    pub preemptions: u64,
    /// Sequences that ended, however.
    pub finished: u64,
}
