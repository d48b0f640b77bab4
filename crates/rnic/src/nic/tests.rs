//! Two NICs and a tiny wire between them that may lose, delay, reorder and copy.

mod basics;
mod drops;
mod wire;
