//! Calibration: which parameters make the simulated host give the figures that were published of the real one.
//!
//! Facts come from two systems only, hsw and ib; every other system is a prediction, and what was measured on it has no
//! place here.

mod facts;
mod judge;
mod search;

pub use facts::{Fact, FactError, SYSTEMS, Statistic, Tolerance, built_in};
pub use judge::{Effort, Residual, residuals};
pub use search::{Fit, FitError, Free};
