//! Two NICs and a tiny wire between them that may lose, delay, reorder and copy.

mod adversary;
mod basics;
mod drops;
mod errors;
mod goals;
mod paged;
mod unreliable;
mod wire;
