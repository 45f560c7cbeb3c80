//! Layers of settings: where each comes from, and what is said of one that is wrong.

use figment::{
    Profile, Provider,
    value::{Dict, Map, Value},
};

use super::Written;

/// How variables are named among the layers.
const ENVIRONMENT: &str = "environment";

/// Where a setting comes from, in a user's words.
pub(super) fn origin(found: &figment::Metadata, field: &str) -> String {
    match &found.source {
        Some(figment::Source::File(path)) => path.display().to_string(),
        _ if found.name == ENVIRONMENT => format!("BRAIN_{}", field.to_uppercase()),
        _ => found.name.to_string(),
    }
}

/// What is wrong, with the setting and where it comes from.
pub(super) fn describe(error: &figment::Error) -> String {
    let name = error.path.join(".");
    let place = error
        .metadata
        .as_ref()
        .filter(|found| !found.name.contains("::"))
        .map(|found| format!(" ({})", origin(found, &name)))
        .unwrap_or_default();
    if name.is_empty() {
        format!("configuration{place}: {}", error.kind)
    } else {
        format!("setting {name}{place}: {}", error.kind)
    }
}

/// Variables as settings: what is a text stays one, whatever it looks like.
pub(super) fn environment(variables: impl Iterator<Item = (String, String)>) -> Given {
    let defaults = defaults();
    let is_text = |name: &str| matches!(defaults.get(name), Some(Value::String(..)));
    let settings = variables.map(|(name, text)| {
        let value = match is_text(&name) {
            true => Value::from(text),
            false => text.parse().unwrap_or_else(|never| match never {}),
        };
        (name, value)
    });
    Given(ENVIRONMENT, settings.collect())
}

fn defaults() -> Dict {
    let defaults = Value::serialize(Written::default());
    let dict = defaults.ok().and_then(Value::into_dict);
    dict.unwrap_or_default()
}

/// Settings and where they were given.
pub(super) struct Given(pub(super) &'static str, pub(super) Dict);

impl Provider for Given {
    fn metadata(&self) -> figment::Metadata {
        figment::Metadata::named(self.0)
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Map::from([(Profile::Default, self.1.clone())]))
    }
}

#[cfg(test)]
mod tests {
    use figment::{Figment, providers::Serialized};

    use super::*;

    #[test]
    fn a_text_that_looks_like_a_number_is_one_all_the_same() {
        let variables = [
            ("served_model_name", "4"),
            ("cpus", "3"),
            ("model", "true"),
            ("snapshot_quota", "1.5G"),
            ("draft_tokens", "5"),
            ("log", "[debug]"),
            ("threads", "3"),
            ("gpu_memory_utilization", "0.5"),
            ("trust_special_tokens", "true"),
        ];
        let variables = variables.map(|(name, text)| (name.to_owned(), text.to_owned()));
        let figment = Figment::from(Serialized::defaults(Written::default()))
            .merge(environment(variables.into_iter()));
        let written: Written = figment.extract().unwrap();
        assert_eq!(written.served_model_name, "4");
        assert_eq!((&*written.cpus, &*written.model), ("3", "true"));
        assert_eq!(written.snapshot_quota.text(), "1.5G");
        assert_eq!(written.draft_tokens.text(), "5");
        assert_eq!(&*written.log, "[debug]");
        assert_eq!((written.threads, written.gpu_memory_utilization), (3, 0.5));
        assert!(written.trust_special_tokens);
        let origin = figment
            .find_metadata("cpus")
            .map(|found| origin(found, "cpus"));
        assert_eq!(origin.as_deref(), Some("BRAIN_CPUS"));
    }
}
