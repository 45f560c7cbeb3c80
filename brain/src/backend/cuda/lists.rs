//! A request's sampling parameters as the card reads them: a fixed block, and lists of tokens.

use marathon_kernels::abi::SampleParams;

use crate::{
    backend::arena::Seq,
    sched::types::{SamplingParams, TokenId},
};

/// Writes lists one behind the other.
pub(super) struct Writer<'a> {
    words: &'a mut [u32],
    len: usize,
}

impl<'a> Writer<'a> {
    pub(super) fn new(words: &'a mut [u32]) -> Self {
        Self { words, len: 0 }
    }

    /// Words written.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    fn push(&mut self, words: impl IntoIterator<Item = u32>) -> Option<u32> {
        let start = self.len;
        for word in words {
            *self.words.get_mut(self.len)? = word;
            self.len += 1;
        }
        Some(start as u32)
    }

    /// A sequence's block; `None` if its lists do not fit.
    pub(super) fn write(&mut self, seq: &Seq, p: &SamplingParams) -> Option<SampleParams> {
        let seen = match p.reads_history() {
            true => seen(&seq.history, seq.prompt_len),
            false => Vec::new(),
        };
        Some(SampleParams {
            seed: p.seed,
            temperature: p.temperature,
            top_p: p.top_p,
            min_p: p.min_p,
            repetition: p.repetition_penalty,
            presence: p.presence_penalty,
            frequency: p.frequency_penalty,
            top_k: p.top_k,
            min_tokens: p.min_tokens,
            generated: seq.generated,
            seen_at: self.push(seen.iter().flat_map(|(id, count)| [*id, *count]))?,
            seen: seen.len() as u32,
            bias_at: self.push(p.logit_bias.iter().flat_map(|(id, b)| [*id, b.to_bits()]))?,
            biases: p.logit_bias.len() as u32,
            banned_at: self.push(p.suppressed.iter().copied())?,
            banned: p.suppressed.len() as u32,
            stops_at: self.push(p.stop_tokens.iter().copied())?,
            stops: p.stop_tokens.len() as u32,
            masks_at: self.push(seq.masks.iter().flat_map(|m| m.words().iter().copied()))?,
            masks: seq.masks.len() as u32,
            logprobs: p.logprobs,
        })
    }
}

/// Every token of a history once, ascending, and how often it was generated.
fn seen(history: &[TokenId], prompt_len: usize) -> Vec<(TokenId, u32)> {
    let prompt_len = prompt_len.min(history.len());
    let mut all: Vec<(TokenId, u32)> = history
        .iter()
        .enumerate()
        .map(|(i, id)| (*id, u32::from(i >= prompt_len)))
        .collect();
    all.sort_unstable();
    all.dedup_by(|next, kept| {
        let same = next.0 == kept.0;
        if same {
            kept.1 += next.1;
        }
        same
    });
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_is_counted_once_a_token() {
        let history = [7, 3, 7, 9, 3, 3, 1];
        assert_eq!(seen(&history, 3), [(1, 1), (3, 2), (7, 0), (9, 1)]);
        assert_eq!(seen(&history, 99), [(1, 0), (3, 0), (7, 0), (9, 0)]);
        assert_eq!(seen(&[], 0), []);
    }

    #[test]
    fn lists_that_do_not_fit_are_refused() {
        let mut room = [0; 5];
        let mut writer = Writer::new(&mut room);
        assert_eq!(writer.push([1, 2, 3]), Some(0));
        assert_eq!(writer.push([4]), Some(3));
        assert_eq!(writer.push([5, 6]), None);
    }
}
