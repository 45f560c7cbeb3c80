//! What an answer must keep to, while it is being computed.
//!
//! A constraint says which tokens may come next, given those before. It is a function of the
//! request and of the generated tokens, and so is every mask made of it: drafts only say ahead of
//! time which masks the next rows of a round will need. A draft that the constraint forbids is cut
//! before any row is spent on it; where one token alone may come, that token is the draft.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use super::{
    mask::Mask,
    types::{SamplingParams, TokenId},
};

/// Says which tokens may come next.
///
/// Pure: what it answers depends on the tokens it was given, nothing else. It may end the answer
/// by allowing a stop token, and allows none elsewhere unless it wants the end there.
pub trait Constraint: Send {
    /// Puts the tokens that may come next into an empty mask.
    ///
    /// # Errors
    /// It cannot say, and why: too complex a state, or nothing can follow.
    fn allowed(&mut self, mask: &mut Mask) -> Result<(), Broken>;

    /// Takes the next generated token.
    ///
    /// # Errors
    /// The token is not allowed here. It is not taken then.
    fn advance(&mut self, token: TokenId) -> Result<(), Broken>;

    /// Takes the last `count` tokens back.
    ///
    /// # Errors
    /// It cannot go back.
    fn rewind(&mut self, count: usize) -> Result<(), Broken>;
}

/// Why a constraint cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Broken(pub String);

/// A constraint in step with its sequence, and the masks of the rows that come next.
pub(super) struct Constrained {
    constraint: Box<dyn Constraint>,
    vocab: usize,
    /// Of the row that emits the next token, and of those behind the drafts that were checked.
    masks: Vec<Arc<Mask>>,
    lost: Option<Broken>,
}

/// What became of a round's drafts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Checked {
    /// The drafts that may come, and behind them those that must.
    pub(super) drafts: Vec<TokenId>,
    /// How many of these are the only tokens that may come.
    pub(super) forced: usize,
    /// A draft was cut for breaking the constraint: whoever made it was wrong there.
    pub(super) cut: bool,
}

impl Constrained {
    /// In step with a sequence that has `received` as its first tokens.
    pub(super) fn new(
        mut constraint: Box<dyn Constraint>,
        params: &SamplingParams,
        vocab: usize,
        received: &[TokenId],
    ) -> Result<Self, Misfit> {
        for (index, &token) in received.iter().enumerate() {
            guarded(|| constraint.advance(token)).map_err(|_| Misfit::Received(index))?;
        }
        let mut constrained = Self {
            constraint,
            vocab,
            masks: Vec::new(),
            lost: None,
        };
        let first = constrained.mask(params, received.len());
        constrained.masks.push(first.map_err(Misfit::Start)?);
        Ok(constrained)
    }

    /// Takes in tokens that were emitted; `generated` counts them.
    pub(super) fn advance(
        &mut self,
        params: &SamplingParams,
        tokens: impl IntoIterator<Item = TokenId>,
        generated: usize,
    ) -> Result<(), Broken> {
        self.lost.take().map_or(Ok(()), Err)?;
        for token in tokens {
            guarded(|| self.constraint.advance(token))?;
        }
        self.masks = vec![self.mask(params, generated)?];
        Ok(())
    }

    /// Checks drafts for the next round, and adds the tokens that must come behind them while there
    /// are fewer than `forced_to`. Makes the masks of every row.
    pub(super) fn check(
        &mut self,
        params: &SamplingParams,
        drafts: &[TokenId],
        forced_to: usize,
        generated: usize,
    ) -> Checked {
        self.masks.truncate(1);
        let mut checked = Checked::default();
        while let Some(mask) = self.masks.last() {
            let at = checked.drafts.len();
            let made = drafts.get(at).filter(|_| checked.forced == 0).copied();
            let fits = made.filter(|&token| mask.allows(token));
            checked.cut |= made.is_some() && fits.is_none();
            let forced = || mask.only().filter(|_| at < forced_to);
            let Some(token) = fits.or_else(forced) else {
                break;
            };
            // The row before a stop emits it as well: nothing is computed behind an end.
            if params.stop_tokens.contains(&token) {
                break;
            }
            // Where the constraint cannot go on, the rows before decide.
            let Some(next) = self.mask_behind(token, params, generated + at + 1) else {
                break;
            };
            checked.forced += usize::from(fits.is_none());
            checked.drafts.push(token);
            self.masks.push(next);
        }
        self.rewind(checked.drafts.len());
        checked
    }

    /// The mask behind one token more.
    fn mask_behind(
        &mut self,
        token: TokenId,
        params: &SamplingParams,
        generated: usize,
    ) -> Option<Arc<Mask>> {
        guarded(|| self.constraint.advance(token)).ok()?;
        let mask = self.mask(params, generated).ok();
        if mask.is_none() {
            self.rewind(1);
        }
        mask
    }

    /// A constraint that does not find its way back ends its sequence with the next token: the mask
    /// of that one was made before.
    fn rewind(&mut self, count: usize) {
        if let Err(broken) = guarded(|| self.constraint.rewind(count)) {
            self.lost.get_or_insert(broken);
        }
    }

    /// The masks of the next row and of those behind `drafts` drafts.
    pub(super) fn masks(&self, drafts: usize) -> Vec<Arc<Mask>> {
        self.masks.iter().take(drafts + 1).cloned().collect()
    }

    /// What may come as token number `generated`: what the constraint allows, less what the request
    /// forbids. Stop tokens that come too early are forbidden only while something else is left.
    fn mask(&mut self, params: &SamplingParams, generated: usize) -> Result<Arc<Mask>, Broken> {
        let mut mask = Mask::none(self.vocab);
        guarded(|| self.constraint.allowed(&mut mask))?;
        params.suppressed.iter().for_each(|&id| mask.remove(id));
        if generated < params.min_tokens as usize {
            let mut later = mask.clone();
            params.stop_tokens.iter().for_each(|&id| later.remove(id));
            if !later.is_empty() {
                mask = later;
            }
        }
        match mask.is_empty() {
            true => Err(Broken(
                "no token of the vocabulary continues the answer as its grammar demands".into(),
            )),
            false => Ok(Arc::new(mask)),
        }
    }
}

impl std::fmt::Debug for Constrained {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Constrained({:?})", self.masks)
    }
}

/// Why a constraint does not fit a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Misfit {
    /// This received token breaks it.
    Received(usize),
    /// It cannot say what may come.
    Start(Broken),
}

/// Runs a front end's code, which its client feeds: should it panic, that is this request's end
/// alone.
fn guarded<T>(work: impl FnOnce() -> Result<T, Broken>) -> Result<T, Broken> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(Broken("the check of its grammar panicked".into())))
}

#[cfg(test)]
#[path = "constraint_tests.rs"]
mod tests;
