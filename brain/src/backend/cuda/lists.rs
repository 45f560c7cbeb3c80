//! A request's sampling parameters as the card reads them: a fixed block, and lists of tokens.

use marathon_kernels::abi::SampleParams;

use crate::{
    backend::arena::Seq,
    sched::{
        mask::Mask,
        types::{SamplingParams, TokenId},
    },
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
        // A mask says everything about what is forbidden. It is the sequence's only row's: the
        // limits allow no drafts beside it.
        let (banned, stops) = match seq.masks.first() {
            Some(mask) => (forbidden(mask), &[][..]),
            None => (p.suppressed.clone(), &p.stop_tokens[..]),
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
            banned_at: self.push(banned.iter().copied())?,
            banned: banned.len() as u32,
            stops_at: self.push(stops.iter().copied())?,
            stops: stops.len() as u32,
            logprobs: p.logprobs,
        })
    }
}

/// The tokens that are not in a mask, ascending.
fn forbidden(mask: &Mask) -> Vec<TokenId> {
    let all = 0..mask.vocab() as TokenId;
    all.filter(|&id| !mask.allows(id)).collect()
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
    fn a_mask_is_a_list_of_what_it_forbids() {
        let mut mask = Mask::none(7);
        [1, 4, 5].iter().for_each(|&id| mask.insert(id));
        assert_eq!(forbidden(&mask), [0, 2, 3, 6]);
        assert!(forbidden(&Mask::all(40)).is_empty());
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
