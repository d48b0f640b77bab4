//! Multiple Loss Ratio search (MLRsearch, RFC 9971): the highest rates at which at most a given share of the frames is
//! lost, such as NDR (no loss) and PDR (0.5 %).
//!
//! A binary search after RFC 2544 believes every trial, so one disturbance of the machine decides its result. MLRsearch
//! asks for a sum of trial durations at a load, and tolerates that a share of it, the exceed ratio, loses more than the
//! goal: with 0.5, the result is what the median trial does. Upper bounds may come from short trials. This is pure code
//! over a [`Measurer`].

mod classify;
mod controller;

use serde::Serialize;

pub use classify::{LoadClass, classify, conditional_throughput};
pub use controller::search;

/// What a search looks for (RFC 9971, Search Goal).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Goal {
    /// The largest share of lost frames of a low-loss trial, 0 to 1.
    pub loss_ratio: f64,
    /// The share of the duration sum that high-loss trials may take at a lower bound, 0 to 1.
    pub exceed_ratio: f64,
    /// The largest distance of the two bounds, relative to the upper one. RFC 9971 recommends at least the loss ratio.
    pub width: f64,
    /// The duration of the first trials, in seconds, which only narrow the search.
    pub initial_trial_s: f64,
    /// The duration of trials on which a lower bound may rest, in seconds.
    pub final_trial_s: f64,
    /// The sum of trial durations that decides a load, in seconds.
    pub duration_sum_s: f64,
}

/// The result of a trial at one load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trial {
    /// Its duration in seconds.
    pub duration_s: f64,
    /// The share of the expected frames that were lost, 0 to 1.
    pub loss_ratio: f64,
}

impl Trial {
    /// Returns the result of a trial in which `lost` of `sent` frames were lost. Without frames, all count as lost.
    pub fn new(duration_s: f64, sent: u64, lost: u64) -> Trial {
        let loss_ratio = if sent == 0 { 1.0 } else { lost.min(sent) as f64 / sent as f64 };
        Trial { duration_s, loss_ratio }
    }
}

/// Runs trials.
pub trait Measurer {
    /// The reason why a trial could not be run.
    type Error;

    /// Offers `load` frames a second for `duration_s` seconds.
    ///
    /// # Errors
    /// Fails if the trial could not be run; a lost frame is no error.
    fn trial(&mut self, load: f64, duration_s: f64) -> Result<Trial, Self::Error>;
}

/// The loads between which a search looks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// The lowest load that is tried.
    pub min: f64,
    /// The highest load that is tried, such as the highest that the source can offer.
    pub max: f64,
    /// The load of the first trial. The search is shorter if it is near the result.
    pub first: f64,
}

/// The result for one goal (RFC 9971, Goal Result).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct GoalResult {
    /// The highest load, in frames a second, below the upper bound that meets the goal; `None` if no load does. If
    /// there is no upper bound, the highest load that was tried.
    pub lower: Option<f64>,
    /// The lowest load that does not meet the goal; `None` if the highest load that was tried meets it.
    pub upper: Option<f64>,
    /// The rate, in frames a second, that was typically forwarded at the lower bound.
    pub conditional_throughput: Option<f64>,
    /// Whether both bounds exist and are as close as the goal asks for.
    pub is_regular: bool,
}

/// The results of a search.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SearchResult {
    /// The result of each goal, in their order.
    pub goals: Vec<GoalResult>,
    /// The number of trials.
    pub trials: u32,
    /// The sum of their durations in seconds.
    pub trials_s: f64,
}
