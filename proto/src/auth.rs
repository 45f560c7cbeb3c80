//! One shared secret: read from a file, asked for by the server, sent by the client.
//!
//! The token never comes from a flag or a variable, because both show up in process listings, and
//! it never appears in a log: its `Debug` is redacted and its header is marked sensitive.

use std::{
    fmt, fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use subtle::ConstantTimeEq as _;
use tonic::{
    Request, Status,
    metadata::{Ascii, MetadataValue},
    service::Interceptor,
};

use crate::status::{Problem, Reason};

/// Shortest token accepted, in bytes: below this, guessing over a network becomes thinkable.
pub const MIN_TOKEN_BYTES: usize = 16;
/// Longest token accepted, in bytes: it has to fit a header.
pub const MAX_TOKEN_BYTES: usize = 1024;

const HEADER: &str = "authorization";
const SCHEME: &str = "Bearer ";

/// Why a token file was refused. Every message names the file and what to do.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The file could not be opened or read.
    #[error("cannot read token file {path}: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Every user of the machine could read the secret.
    #[error(
        "token file {path} can be read or written by every user (mode {mode:03o}): run `chmod 600` on it",
        path = path.display()
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The content is no token.
    #[error(
        "token file {path} must hold one line of {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} visible ASCII characters: {problem}",
        path = path.display()
    )]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: &'static str,
    },
}

/// A bearer token. Cheap to clone; its `Debug` shows nothing.
#[derive(Clone)]
pub struct Token(Arc<str>);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

impl Token {
    /// Reads a token from the only line of a file. A trailing line end is not part of it.
    ///
    /// # Errors
    /// [`TokenError`] when the file cannot be read, is open to every user, or holds no token.
    pub fn from_file(path: &Path) -> Result<Self, TokenError> {
        let read_error = |source| TokenError::Read {
            path: path.to_owned(),
            source,
        };
        let mode = fs::metadata(path).map_err(read_error)?.permissions().mode() & 0o777;
        if mode & 0o007 != 0 {
            return Err(TokenError::Exposed {
                path: path.to_owned(),
                mode,
            });
        }
        let bytes = fs::read(path).map_err(read_error)?;
        parse(&bytes).map_err(|problem| TokenError::Content {
            path: path.to_owned(),
            problem,
        })
    }

    /// Whether `candidate` is this token, in a time that depends on their lengths alone.
    pub fn matches(&self, candidate: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(candidate).into()
    }

    /// What `hash` makes of this token's bytes, for a server that keeps hashes alone.
    pub fn hashed<T>(&self, hash: impl FnOnce(&[u8]) -> T) -> T {
        hash(self.0.as_bytes())
    }

    /// The header value that carries this token, marked sensitive so that HTTP/2 never indexes it.
    fn header(&self) -> Result<MetadataValue<Ascii>, Status> {
        let mut value: MetadataValue<Ascii> = format!("{SCHEME}{}", self.0)
            .parse()
            .map_err(|_| Status::internal("the token does not fit a header"))?;
        value.set_sensitive(true);
        Ok(value)
    }
}

fn parse(bytes: &[u8]) -> Result<Token, &'static str> {
    let line = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    if line.is_empty() {
        return Err("it is empty");
    }
    if line.contains(&b'\n') {
        return Err("it has more than one line");
    }
    if !line.iter().all(u8::is_ascii_graphic) {
        return Err("it holds a space or another character that is not visible ASCII");
    }
    if line.len() < MIN_TOKEN_BYTES {
        return Err("it is too short");
    }
    if line.len() > MAX_TOKEN_BYTES {
        return Err("it is too long");
    }
    let text = std::str::from_utf8(line).map_err(|_| "it is not ASCII")?;
    Ok(Token(text.into()))
}

/// Server side: asks who calls, from the bearer token of every call, and attaches the answer to the
/// call's extensions. Who is nobody is refused.
///
/// Put it around every service except health: a supervisor's probes carry no headers.
pub struct Guard<C>(Arc<Who<C>>);

type Who<C> = dyn Fn(Option<&[u8]>) -> Option<C> + Send + Sync;

impl<C> Guard<C> {
    /// A guard that asks `who`; `None` is a call without a token.
    pub fn new(who: impl Fn(Option<&[u8]>) -> Option<C> + Send + Sync + 'static) -> Self {
        Self(Arc::new(who))
    }
}

