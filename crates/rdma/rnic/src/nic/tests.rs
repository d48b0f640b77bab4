//! Tests of the engine: pairs of NICs over a wire that may lose, delay, reorder and duplicate packets.

mod errors;
mod goodput;
mod hostile;
mod loss_recovery;
mod operations;
mod paging;
mod pair;
mod random_schedules;
mod unreliable;
