//! Sampling parameters: ranges, defaults, and the resolved values that go back to the client.

use std::collections::HashMap;

use marathon_proto::{brain as pb, status::Problem};

use super::ModelFacts;
use crate::sched::types::{DraftDepth, SamplingParams, TokenId};

/// Sampling of requests that leave fields unset: the checkpoint's `generation_config.json`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Defaults {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 keeps all tokens.
    pub top_k: u32,
    /// 1 keeps all tokens.
    pub top_p: f32,
}

impl Default for Defaults {
    /// What Gemma 4 was published with.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 64,
            top_p: 0.95,
        }
    }
}

/// Most log-probabilities per token: its own and twenty besides.
const MAX_LOGPROBS: u32 = 21;
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 256;
const MAX_BIASES: usize = 4096;
const MAX_STOP_TOKENS: usize = 256;

/// A request's parameters with every field decided.
#[derive(Clone, Debug)]
pub(super) struct Resolved {
    pub(super) params: SamplingParams,
    pub(super) draft: DraftDepth,
    pub(super) stops: Vec<String>,
}

/// What resolving depends on besides the request.
pub(super) struct Scope<'a> {
    pub(super) facts: &'a ModelFacts,
    /// Makes the seed when none is given.
    pub(super) generation_id: &'a str,
    /// Tokens that fit behind the prompt.
    pub(super) room: usize,
    pub(super) logprobs: u32,
}

/// Fills in defaults and checks ranges.
pub(super) fn resolve(asked: pb::Sampling, scope: &Scope<'_>) -> Result<Resolved, Problem> {
    let numbers = Numbers::resolve(&asked, scope.facts.defaults)?;
    check_biases(&asked.logit_bias)?;
    check_stops(&asked.stop)?;
    if asked.stop_token_ids.len() > MAX_STOP_TOKENS {
        return Err(invalid(
            "stop_token_ids",
            format!("has more than {MAX_STOP_TOKENS} entries"),
        ));
    }
    if scope.logprobs > MAX_LOGPROBS {
        let message = format!(
            "logprobs must be at most {MAX_LOGPROBS}, it is {}",
            scope.logprobs
        );
        return Err(Problem::invalid("spec.logprobs", message));
    }
    let (min_tokens, max_tokens) = lengths(&asked, scope.room)?;
    Ok(Resolved {
        params: SamplingParams {
            temperature: numbers.temperature,
            top_k: asked.top_k.unwrap_or(scope.facts.defaults.top_k),
            top_p: numbers.top_p,
            min_p: numbers.min_p,
            seed: asked.seed.unwrap_or_else(|| seed_of(scope.generation_id)),
            repetition_penalty: numbers.repetition_penalty,
            presence_penalty: numbers.presence_penalty,
            frequency_penalty: numbers.frequency_penalty,
            logit_bias: asked.logit_bias.into_iter().collect(),
            suppressed: scope.facts.suppressed.clone(),
            stop_tokens: stop_tokens(
                &asked.stop_token_ids,
                asked.ignore_eos.unwrap_or(false),
                &scope.facts.stop_tokens,
            ),
            min_tokens,
            max_tokens,
            logprobs: scope.logprobs,
        },
        draft: match asked.draft_tokens {
            None => scope.facts.draft,
            Some(drafts) => DraftDepth::Fixed(drafts),
        },
        stops: asked.stop,
    })
}

/// The parameters that are numbers in a range.
struct Numbers {
    temperature: f32,
    top_p: f32,
    min_p: f32,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
}

impl Numbers {
    fn resolve(asked: &pb::Sampling, defaults: Defaults) -> Result<Self, Problem> {
        let penalty = |field, value: Option<f32>| {
            float(
                field,
                value.unwrap_or(0.0),
                |p| (-2.0..=2.0).contains(&p),
                "from -2 to 2",
            )
        };
        Ok(Self {
            temperature: float(
                "temperature",
                asked.temperature.unwrap_or(defaults.temperature),
                |t| (0.0..=2.0).contains(&t),
                "from 0 to 2",
            )?,
            top_p: float(
                "top_p",
                asked.top_p.unwrap_or(defaults.top_p),
                |p| p > 0.0 && p <= 1.0,
                "above 0 and at most 1",
            )?,
            min_p: float(
                "min_p",
                asked.min_p.unwrap_or(0.0),
                |p| (0.0..1.0).contains(&p),
                "from 0 to below 1",
            )?,
            repetition_penalty: float(
                "repetition_penalty",
                asked.repetition_penalty.unwrap_or(1.0),
                |p| p > 0.0 && p.is_finite(),
                "above 0",
            )?,
            presence_penalty: penalty("presence_penalty", asked.presence_penalty)?,
            frequency_penalty: penalty("frequency_penalty", asked.frequency_penalty)?,
        })
    }
}