impl<C> Clone for Guard<C> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<C: Clone + Send + Sync + 'static> Interceptor for Guard<C> {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let given = request
            .metadata()
            .get(HEADER)
            .and_then(|value| value.as_bytes().strip_prefix(SCHEME.as_bytes()));
        match ((self.0)(given), given) {
            (Some(caller), _) => {
                request.extensions_mut().insert(caller);
                Ok(request)
            }
            (None, Some(_)) => Err(refused("the bearer token is not one of this server's")),
            (None, None) => Err(refused("this server needs `authorization: Bearer TOKEN`")),
        }
    }
}

fn refused(message: &str) -> Status {
    Problem::new(Reason::Unauthenticated, message).into_status()
}

/// Client side: adds the token, if there is one, to a call.
///
/// # Errors
/// `Internal` when the token cannot be a header, which [`Token::from_file`] rules out.
pub fn attach(token: Option<&Token>, request: &mut Request<()>) -> Result<(), Status> {
    if let Some(token) = token {
        request.metadata_mut().insert(HEADER, token.header()?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use tonic::Code;

    use super::*;

    const GOOD: &str = "0123456789abcdefXYZ";

    fn guard(token: Token) -> Guard<&'static str> {
        Guard::new(move |given| {
            given
                .is_some_and(|given| token.matches(given))
                .then_some("bearer")
        })
    }

    fn file(content: &[u8], mode: u32) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content).unwrap();
        fs::set_permissions(file.path(), fs::Permissions::from_mode(mode)).unwrap();
        file
    }

    #[test]
    fn a_token_is_the_only_line_without_its_end() {
        for end in ["", "\n", "\r\n"] {
            let file = file(format!("{GOOD}{end}").as_bytes(), 0o600);
            assert!(
                Token::from_file(file.path())
                    .unwrap()
                    .matches(GOOD.as_bytes())
            );
        }
    }

    #[test]
    fn content_that_is_no_token_is_refused_with_its_reason() {
        let long = vec![b'x'; MAX_TOKEN_BYTES + 1];
        let cases: [(&[u8], &str); 6] = [
            (b"", "empty"),
            (b"\n", "empty"),
            (
                b"0123456789abcdef\n0123456789abcdef\n",
                "more than one line",
            ),
            (b"0123456789 abcdef", "visible ASCII"),
            (b"short", "too short"),
            (&long, "too long"),
        ];
        for (content, reason) in cases {
            let error = Token::from_file(file(content, 0o600).path())
                .unwrap_err()
                .to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_file_open_to_everybody_is_refused() {
        let error = Token::from_file(file(GOOD.as_bytes(), 0o644).path()).unwrap_err();
        assert!(
            matches!(error, TokenError::Exposed { mode: 0o644, .. }),
            "{error}"
        );
        assert!(Token::from_file(file(GOOD.as_bytes(), 0o440).path()).is_ok());
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Token::from_file(Path::new("/nowhere/token"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("/nowhere/token"), "{error}");
    }

    #[test]
    fn the_secret_is_not_in_its_debug_output() {
        let token = parse(GOOD.as_bytes()).unwrap();
        assert!(!format!("{token:?}").contains(GOOD));
    }

    #[test]
    fn what_the_client_attaches_the_server_accepts() {
        let token = parse(GOOD.as_bytes()).unwrap();
        let mut request = Request::new(());
        attach(Some(&token), &mut request).unwrap();
        let passed = guard(token).call(request).unwrap();
        assert_eq!(passed.extensions().get(), Some(&"bearer"));
    }

    #[test]
    fn any_other_header_is_unauthenticated() {
        let mut guard = guard(parse(GOOD.as_bytes()).unwrap());
        let headers = [
            None,
            Some(String::new()),
            Some(GOOD.to_owned()),
            Some(format!("bearer {GOOD}")),
            Some(format!("Bearer {GOOD}x")),
            Some(format!("Bearer {}", &GOOD[1..])),
            Some("Bearer ".to_owned()),
        ];
        for header in headers {
            let mut request = Request::new(());
            if let Some(header) = &header {
                request
                    .metadata_mut()
                    .insert(HEADER, header.parse().unwrap());
            }
            let status = guard.call(request).unwrap_err();
            assert_eq!(status.code(), Code::Unauthenticated, "{header:?}");
        }
    }

    #[test]
    fn a_server_without_a_token_asks_for_none() {
        let mut open = Guard::new(|_| Some(()));
        assert!(open.call(Request::new(())).is_ok());
    }
}
