//! Work that would hold up every other request of its thread.

use super::error::ApiError;

/// Does it on a thread that may block.
///
/// # Errors
/// The work panicked.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| {
        tracing::error!(%error, "work on a request failed");
        ApiError::internal()
    })
}
