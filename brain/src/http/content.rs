//! A message's content as OpenAI's APIs write it: a text, or a list of parts.

use serde::Deserialize;

use super::error::ApiError;

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a text or a list of parts")]
pub(super) enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
pub(super) struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    refusal: Option<String>,
}

impl Part {
    /// Its text; `at` is its path, `also` the kinds that this API has besides the common ones.
    ///
    /// # Errors
    /// It is no text, or has none.
    pub(super) fn text(self, at: &str, also: &[&str]) -> Result<String, ApiError> {
        let text = match self.kind.as_str() {
            "text" | "input_text" | "output_text" => self.text,
            kind if also.contains(&kind) => self.text,
            "refusal" => self.refusal,
            other => {
                let what = format!("{other:.60?} parts are not read: this model reads text alone");
                return Err(ApiError::unsupported(format!("{at}.type"), &what));
            }
        };
        text.ok_or_else(|| {
            let path = format!("{at}.text");
            let what = format!("`{path}` is missing");
            ApiError::invalid(path, what)
        })
    }
}
