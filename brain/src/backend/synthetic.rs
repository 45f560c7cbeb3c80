//! Drafts that are right as often as is asked: for measuring what drafting costs and brings at an
//! acceptance that the weights at hand do not have, random ones for example.
//!
//! The device works as it always does: it drafts, and it verifies. Only the drafts that it proposes
//! are replaced, by tokens that are known to be right or wrong, because the same generation was
//! computed before without drafts. No token that is emitted can change.

use std::collections::HashMap;

use super::{ExecError, Executor, Limits};
use crate::sched::types::{BlockId, Group, SeqId, SeqOutput, SeqStep, Step, StepOutput, TokenId};

/// Steps of the golden ratio fill 0 to 1 evenly: shares are met after few rounds.
const GOLDEN: f64 = 0.618_033_988_749_894_9;

/// A device whose drafts are right in set shares of the rounds.
pub struct Synthetic {
    inner: Box<dyn Executor>,
    /// Share of rounds whose draft at each position is right, with all before it.
    acceptance: Vec<f64>,
    /// What followed on the tokens of a generation so far.
    followed: HashMap<u64, TokenId>,
    /// The tokens of each generation so far.
    so_far: HashMap<SeqId, u64>,
    luck: f64,
}

impl Synthetic {
    /// `acceptance`: from 0 to 1 each, and never more than the one before.
    pub fn new(inner: Box<dyn Executor>, acceptance: Vec<f64>) -> Self {
        Self {
            inner,
            acceptance,
            followed: HashMap::new(),
            so_far: HashMap::new(),
            luck: 0.5,
        }
    }

    fn replace(&mut self, rows: &SeqStep, output: &mut SeqOutput) {
        let Some(sample) = &rows.sample else { return };
        let Some(input) = rows.tokens.len().checked_sub(sample.drafts + 1) else {
            return;
        };
        let mut so_far = match (sample.generated, self.so_far.get(&rows.seq)) {
            (0, _) => mix(
                mix(0, (rows.start + input) as u64),
                u64::from(rows.tokens[input]),
            ),
            (_, Some(known)) => *known,
            // Its beginning was not seen: nothing is known of it.
            (_, None) => return,
        };
        for token in &output.tokens {
            self.followed.insert(so_far, token.id);
            so_far = mix(so_far, u64::from(token.id));
        }
        self.so_far.insert(rows.seq, so_far);
        self.luck = (self.luck + GOLDEN).fract();
        let vocabulary = self.inner.limits().vocab_size as TokenId;
        for (position, draft) in output.drafts.iter_mut().enumerate() {
            let Some(&right) = self.followed.get(&so_far) else {
                return;
            };
            let share = self.acceptance.get(position).copied().unwrap_or(0.0);
            if self.luck >= share {
                *draft = (right + 1) % vocabulary;
                return;
            }
            *draft = right;
            so_far = mix(so_far, u64::from(right));
        }
    }
}

impl Executor for Synthetic {
    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn run(&mut self, step: &Step) -> Result<StepOutput, ExecError> {
        let mut output = self.inner.run(step)?;
        for (rows, output) in step.seqs.iter().zip(&mut output.seqs) {
            self.replace(rows, output);
        }
        Ok(output)
    }

    fn save_blocks(
        &mut self,
        group: Group,
        blocks: &[BlockId],
        into: &mut Vec<u8>,
    ) -> Result<(), ExecError> {
        self.inner.save_blocks(group, blocks, into)
    }

    fn load_blocks(
        &mut self,
        group: Group,
        blocks: &[BlockId],
        bytes: &[u8],
    ) -> Result<(), ExecError> {
        self.inner.load_blocks(group, blocks, bytes)
    }
}

/// SplitMix64 over what was there and what comes.
fn mix(state: u64, value: u64) -> u64 {
    let mut z = state.rotate_left(5) ^ value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        backend::fake::{FakeExecutor, FakeOptions},
        engine::{Engine, EngineConfig, LogEvent, clock::SystemClock},
        sched::{
            request::Request,
            scheduler::SchedConfig,
            types::{DraftDepth, SamplingParams},
        },
    };

    /// Tokens, rounds and accepted drafts of one generation.
    async fn ask(engine: &Engine, id: &str, draft: DraftDepth) -> (Vec<TokenId>, usize, usize) {
        let request = Request {
            draft,
            ..Request::new(vec![5, 6, 7], SamplingParams::greedy(400))
        };
        let mut cursor = engine.generate(id, Some(request), 0).unwrap().cursor;
        let mut tokens = Vec::new();
        loop {
            match cursor.next().await.unwrap() {
                LogEvent::Tokens { tokens: more, .. } => {
                    tokens.extend(more.iter().map(|token| token.id));
                }
                LogEvent::Finished(outcome) => {
                    let usage = outcome.usage;
                    return (tokens, usage.rounds, usage.accepted);
                }
            }
        }
    }

    #[tokio::test]
    async fn drafts_are_right_in_the_shares_asked_for_and_change_nothing() {
        let fake = FakeExecutor::new(FakeOptions {
            right: 0.0,
            ..FakeOptions::default()
        });
        let executor = Synthetic::new(Box::new(fake), vec![0.8, 0.5, 0.25]);
        let config = EngineConfig {
            sched: SchedConfig {
                lookups: false,
                ..SchedConfig::default()
            },
            ..EngineConfig::default()
        };
        let clock = std::sync::Arc::new(SystemClock::start());
        let engine = Engine::start_with(Box::new(executor), config, clock, None).unwrap();
        let (plain, _, none) = ask(&engine, "a", DraftDepth::Fixed(0)).await;
        let (drafted, rounds, accepted) = ask(&engine, "b", DraftDepth::Fixed(3)).await;
        assert_eq!((plain.len(), none), (400, 0));
        assert_eq!(drafted, plain);
        let per_round = accepted as f64 / rounds as f64;
        assert!((per_round - 1.55).abs() < 0.05, "{per_round}");
    }
}
