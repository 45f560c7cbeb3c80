//! Sampling fields that several endpoints share, and fields that ask for what is not offered.

use std::collections::BTreeMap;

use marathon_proto::brain as pb;
use serde::{Deserialize, Deserializer, de::Error as _};
use serde_json::Value;

use super::{body::Body, error::ApiError};

/// One string or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "a string or a list of strings")]
pub(super) enum Texts {
    One(String),
    Several(Vec<String>),
}

impl Texts {
    pub(super) fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Several(texts) => texts,
        }
    }
}

/// How tokens are chosen, as OpenAI's and vLLM's clients write it.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct SamplingFields {
    pub(super) temperature: Option<f32>,
    pub(super) top_p: Option<f32>,
    /// -1 and 0 keep all tokens.
    pub(super) top_k: Option<i64>,
    pub(super) min_p: Option<f32>,
    pub(super) seed: Option<i64>,
    pub(super) stop: Option<Texts>,
    pub(super) stop_token_ids: Option<Vec<u32>>,
    pub(super) max_tokens: Option<u32>,
    pub(super) max_completion_tokens: Option<u32>,
    pub(super) min_tokens: Option<u32>,
    pub(super) ignore_eos: Option<bool>,
    pub(super) presence_penalty: Option<f32>,
    pub(super) frequency_penalty: Option<f32>,
    pub(super) repetition_penalty: Option<f32>,
    #[serde(default, deserialize_with = "biases")]
    pub(super) logit_bias: BTreeMap<u32, f32>,
    /// Ours: drafts per round.
    pub(super) draft_tokens: Option<u32>,
}

/// JSON has no numbers as keys: token ids are texts there.
fn biases<'de, D: Deserializer<'de>>(input: D) -> Result<BTreeMap<u32, f32>, D::Error> {
    let given = Option::<BTreeMap<String, f32>>::deserialize(input)?.unwrap_or_default();
    given
        .into_iter()
        .map(|(id, bias)| {
            let id = id
                .parse()
                .map_err(|_| D::Error::custom(format!("{id:.40?} is not a token id")))?;
            Ok((id, bias))
        })
        .collect()
}

impl SamplingFields {
    /// The contract's form.
    ///
    /// # Errors
    /// A value that the contract cannot express.
    pub(super) fn into_contract(self) -> Result<pb::Sampling, ApiError> {
        let top_k = match self.top_k {
            None => None,
            Some(-1) => Some(0),
            Some(k) => Some(u32::try_from(k).map_err(|_| {
                let message = format!("`top_k` must be -1, 0 or more, it is {k}");
                ApiError::invalid("top_k", message)
            })?),
        };
        Ok(pb::Sampling {
            temperature: self.temperature,
            top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            // Negative seeds are seeds too.
            seed: self.seed.map(|seed| seed as u64),
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.into_iter().collect(),
            stop_token_ids: self.stop_token_ids.unwrap_or_default(),
            stop: self.stop.map(Texts::into_vec).unwrap_or_default(),
            max_tokens: self.max_completion_tokens.or(self.max_tokens),
            min_tokens: self.min_tokens,
            ignore_eos: self.ignore_eos,
            draft_tokens: self.draft_tokens,
        })
    }
}

/// A field that is honoured only where it asks for nothing.
struct Refusal {
    field: &'static str,
    /// Values that ask for nothing; null always does.
    asks_nothing: fn(&Value) -> bool,
    why: &'static str,
}

const fn refuse(
    field: &'static str,
    asks_nothing: fn(&Value) -> bool,
    why: &'static str,
) -> Refusal {
    Refusal {
        field,
        asks_nothing,
        why,
    }
}

fn never(_: &Value) -> bool {
    false
}

fn is_false(value: &Value) -> bool {
    value == &Value::Bool(false)
}

fn is_true(value: &Value) -> bool {
    value == &Value::Bool(true)
}

fn is_empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(|o| o.is_empty())
}

fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

fn is_text_alone(value: &Value) -> bool {
    value
        .as_array()
        .is_some_and(|all| all.iter().all(|one| one == "text"))
}

const OTHER_GRAMMAR: &str =
    "give `response_format`, or `structured_outputs` with json, regex, choice or a Lark grammar";
const TEXT_ONLY: &str = "this model reads and writes text alone";