fn check_biases(biases: &HashMap<TokenId, f32>) -> Result<(), Problem> {
    if biases.len() > MAX_BIASES {
        return Err(invalid(
            "logit_bias",
            format!("has more than {MAX_BIASES} entries"),
        ));
    }
    for bias in biases.values() {
        float(
            "logit_bias",
            *bias,
            |b| (-100.0..=100.0).contains(&b),
            "from -100 to 100",
        )?;
    }
    Ok(())
}

/// Tokens of the answer, at least and at most.
fn lengths(asked: &pb::Sampling, room: usize) -> Result<(u32, u32), Problem> {
    let max_tokens = match asked.max_tokens {
        Some(0) => return Err(invalid("max_tokens", "must be at least 1")),
        Some(tokens) => tokens,
        None => u32::try_from(room).unwrap_or(u32::MAX).max(1),
    };
    let min_tokens = asked.min_tokens.unwrap_or(0);
    if min_tokens > max_tokens {
        let message = format!("is {min_tokens}, more than max_tokens, {max_tokens}");
        return Err(invalid("min_tokens", message));
    }
    Ok((min_tokens, max_tokens))
}

/// The resolved parameters as the contract shows them.
pub(crate) fn to_proto(
    params: &SamplingParams,
    draft: DraftDepth,
    stops: &[String],
    own_stops: &[TokenId],
) -> pb::Sampling {
    pb::Sampling {
        temperature: Some(params.temperature),
        top_k: Some(params.top_k),
        top_p: Some(params.top_p),
        min_p: Some(params.min_p),
        seed: Some(params.seed),
        repetition_penalty: Some(params.repetition_penalty),
        presence_penalty: Some(params.presence_penalty),
        frequency_penalty: Some(params.frequency_penalty),
        logit_bias: params
            .logit_bias
            .iter()
            .map(|(id, bias)| (*id, *bias))
            .collect(),
        stop_token_ids: params.stop_tokens.clone(),
        stop: stops.to_vec(),
        max_tokens: Some(params.max_tokens),
        min_tokens: Some(params.min_tokens),
        ignore_eos: Some(!own_stops.iter().all(|id| params.stop_tokens.contains(id))),
        draft_tokens: match draft {
            DraftDepth::Auto => None,
            DraftDepth::Fixed(drafts) => Some(drafts),
        },
    }
}

/// The model's defaults as the contract shows them.
pub(crate) fn defaults(facts: &ModelFacts) -> pb::Sampling {
    pb::Sampling {
        temperature: Some(facts.defaults.temperature),
        top_k: Some(facts.defaults.top_k),
        top_p: Some(facts.defaults.top_p),
        min_p: Some(0.0),
        repetition_penalty: Some(1.0),
        presence_penalty: Some(0.0),
        frequency_penalty: Some(0.0),
        min_tokens: Some(0),
        ignore_eos: Some(false),
        ..pb::Sampling::default()
    }
}

/// Sorted, so that the order in which a client lists them is no part of the request's identity.
fn stop_tokens(asked: &[TokenId], ignore_own: bool, own: &[TokenId]) -> Vec<TokenId> {
    let own = if ignore_own { &[] } else { own };
    let mut stops: Vec<TokenId> = asked.iter().chain(own).copied().collect();
    stops.sort_unstable();
    stops.dedup();
    stops
}

fn check_stops(stops: &[String]) -> Result<(), Problem> {
    if stops.len() > MAX_STOPS {
        return Err(invalid(
            "stop",
            format!("has {} strings, at most {MAX_STOPS} fit", stops.len()),
        ));
    }
    match stops
        .iter()
        .find(|stop| !(1..=MAX_STOP_BYTES).contains(&stop.len()))
    {
        Some(stop) => Err(invalid(
            "stop",
            format!(
                "has a string of {} bytes, 1 to {MAX_STOP_BYTES} are allowed",
                stop.len()
            ),
        )),
        None => Ok(()),
    }
}

fn seed_of(generation_id: &str) -> u64 {
    let hash = blake3::derive_key(
        "marathon brain seed of a generation id 1",
        generation_id.as_bytes(),
    );
    u64::from_le_bytes([
        hash[0], hash[1], hash[2], hash[3], hash[4], hash[5], hash[6], hash[7],
    ])
}

