//! it

mod readings;
