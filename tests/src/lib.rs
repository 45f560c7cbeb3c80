//! Harness of the whole-process tests.
