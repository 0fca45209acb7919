//! The integration tests: one binary, so that it is linked once.

mod tidy;