/// What no endpoint offers. A client that sends one would not see that its answer is without it.
const REFUSALS: &[Refusal] = &[
    refuse("guided_whitespace_pattern", never, OTHER_GRAMMAR),
    refuse("structural_tag", never, OTHER_GRAMMAR),
    refuse("ebnf", never, OTHER_GRAMMAR),
    refuse("grammar", never, OTHER_GRAMMAR),
    refuse("functions", is_empty, "give `tools` instead"),
    refuse(
        "function_call",
        never,
        "give `tools` and `tool_choice` instead",
    ),
    refuse(
        "prompt_logprobs",
        is_false,
        "log-probabilities of prompt tokens are not computed",
    ),
    refuse("use_beam_search", is_false, "tokens are sampled one by one"),
    refuse("length_penalty", is_one, "it belongs to beam search"),
    refuse("best_of", is_one, "ask for several answers with `n`"),
    refuse("allowed_token_ids", is_empty, "use `logit_bias`"),
    refuse("bad_words", is_empty, "use `logit_bias`"),
    refuse("truncate_prompt_tokens", never, "shorten the prompt"),
    refuse(
        "include_stop_str_in_output",
        is_false,
        "a stop string is no part of the text",
    ),
    refuse(
        "skip_special_tokens",
        is_true,
        "special tokens are no part of the text; `return_token_ids` shows them",
    ),
    refuse(
        "thinking_token_budget",
        never,
        "bound the answer with `max_tokens`",
    ),
    refuse("logits_processors", is_empty, "programs are not run here"),
    refuse("modalities", is_text_alone, TEXT_ONLY),
    refuse("audio", never, TEXT_ONLY),
    refuse("mm_processor_kwargs", is_empty, TEXT_ONLY),
    refuse(
        "prediction",
        never,
        "drafts come from the model's own drafter",
    ),
    refuse("web_search_options", never, "give a tool that searches"),
    refuse(
        "continue_final_message",
        is_false,
        "end with a user or tool message",
    ),
    refuse(
        "add_generation_prompt",
        is_true,
        "the model always answers with a turn of its own",
    ),
    refuse("chat_template", never, "the checkpoint's template is used"),
    refuse("documents", is_empty, "put them into a message"),
    refuse("mcp_servers", is_empty, "tools are run by the client"),
    refuse(
        "return_tokens_as_token_ids",
        is_false,
        "use `return_token_ids`",
    ),
];

/// Those fields, and what a client can do instead.
pub(super) fn refused() -> impl Iterator<Item = (&'static str, &'static str)> {
    REFUSALS.iter().map(|refusal| (refusal.field, refusal.why))
}

/// Refuses a body that asks for something that no endpoint offers, by the field's name.
pub(super) fn check_refusals(body: &Body) -> Result<(), ApiError> {
    for refusal in REFUSALS {
        if let Some(value) = body.get(refusal.field)
            && !(refusal.asks_nothing)(value)
        {
            return Err(ApiError::unsupported(refusal.field, refusal.why));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn body(value: Value) -> Body {
        let Value::Object(map) = value else {
            panic!("an object")
        };
        map.into()
    }

    #[test]
    fn names_of_every_client_become_the_contracts() {
        let body = body(json!({
            "temperature": 0.5, "top_k": -1, "seed": -3, "stop": "END", "max_tokens": 9,
            "max_completion_tokens": 7, "logit_bias": {"5": -2, "11": 1.5}, "min_p": null,
        }));
        let sampling = body
            .view::<SamplingFields>()
            .unwrap()
            .into_contract()
            .unwrap();
        assert_eq!(sampling.temperature, Some(0.5));
        assert_eq!((sampling.top_k, sampling.max_tokens), (Some(0), Some(7)));
        assert_eq!(sampling.seed, Some(-3i64 as u64));
        assert_eq!(sampling.stop, ["END"]);
        assert_eq!(sampling.logit_bias, [(5, -2.0), (11, 1.5)].into());
        assert_eq!((sampling.min_p, sampling.ignore_eos), (None, None));
    }

    #[test]
    fn a_value_of_another_type_is_named() {
        for (value, path) in [
            (json!({"temperature": "hot"}), "temperature"),
            (json!({"stop": [1]}), "stop"),
            (json!({"stop_token_ids": [1, -1]}), "stop_token_ids[1]"),
            (json!({"logit_bias": {"x": 1}}), "logit_bias"),
            (json!({"max_tokens": -1}), "max_tokens"),
            (json!({"top_k": -2}), "top_k"),
        ] {
            let error = body(value)
                .view::<SamplingFields>()
                .and_then(SamplingFields::into_contract)
                .unwrap_err();
            assert_eq!(error.param.as_deref(), Some(path));
        }
    }

    #[test]
    fn a_field_that_asks_for_what_is_not_offered_is_named() {
        for refusal in REFUSALS {
            let asking = body(json!({ refusal.field: {"asks": "much"} }));
            let error = check_refusals(&asking).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(refusal.field));
            let null = body(json!({ refusal.field: null }));
            check_refusals(&null).unwrap();
        }
        check_refusals(&body(json!({
            "response_format": {"type": "text"}, "priority": 0, "functions": [],
            "skip_special_tokens": true, "modalities": ["text"], "best_of": 1,
            "never_heard_of": {"x": 1},
        })))
        .unwrap();
    }
}
