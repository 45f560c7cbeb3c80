//! `POST /tokenize` and `POST /detokenize`: a text or a conversation to token ids, and back.

use axum::{Json, extract::State};
use marathon_proto::status::Problem;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{app::App, body::Body, error::ApiError};
use crate::{
    sched::types::TokenId,
    serving::{Serving, problem},
};

#[derive(Deserialize)]
pub(super) struct Tokenize {
    model: Option<String>,
    prompt: Option<String>,
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
}

#[derive(Deserialize)]
pub(super) struct Detokenize {
    model: Option<String>,
    tokens: Vec<TokenId>,
}

/// A text as a raw prompt: special tokens that it spells are meant, and it begins with bos unless
/// the client says otherwise.
pub(super) fn raw_prompt(
    serving: &Serving,
    text: &str,
    begin: bool,
) -> Result<Vec<TokenId>, Problem> {
    let tokenizer = serving.text.tokenizer();
    let mut ids = tokenizer
        .encode_with_specials(text)
        .map_err(|error| problem::tokenizer("prompt", &error))?;
    let bos = tokenizer.markers().bos;
    if begin && ids.first() != Some(&bos) {
        ids.insert(0, bos);
    }
    Ok(ids)
}

/// `POST /tokenize`
pub(super) async fn tokenize(State(app): State<App>, body: Body) -> Result<Json<Value>, ApiError> {
    let asked: Tokenize = body.read(Body::view).await?;
    app.check_model(asked.model.as_deref())?;
    let serving = app.serving().await?;
    let max_len = serving.engine.max_len();
    let Some(prompt) = asked.prompt else {
        return Err(ApiError::invalid(
            "prompt",
            "`prompt` is missing: give a text",
        ));
    };
    let begin = asked.add_special_tokens.unwrap_or(true);
    let spell = asked.return_token_strs.unwrap_or(false);
    let (ids, spellings) = serving
        .blocking(move |serving| {
            serving.check_text(prompt.len())?;
            let ids = raw_prompt(serving, &prompt, begin)?;
            let tokenizer = serving.text.tokenizer();
            let spellings: Option<Vec<String>> = spell.then(|| {
                ids.iter()
                    .map(|&id| tokenizer.decode(&[id], false))
                    .collect()
            });
            Ok((ids, spellings))
        })
        .await
        .map_err(|problem| ApiError::from_problem(problem, max_len))?;
    Ok(Json(json!({
        "count": ids.len(),
        "max_model_len": max_len,
        "tokens": ids,
        "token_strs": spellings,
    })))
}

/// `POST /detokenize`
pub(super) async fn detokenize(
    State(app): State<App>,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let asked: Detokenize = body.read(Body::view).await?;
    app.check_model(asked.model.as_deref())?;
    let serving = app.serving().await?;
    let max_len = serving.engine.max_len();
    let text = serving
        .blocking(move |serving| {
            serving.check_ids("tokens", &asked.tokens)?;
            Ok(serving.text.tokenizer().decode(&asked.tokens, false))
        })
        .await
        .map_err(|problem| ApiError::from_problem(problem, max_len))?;
    Ok(Json(json!({ "prompt": text })))
}
