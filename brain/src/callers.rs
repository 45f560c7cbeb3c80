//! Who calls: every front end asks here, and everything a caller makes belongs to its key.
//!
//! Keys are held as hashes and compared in constant time. The same key is the same owner over gRPC
//! and over HTTP: generations, cached prefixes, snapshots and usage of one are out of reach of every
//! other.

use std::{
    fmt, fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use marathon_proto::auth::{MAX_TOKEN_BYTES, MIN_TOKEN_BYTES, Token};
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConstantTimeEq as _};

/// Why the keys were refused.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file could not be read.
    #[error("cannot read the API key file {path}: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Every user of the machine could read the keys.
    #[error(
        "the API key file {path} can be read or written by every user (mode {mode:03o}): run `chmod 600` on it",
        path = path.display()
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// An entry is no key.
    #[error("{origin}: {problem}")]
    Entry {
        /// File and line, or the variable.
        origin: String,
        /// What is wrong; never the key itself.
        problem: String,
    },
}

type Hash = [u8; 32];

/// The keys that are let in. Only their SHA-256 hashes are kept.
#[derive(Clone, Default)]
pub struct Keys(Vec<Hash>);

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys({})", self.0.len())
    }
}

/// Who a request comes from: what one key made, another does not see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner(String);

impl Owner {
    /// Who calls a server without keys.
    pub fn anyone() -> Self {
        Self("local".into())
    }

    /// The owner of this name.
    #[cfg(test)]
    pub(crate) fn of(name: &str) -> Self {
        Self(name.into())
    }

    /// Its name inside brain: letters and digits.
    pub fn name(&self) -> &str {
        &self.0
    }
}

impl Keys {
    /// The keys that a server is given: its token, those of a file, and those of the environment,
    /// separated by commas.
    ///
    /// # Errors
    /// [`KeyError`] when one of them cannot be used.
    pub fn gather(
        token: Option<&Token>,
        file: Option<&Path>,
        environment: Option<&str>,
    ) -> Result<Self, KeyError> {
        let mut keys = Self::default();
        if let Some(token) = token {
            keys.add_token(token);
        }
        if let Some(file) = file {
            keys.add_file(file)?;
        }
        if let Some(list) = environment.filter(|list| !list.is_empty()) {
            keys.add_list(list)?;
        }
        Ok(keys)
    }

    /// Whether everybody is let in.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Lets the bearer of the token in.
    fn add_token(&mut self, token: &Token) {
        self.0
            .push(token.hashed(|bytes| Sha256::digest(bytes).into()));
    }

