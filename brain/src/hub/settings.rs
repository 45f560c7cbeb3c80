//! Where the hub, its cache and its access token are: the variables that users of
//! `huggingface_hub` know.

use std::{
    ffi::OsString,
    fmt,
    path::{Path, PathBuf},
};

use super::HubError;

/// The hub as this user has it.
#[derive(Clone, Debug)]
pub struct HubSettings {
    /// Folder of the cached repositories.
    pub cache: PathBuf,
    /// `https://HOST` without a slash at its end.
    pub endpoint: String,
    /// Proves who asks; none for open repositories.
    pub token: Option<AccessToken>,
    /// Only what is in the cache.
    pub offline: bool,
}

/// A secret that no log shows.
#[derive(Clone, PartialEq, Eq)]
pub struct AccessToken(String);

impl AccessToken {
    /// For the header of a request.
    pub(super) fn secret(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for AccessToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AccessToken(…)")
    }
}

const ENDPOINT: &str = "https://huggingface.co";

impl HubSettings {
    /// Reads the environment of this process.
    pub fn from_environment() -> Result<Self, HubError> {
        Self::read(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    /// Reads variables through `variable`, which gives those that are set and not empty.
    pub fn read(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, HubError> {
        let user_home = variable("HOME").map(PathBuf::from);
        let path = |name: &str| variable(name).map(|value| expand(value, user_home.as_deref()));
        let home = path("HF_HOME")
            .or_else(|| path("XDG_CACHE_HOME").map(|cache| cache.join("huggingface")))
            .or_else(|| {
                user_home
                    .as_ref()
                    .map(|home| home.join(".cache").join("huggingface"))
            });
        let cache = path("HF_HUB_CACHE")
            .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| home.as_ref().map(|home| home.join("hub")))
            .ok_or_else(|| HubError::Setting {
                setting: "HF_HOME".into(),
                problem: "neither it nor HOME is set: say where models are kept".into(),
            })?;
        let endpoint = match variable("HF_ENDPOINT") {
            Some(value) => endpoint(value)?,
            None => ENDPOINT.to_owned(),
        };
        let token_file = path("HF_TOKEN_PATH").or_else(|| home.map(|home| home.join("token")));
        let token = match variable("HF_TOKEN").or_else(|| variable("HUGGING_FACE_HUB_TOKEN")) {
            _ if is_true(variable("HF_HUB_DISABLE_IMPLICIT_TOKEN")) => None,
            Some(value) => access_token("HF_TOKEN", &value.to_string_lossy())?,
            None => match token_file {
                Some(file) => from_file(&file)?,
                None => None,
            },
        };
        Ok(Self {
            cache,
            endpoint,
            token,
            offline: is_true(variable("HF_HUB_OFFLINE"))
                || is_true(variable("TRANSFORMERS_OFFLINE")),
        })
    }
}

fn is_true(value: Option<OsString>) -> bool {
    value.is_some_and(|value| {
        let value = value.to_string_lossy().to_ascii_uppercase();
        matches!(value.as_str(), "1" | "ON" | "YES" | "TRUE")
    })
}

/// A path in which `~` may stand for the user's folder.
fn expand(value: OsString, home: Option<&Path>) -> PathBuf {
    let path = PathBuf::from(value);
    match (path.strip_prefix("~"), home) {
        (Ok(rest), Some(home)) => home.join(rest),
        _ => path,
    }
}

fn endpoint(value: OsString) -> Result<String, HubError> {
    let text = value.to_string_lossy();
    let text = text.trim().trim_end_matches('/');
    let usable = ["http://", "https://"].iter().any(|scheme| {
        text.strip_prefix(scheme)
            .is_some_and(|rest| !rest.is_empty())
    }) && reqwest::Url::parse(text).is_ok();
    if usable {
        return Ok(text.to_owned());
    }
    Err(HubError::Setting {
        setting: "HF_ENDPOINT".into(),
        problem: format!("{text:?} is no address: write https://HOST"),
    })
}

fn from_file(file: &Path) -> Result<Option<AccessToken>, HubError> {
    let setting = file.display().to_string();
    match std::fs::read_to_string(file) {
        Ok(text) => access_token(&setting, &text),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(HubError::Setting {
            setting,
            problem: format!("{error}; make it readable, or set HF_TOKEN"),
        }),
    }
}

fn access_token(setting: &str, text: &str) -> Result<Option<AccessToken>, HubError> {
    let text = text.trim();
    if text.is_empty() {
        return Ok(None);
    }
    if !text.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(HubError::Setting {
            setting: setting.to_owned(),
            problem: "an access token is one line of visible ASCII characters".into(),
        });
    }
    Ok(Some(AccessToken(text.to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<HubSettings, HubError> {
        HubSettings::read(|name| {
            let found = variables.iter().find(|(set, _)| *set == name);
            found.map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn the_cache_is_where_users_put_it() {
        let cache = |variables: &[(&str, &str)]| read(variables).unwrap().cache;
        let home = ("HOME", "/users/me");
        assert_eq!(
            cache(&[home]),
            Path::new("/users/me/.cache/huggingface/hub")
        );
        assert_eq!(
            cache(&[home, ("XDG_CACHE_HOME", "/c")]),
            Path::new("/c/huggingface/hub")
        );
        assert_eq!(
            cache(&[home, ("HF_HOME", "~/hf"), ("XDG_CACHE_HOME", "/c")]),
            Path::new("/users/me/hf/hub")
        );
        assert_eq!(
            cache(&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/models")]),
            Path::new("/models")
        );
        let nowhere = read(&[]).unwrap_err().to_string();
        assert!(nowhere.starts_with("HF_HOME cannot be used"), "{nowhere}");
    }

    #[test]
    fn the_token_comes_from_the_variable_or_the_file() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("token"), "from-file\n").unwrap();
        let home = ("HF_HOME", folder.path().to_str().unwrap());
        let token = |variables: &[(&str, &str)]| read(variables).unwrap().token.map(|t| t.0);
        assert_eq!(token(&[home]).as_deref(), Some("from-file"));
        assert_eq!(token(&[home, ("HF_TOKEN", " t ")]).as_deref(), Some("t"));
        assert_eq!(token(&[home, ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);
        assert_eq!(token(&[("HF_HOME", "/nowhere")]), None);
        let bad = read(&[home, ("HF_TOKEN", "a b")]).unwrap_err().to_string();
        assert!(bad.starts_with("HF_TOKEN cannot be used"), "{bad}");
        assert!(!bad.contains("a b"), "a secret is not repeated: {bad}");
        let shown = format!("{:?}", read(&[home]).unwrap());
        assert!(!shown.contains("from-file"), "{shown}");
    }

    #[test]
    fn endpoint_and_offline() {
        let home = ("HF_HOME", "/hf");
        assert_eq!(read(&[home]).unwrap().endpoint, ENDPOINT);
        let mirror = read(&[home, ("HF_ENDPOINT", "http://mirror:8080/hf/")]).unwrap();
        assert_eq!(mirror.endpoint, "http://mirror:8080/hf");
        for bad in ["mirror", "ftp://x", "https://"] {
            let error = read(&[home, ("HF_ENDPOINT", bad)]).unwrap_err();
            assert!(error.to_string().contains("write https://HOST"), "{error}");
        }
        for (value, offline) in [("1", true), ("yes", true), ("0", false), ("off", false)] {
            let settings = read(&[home, ("HF_HUB_OFFLINE", value)]).unwrap();
            assert_eq!(settings.offline, offline, "{value}");
        }
    }
}
