//! Grammars for a vocabulary of 50 tokens without meaning.

use brain::sched::{
    constraint::{Broken, Constraint},
    mask::Mask,
    types::{Emitted, SamplingParams, TokenId},
};

/// Which tokens may follow which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rules {
    /// Any tokens.
    None,
    /// Two of three tokens may follow any other.
    Loose,
    /// After every few tokens, one alone may come.
    Forced,
    /// Two tokens may follow any other.
    Tight,
}

impl Rules {
    /// Puts what may come behind these generated tokens into a mask. 1 and 2 are the stop tokens.
    fn allowed(self, generated: &[TokenId], mask: &mut Mask) {
        let last = generated.last().copied().unwrap_or(50);
        let may = |id: TokenId| match self {
            Self::None => true,
            Self::Loose => !(id * 7 + last).is_multiple_of(3),
            Self::Forced if last.is_multiple_of(3) => id == (last * 5 + 11) % 47 + 3,
            Self::Forced => (id + last) % 5 < 3,
            Self::Tight => id == (last * 3 + 5) % 50 || id == (last + 20) % 50,
        };
        (0..50).filter(|&id| may(id)).for_each(|id| mask.insert(id));
    }

    /// What the masks are that sampling needs, with what parameters forbid left out.
    pub fn mask(self, params: &SamplingParams, generated: &[Emitted]) -> Option<Mask> {
        let ids: Vec<TokenId> = generated.iter().map(|token| token.id).collect();
        let mut mask = Mask::none(50);
        self.allowed(&ids, &mut mask);
        let mut later = mask.clone();
        params.stop_tokens.iter().for_each(|&id| later.remove(id));
        let early = ids.len() < params.min_tokens as usize && !later.is_empty();
        (self != Self::None).then_some(if early { later } else { mask })
    }
}

/// Rules in step with an answer.
pub struct Ruled {
    pub rules: Rules,
    pub generated: Vec<TokenId>,
}

impl Constraint for Ruled {
    fn allowed(&mut self, mask: &mut Mask) -> Result<(), Broken> {
        self.rules.allowed(&self.generated, mask);
        Ok(())
    }

    fn advance(&mut self, token: TokenId) -> Result<(), Broken> {
        let mut mask = Mask::none(50);
        self.rules.allowed(&self.generated, &mut mask);
        if !mask.allows(token) {
            return Err(Broken(format!("{token} is against the rules")));
        }
        self.generated.push(token);
        Ok(())
    }

    fn rewind(&mut self, count: usize) -> Result<(), Broken> {
        let left = self.generated.len().checked_sub(count);
        self.generated.truncate(left.unwrap());
        Ok(())
    }
}

/// Half of all requests have none.
pub const RULES: [Rules; 6] = [
    Rules::None,
    Rules::None,
    Rules::None,
    Rules::Loose,
    Rules::Forced,
    Rules::Tight,
];