    /// Reads a file: a line is a key, or `sha256:` and the hash of one in hexadecimal; empty lines
    /// and those that begin with `#` are passed over.
    ///
    /// # Errors
    /// [`KeyError`] when it cannot be read, is open to every user, or holds something else.
    fn add_file(&mut self, path: &Path) -> Result<(), KeyError> {
        let read = |source| KeyError::Read {
            path: path.to_owned(),
            source,
        };
        let mode = fs::metadata(path).map_err(read)?.permissions().mode() & 0o777;
        if mode & 0o007 != 0 {
            return Err(KeyError::Exposed {
                path: path.to_owned(),
                mode,
            });
        }
        let text = fs::read_to_string(path).map_err(read)?;
        let before = self.0.len();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let hash = parse(line).map_err(|problem| KeyError::Entry {
                origin: format!("line {} of the API key file {}", number + 1, path.display()),
                problem,
            })?;
            self.0.push(hash);
        }
        if self.0.len() == before {
            return Err(KeyError::Entry {
                origin: format!("the API key file {}", path.display()),
                problem: "it holds no key".into(),
            });
        }
        Ok(())
    }

    /// Reads keys, or hashes as in a file, separated by commas.
    ///
    /// # Errors
    /// [`KeyError::Entry`] when one is none.
    fn add_list(&mut self, list: &str) -> Result<(), KeyError> {
        for (number, entry) in list.split(',').enumerate() {
            let hash = parse(entry.trim()).map_err(|problem| KeyError::Entry {
                origin: format!("key {} of BRAIN_API_KEYS", number + 1),
                problem,
            })?;
            self.0.push(hash);
        }
        Ok(())
    }

    /// Who calls with this key, or without one: anyone where there are no keys, else only the bearer
    /// of one of them.
    pub fn caller(&self, key: Option<&[u8]>) -> Option<Owner> {
        match self.is_empty() {
            true => Some(Owner::anyone()),
            false => self.owner(key?),
        }
    }

    /// Whose key it is; `None` when nobody's. Takes the same time whichever key it is.
    fn owner(&self, candidate: &[u8]) -> Option<Owner> {
        let hash: Hash = Sha256::digest(candidate).into();
        let mut known = Choice::from(0);
        for there in &self.0 {
            known |= there[..].ct_eq(&hash[..]);
        }
        bool::from(known).then(|| Owner(hex(&hash[..8])))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn parse(entry: &str) -> Result<Hash, String> {
    if let Some(digits) = entry.strip_prefix("sha256:") {
        let digits = digits.as_bytes();
        let mut hash = Hash::default();
        let nibble = |digit: u8| char::from(digit).to_digit(16).map(|value| value as u8);
        if digits.len() == 64 {
            let pairs = digits.chunks_exact(2).map(|pair| {
                let (high, low) = (nibble(pair[0])?, nibble(pair[1])?);
                Some(high << 4 | low)
            });
            for (to, byte) in hash.iter_mut().zip(pairs) {
                *to = byte.ok_or("a hash is 64 hexadecimal digits")?;
            }
            return Ok(hash);
        }
        return Err("a hash is 64 hexadecimal digits".into());
    }
    if !(MIN_TOKEN_BYTES..=MAX_TOKEN_BYTES).contains(&entry.len())
        || !entry.bytes().all(|byte| byte.is_ascii_graphic())
    {
        return Err(format!(
            "a key is {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} visible ASCII characters"
        ));
    }
    Ok(Sha256::digest(entry.as_bytes()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "first-key-0123456789";
    const SECOND: &str = "second-key-0123456789";

    fn file(text: &str, mode: u32) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        fs::set_permissions(file.path(), fs::Permissions::from_mode(mode)).unwrap();
        file
    }

    #[test]
    fn keys_and_hashes_of_keys_are_let_in_and_told_apart() {
        let hashed = format!("sha256:{}", hex(&Sha256::digest(SECOND)));
        let file = file(&format!("# team\n\n{FIRST}\n{hashed}\n"), 0o600);
        let mut keys = Keys::default();
        assert!(keys.is_empty());
        keys.add_file(file.path()).unwrap();
        keys.add_list("third-key-0123456789").unwrap();
        let owner = |key: &str| keys.owner(key.as_bytes());
        let (first, second) = (owner(FIRST).unwrap(), owner(SECOND).unwrap());
        assert_ne!(first, second);
        assert!(owner("third-key-0123456789").is_some());
        for wrong in ["", "first-key-012345678", &hashed, "first-key-0123456789 "] {
            assert_eq!(owner(wrong), None, "{wrong}");
        }
        assert_eq!(format!("{keys:?}"), "Keys(3)");
    }

    #[test]
    fn what_is_no_key_is_refused_with_its_line_and_without_the_key() {
        for (text, mode, phrase) in [
            ("", 0o600, "holds no key"),
            ("# only words\n", 0o600, "holds no key"),
            ("good-key-0123456789\nshort\n", 0o600, "line 2"),
            ("sha256:12\n", 0o600, "64 hexadecimal digits"),
            (
                &format!("sha256:{}\n", "g".repeat(64)),
                0o600,
                "64 hexadecimal digits",
            ),
            ("good-key-0123456789\n", 0o644, "chmod 600"),
        ] {
            let error = Keys::default()
                .add_file(file(text, mode).path())
                .unwrap_err()
                .to_string();
            assert!(error.contains(phrase), "{error}");
            assert!(!error.contains("short"), "{error}");
        }
        let error = Keys::default().add_list("a,b").unwrap_err().to_string();
        assert!(error.contains("BRAIN_API_KEYS"), "{error}");
    }
}
