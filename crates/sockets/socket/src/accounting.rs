//! What this process holds and has done: the budget of lane memory, and the page of counters.

pub mod memory_budget;
pub mod process_stats;