fn float(
    field: &str,
    value: f32,
    fits: impl FnOnce(f32) -> bool,
    range: &str,
) -> Result<f32, Problem> {
    if fits(value) {
        // Both zeros are the same parameter and must be the same bits.
        Ok(value + 0.0)
    } else {
        Err(invalid(field, format!("must be {range}, it is {value}")))
    }
}

fn invalid(field: &str, what: impl AsRef<str>) -> Problem {
    Problem::invalid(
        format!("spec.sampling.{field}"),
        format!("{field} {}", what.as_ref()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> ModelFacts {
        ModelFacts {
            name: "m".into(),
            fingerprint: "f".into(),
            device: "fake",
            drafter: String::new(),
            draft: DraftDepth::Auto,
            defaults: Defaults::default(),
            suppressed: vec![7],
            stop_tokens: vec![106, 1, 50],
        }
    }

    fn resolve_in(asked: pb::Sampling, logprobs: u32) -> Result<Resolved, Problem> {
        let facts = facts();
        resolve(
            asked,
            &Scope {
                facts: &facts,
                generation_id: "g",
                room: 100,
                logprobs,
            },
        )
    }

    #[test]
    fn unset_fields_take_the_models_defaults() {
        let resolved = resolve_in(pb::Sampling::default(), 0).unwrap();
        let params = &resolved.params;
        assert_eq!(
            (params.temperature, params.top_k, params.top_p),
            (1.0, 64, 0.95)
        );
        assert_eq!(
            (params.max_tokens, &params.stop_tokens[..]),
            (100, &[1, 50, 106][..])
        );
        assert_eq!(params.suppressed, [7]);
        assert_eq!(
            params.seed,
            resolve_in(pb::Sampling::default(), 0).unwrap().params.seed
        );
        let shown = to_proto(
            params,
            resolved.draft,
            &resolved.stops,
            &facts().stop_tokens,
        );
        assert_eq!(shown.ignore_eos, Some(false));
        // What comes back resolves to itself.
        assert_eq!(resolve_in(shown, 0).unwrap().params, *params);
    }

    #[test]
    fn ignoring_the_end_leaves_the_clients_own_stops() {
        let asked = pb::Sampling {
            ignore_eos: Some(true),
            stop_token_ids: vec![9, 3, 9],
            ..pb::Sampling::default()
        };
        assert_eq!(resolve_in(asked, 0).unwrap().params.stop_tokens, [3, 9]);
    }

    #[test]
    fn values_outside_their_range_name_the_field() {
        type Change = fn(&mut pb::Sampling);
        let cases: [(&str, Change); 14] = [
            ("temperature", |s| s.temperature = Some(2.1)),
            ("temperature", |s| s.temperature = Some(f32::NAN)),
            ("top_p", |s| s.top_p = Some(0.0)),
            ("top_p", |s| s.top_p = Some(f32::NAN)),
            ("min_p", |s| s.min_p = Some(1.0)),
            ("repetition_penalty", |s| s.repetition_penalty = Some(0.0)),
            ("repetition_penalty", |s| {
                s.repetition_penalty = Some(f32::INFINITY)
            }),
            ("presence_penalty", |s| s.presence_penalty = Some(-3.0)),
            ("frequency_penalty", |s| {
                s.frequency_penalty = Some(f32::NAN)
            }),
            ("logit_bias", |s| s.logit_bias = [(1, 101.0)].into()),
            ("stop", |s| s.stop = vec![String::new()]),
            ("stop", |s| s.stop = vec!["x".into(); 17]),
            ("max_tokens", |s| s.max_tokens = Some(0)),
            ("min_tokens", |s| s.min_tokens = Some(101)),
        ];
        for (field, change) in cases {
            let mut asked = pb::Sampling::default();
            change(&mut asked);
            let problem = resolve_in(asked, 0).unwrap_err();
            assert_eq!(
                problem.field.as_deref(),
                Some(&*format!("spec.sampling.{field}"))
            );
        }
        let problem = resolve_in(pb::Sampling::default(), 22).unwrap_err();
        assert_eq!(problem.field.as_deref(), Some("spec.logprobs"));
    }

    #[test]
    fn minus_zero_is_zero() {
        let asked = pb::Sampling {
            temperature: Some(-0.0),
            ..pb::Sampling::default()
        };
        let params = resolve_in(asked, 0).unwrap().params;
        assert_eq!(params.temperature.to_bits(), 0.0f32.to_bits());
    }
}
