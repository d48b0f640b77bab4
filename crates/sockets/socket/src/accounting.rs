//! Resource accounting of this process: the budget of lane memory, and the stats page.

pub mod memory_budget;
pub mod process_stats;
