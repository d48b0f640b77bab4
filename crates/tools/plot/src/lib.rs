//! Line plots as SVG and PNG: linear, logarithmic or percentage axes, colours and markers that remain distinguishable
//! for colour-blind readers and in black-and-white print, and a legend below the plot. An image is as wide as a column
//! of a paper, so that its text has the size of that of captions.
//!
//! Coordinates are transformed before they are drawn, so one kind of chart serves every axis. A PNG is the SVG rendered
//! with a built-in font.

mod axis;
mod draw;
mod overlap;
mod png;
mod style;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

pub use axis::Axis;
pub use style::{Color, Line, Marker, Style};

/// A series of points.
pub struct Series {
    /// Title in the legend.
    pub title: String,
    /// Drawing style.
    pub style: Style,
    /// Points (x, y). Points that an axis cannot show interrupt the line, and the legend gives their number.
    pub points: Vec<(f64, f64)>,
    /// Spread of points (x, low, high), drawn as bars; the caption says what of.
    pub spread: Vec<(f64, f64, f64)>,
}

/// Largest number of series in one plot that readers can tell apart.
pub const SERIES_MAX: usize = 8;

/// A plot.
pub struct Figure {
    /// Title above the plot; lines after the first are smaller.
    pub title: String,
    /// Horizontal axis.
    pub x: Axis,
    /// Vertical axis.
    pub y: Axis,
    /// Series, the last on top.
    pub series: Vec<Series>,
    /// Lines below the legend: what bars are of, what a prediction rests on.
    pub notes: Vec<String>,
}

/// Writes plots as SVG into a directory, each under its file name, and returns their paths.
///
/// # Errors
/// Names the file that cannot be written.
pub fn write_svgs(directory: &Path, figures: &[(impl AsRef<Path>, Figure)]) -> Result<Vec<PathBuf>> {
    let write = |(name, figure): &(_, Figure)| {
        let path = directory.join(name);
        figure.write_svg(&path)?;
        Ok(path)
    };
    figures.iter().map(write).collect()
}

impl Series {
    /// Returns a series without spread.
    pub fn new(title: impl Into<String>, style: Style, points: Vec<(f64, f64)>) -> Self {
        Self { title: title.into(), style, points, spread: Vec::new() }
    }

    /// Returns this series with the spread of its points (x, low, high).
    pub fn with_spread(self, spread: Vec<(f64, f64, f64)>) -> Self {
        Self { spread, ..self }
    }
}

impl Figure {
    /// Writes the plot as SVG.
    ///
    /// # Errors
    /// Names the file that cannot be written.
    pub fn write_svg(&self, path: &Path) -> Result<()> {
        let svg = self.svg().with_context(|| format!("drawing {}", path.display()))?;
        fs::write(path, svg).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Writes `NAME.svg` and `NAME.png` into a directory and returns their paths.
    ///
    /// # Errors
    /// Names the file that cannot be written.
    pub fn write(&self, directory: &Path, name: &str) -> Result<Vec<PathBuf>> {
        let (svg_path, png_path) = (directory.join(format!("{name}.svg")), directory.join(format!("{name}.png")));
        let svg = self.svg().with_context(|| format!("drawing {}", svg_path.display()))?;
        let png = png::render(&svg).with_context(|| format!("drawing {}", png_path.display()))?;
        for (path, contents) in [(&svg_path, svg.as_bytes()), (&png_path, &png)] {
            fs::write(path, contents).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(vec![svg_path, png_path])
    }
}
