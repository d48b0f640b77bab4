//! Calibration: searches for the parameters with which the simulated host reproduces the figures published for the real
//! one.
//!
//! The targets come from two systems only, hsw and ib. Every other system is a prediction, so measurements of it are
//! never a target.

mod residuals;
mod search;
mod targets;

pub use residuals::{Residual, SampleCounts, residuals};
pub use search::{Fit, FitError, FreeParameter};
pub use targets::{CalibrationTarget, SYSTEMS, Statistic, TargetError, Tolerance, built_in};
