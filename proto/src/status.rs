//! Errors as both sides see them: a stable reason, a sentence, and what a client may do about it.
//!
//! A server turns its typed errors into a [`Problem`] and that into a `tonic::Status` whose
//! details carry the reason; a client reads the same [`Problem`] back and branches on the reason,
//! never on the text.

use std::{collections::HashMap, time::Duration};

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

/// The `domain` of the ErrorInfo detail of every status that brain makes.
pub const DOMAIN: &str = "brain.marathon";

/// What a client may do after an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// The same call will fail again.
    Never,
    /// The same call may succeed later, on this brain or its successor.
    Later,
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $code:ident, $retry:ident;)*) => {
        /// Why a call failed. The wire form is [`Reason::as_str`] and never changes its meaning.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Reason { $($(#[$doc])* $name,)* }

        impl Reason {
            /// Every reason there is.
            pub const ALL: &[Reason] = &[$(Reason::$name),*];

            /// The reason as it goes over the wire.
            pub const fn as_str(self) -> &'static str {
                match self { $(Reason::$name => $text,)* }
            }

            /// The gRPC code that it travels under.
            pub const fn code(self) -> Code {
                match self { $(Reason::$name => Code::$code,)* }
            }

            /// Whether asking again makes sense.
            pub const fn retry(self) -> Retry {
                match self { $(Reason::$name => Retry::$retry,)* }
            }
        }
    };
}

reasons! {
    /// A field has a value outside its range.
    InvalidField = "INVALID_FIELD", InvalidArgument, Never;
    /// Prompt and answer cannot fit the context of this model or the cache of this brain.
    PromptTooLong = "PROMPT_TOO_LONG", InvalidArgument, Never;
    /// The call attaches to a generation that this brain does not hold.
    UnknownGeneration = "UNKNOWN_GENERATION", NotFound, Never;
    /// The generation exists with another specification.
    GenerationConflict = "GENERATION_CONFLICT", AlreadyExists, Never;
    /// The index is past the end of a finished generation.
    IndexOutOfRange = "INDEX_OUT_OF_RANGE", OutOfRange, Never;
    /// The client pinned another model than the one that is served.
    FingerprintMismatch = "FINGERPRINT_MISMATCH", FailedPrecondition, Never;
    /// The call carries no token, or a wrong one.
    Unauthenticated = "UNAUTHENTICATED", Unauthenticated, Never;
    /// Too much is running or waiting.
    Overloaded = "OVERLOADED", ResourceExhausted, Later;
    /// This brain is about to exit.
    ShuttingDown = "SHUTTING_DOWN", Unavailable, Later;
    /// The engine failed; the request was not at fault.
    EngineFailed = "ENGINE_FAILED", Unavailable, Later;
    /// A bug: the details are in brain's log, not in the message.
    Internal = "INTERNAL", Internal, Later;
}

impl Reason {
    fn from_wire(text: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|reason| reason.as_str() == text)
    }
}

/// One failed call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Problem {
    /// What kind of failure.
    pub reason: Reason,
    /// One sentence: what was wrong, where, what to do.
    pub message: String,
    /// The request field at fault, as a path such as `spec.sampling.top_p`.
    pub field: Option<String>,
    /// When to ask again, if the server knows.
    pub retry_after: Option<Duration>,
}

impl Problem {
    /// A problem without a field or a time.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
            field: None,
            retry_after: None,
        }
    }

    /// A value outside its range, in `field`.
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            field: Some(field.into()),
            ..Self::new(Reason::InvalidField, message)
        }
    }

    /// The same, with the time after which to ask again.
    #[must_use]
    pub fn retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    /// The status that carries all of it.
    pub fn into_status(self) -> Status {
        let mut details = ErrorDetails::new();
        details.set_error_info(self.reason.as_str(), DOMAIN, HashMap::new());
        if let Some(field) = &self.field {
            details.add_bad_request_violation(field.clone(), self.message.clone());
        }
        if let Some(after) = self.retry_after {
            details.set_retry_info(Some(after));
        }
        Status::with_error_details(self.reason.code(), self.message, details)
    }

    /// The problem inside a status; `None` when it did not come from brain (a transport error, a
    /// proxy, a reason that a newer brain knows).
    pub fn from_status(status: &Status) -> Option<Self> {
        let details = status.get_error_details();
        let info = details.error_info()?;
        if info.domain != DOMAIN {
            return None;
        }
        Some(Self {
            reason: Reason::from_wire(&info.reason)?,
            message: status.message().to_owned(),
            field: details
                .bad_request()
                .and_then(|bad| bad.field_violations.first())
                .map(|violation| violation.field.clone()),
            retry_after: details.retry_info().and_then(|retry| retry.retry_delay),
        })
    }
}

impl From<Problem> for Status {
    fn from(problem: Problem) -> Self {
        problem.into_status()
    }
}

/// Whether the call behind `status` may be made again: by its reason when it has one, else by its
/// code. A stream that broke in transit has no reason, and asking again is what cursors are for.
pub fn retry(status: &Status) -> Retry {
    if let Some(problem) = Problem::from_status(status) {
        return problem.reason.retry();
    }
    match status.code() {
        Code::Unavailable
        | Code::Cancelled
        | Code::Unknown
        | Code::DeadlineExceeded
        | Code::Aborted
        | Code::ResourceExhausted
        | Code::Internal
        | Code::DataLoss => Retry::Later,
        _ => Retry::Never,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_reason_survives_the_wire() {
        for &reason in Reason::ALL {
            let sent = Problem::new(reason, format!("about {reason:?}"));
            let status = sent.clone().into_status();
            assert_eq!(status.code(), reason.code());
            assert_eq!(Problem::from_status(&status), Some(sent));
        }
    }

    #[test]
    fn wire_names_are_distinct() {
        let names: HashSet<_> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
        assert_eq!(names.len(), Reason::ALL.len());
    }

    #[test]
    fn field_and_time_travel_too() {
        let sent = Problem::invalid("spec.sampling.top_p", "top_p is 1.5; it must be in (0, 1]");
        assert_eq!(
            Problem::from_status(&sent.clone().into_status()),
            Some(sent)
        );
        let sent = Problem::new(Reason::Overloaded, "64 generations wait")
            .retry_after(Duration::from_millis(1500));
        assert_eq!(
            Problem::from_status(&sent.clone().into_status()),
            Some(sent)
        );
    }

    #[test]
    fn a_foreign_status_is_no_problem_of_ours() {
        assert_eq!(Problem::from_status(&Status::unavailable("proxy")), None);
        let mut details = ErrorDetails::new();
        details.set_error_info("OVERLOADED", "elsewhere", HashMap::new());
        let status = Status::with_error_details(Code::ResourceExhausted, "x", details);
        assert_eq!(Problem::from_status(&status), None);
    }

    #[test]
    fn the_reason_decides_before_the_code() {
        let later = Problem::new(Reason::EngineFailed, "x").into_status();
        let never = Problem::new(Reason::GenerationConflict, "x").into_status();
        assert_eq!((retry(&later), retry(&never)), (Retry::Later, Retry::Never));
        assert_eq!(retry(&Status::unknown("h2 protocol error")), Retry::Later);
        assert_eq!(retry(&Status::unimplemented("old brain")), Retry::Never);
    }
}
