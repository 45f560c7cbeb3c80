//! The tokens that structure a Gemma turn.

use crate::sched::types::TokenId;

macro_rules! markers {
    ($($field:ident $spelling:literal $doc:literal),* $(,)?) => {
        /// Ids of the structural tokens. All of them exist in every tokenizer that loads.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Markers { $(#[doc = $doc] pub $field: TokenId),* }

        impl Markers {
            /// Their spellings.
            pub const SPELLINGS: &'static [&'static str] = &[$($spelling),*];

            /// Looks every marker up; the error is the first spelling that is missing.
            pub fn find(
                mut id_of: impl FnMut(&str) -> Option<TokenId>,
            ) -> Result<Self, &'static str> {
                Ok(Self { $($field: id_of($spelling).ok_or($spelling)?),* })
            }
        }
    };
}

markers! {
    bos "<bos>" "Begins a prompt.",
    eos "<eos>" "Ends a text.",
    tool_open "<|tool>" "Begins a tool declaration.",
    tool_close "<tool|>" "Ends a tool declaration.",
    call_open "<|tool_call>" "Begins a tool call.",
    call_close "<tool_call|>" "Ends a tool call.",
    response_open "<|tool_response>" "Begins a tool's result; the model stops with it after its calls.",
    response_close "<tool_response|>" "Ends a tool's result.",
    quote "<|\"|>" "Stands on both sides of a string.",
    think "<|think|>" "Switches thinking on.",
    channel_open "<|channel>" "Begins a thought.",
    channel_close "<channel|>" "Ends a thought.",
    turn_open "<|turn>" "Begins a turn.",
    turn_close "<turn|>" "Ends a turn.",
}

impl Markers {
    /// Whether the model ends its turn with this token.
    pub fn ends_turn(&self, id: TokenId) -> bool {
        self.ends().contains(&id)
    }

    /// The tokens that end a generation: those that a checkpoint names, and those that end a turn
    /// whether it names them or not.
    pub fn stops(&self, named: &[TokenId]) -> Vec<TokenId> {
        let mut stops = named.to_vec();
        stops.extend(self.ends().iter().filter(|id| !named.contains(id)));
        stops
    }

    fn ends(&self) -> [TokenId; 3] {
        [self.eos, self.turn_close, self.response_open]
    }
}

#[cfg(test)]
mod tests {
    use crate::text::testing::tokenizer;

    #[test]
    fn a_generation_ends_where_a_turn_does_whatever_the_checkpoint_names() {
        let tokenizer = tokenizer();
        let m = tokenizer.markers();
        let own = [m.eos, m.turn_close, m.response_open];
        assert_eq!(m.stops(&[]), own);
        assert_eq!(m.stops(&own), own);
        assert_eq!(m.stops(&[m.turn_close, 7, m.eos])[3..], own[2..]);
        assert!(own.iter().all(|id| m.ends_turn(*id)));
    }
}
