//! Two NICs and a small wire between them that may lose, delay, reorder and duplicate packets.

mod errors;
mod goodput;
mod hostile;
mod loss_recovery;
mod operations;
mod paging;
mod random_schedules;
mod unreliable;
mod wire;
