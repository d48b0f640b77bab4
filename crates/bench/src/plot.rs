//! Line plots as SVG: logarithmic or percentage axes, colours that colour-blind readers can tell apart, the legend
//! beside the plot.
//!
//! Coordinates are transformed before they are drawn, so one kind of chart serves every axis.

use std::fs;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result};
use plotters::coord::ranged1d::{KeyPointHint, Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use crate::table;

/// Drawing rounds to whole units: with this many to a pixel, curves stay smooth.
const UNITS_PER_PIXEL: i32 = 8;
const WIDTH: i32 = 860;
const HEIGHT: i32 = 460;
const LEGEND_WIDTH: i32 = 200;
const FONT: &str = "Helvetica, Arial, sans-serif";
/// Beyond this, markers would hide the line.
const MARKED_POINTS_MAX: usize = 32;
/// Room between the outermost point and the frame, as a share of the axis.
const AXIS_MARGIN: f64 = 0.02;

const fn units(pixels: i32) -> i32 {
    pixels * UNITS_PER_PIXEL
}

const fn extent(pixels: i32) -> u32 {
    units(pixels).unsigned_abs()
}

/// What an axis shows.
#[derive(Clone, Copy, Debug)]
pub enum Axis {
    /// Bytes, by powers of four.
    Bytes(&'static str),
    /// A positive quantity, by powers of ten.
    Decades(&'static str),
    /// 0 to 100.
    Percent(&'static str),
}

/// How a series is drawn (the colours are those of Okabe and Ito).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Vermilion,
    Orange,
    Blue,
    Green,
    Floor,
}

/// One line.
pub struct Series {
    pub title: String,
    pub style: Style,
    pub points: Vec<(f64, f64)>,
}

/// One plot.
pub struct Figure {
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    pub series: Vec<Series>,
}

impl Style {
    fn color(self) -> RGBColor {
        match self {
            Self::Vermilion => RGBColor(213, 94, 0),
            Self::Orange => RGBColor(230, 159, 0),
            Self::Blue => RGBColor(0, 114, 178),
            Self::Green => RGBColor(0, 158, 115),
            Self::Floor => RGBColor(110, 110, 110),
        }
    }

    /// Ours is the line the reader looks for.
    fn stroke(self) -> ShapeStyle {
        self.color().stroke_width(extent(if self == Self::Green { 3 } else { 2 }))
    }
}

impl Axis {
    fn title(self) -> &'static str {
        match self {
            Self::Bytes(title) | Self::Decades(title) | Self::Percent(title) => title,
        }
    }

    /// Where a value lies on the axis; `None` if the axis cannot show it.
    fn position(self, value: f64) -> Option<f64> {
        let position = match self {
            Self::Bytes(_) => value.log2() / 2.0,
            Self::Decades(_) => value.log10(),
            Self::Percent(_) => value,
        };
        position.is_finite().then_some(position)
    }

    fn label(self, position: f64) -> String {
        match self {
            Self::Bytes(_) => table::size(4f64.powf(position).round() as u64),
            Self::Decades(_) if position < 0.0 => format!("{:.*}", (-position).round() as usize, 10f64.powf(position)),
            Self::Decades(_) => format!("{:.0}", 10f64.powf(position)),
            Self::Percent(_) => format!("{position:.0}"),
        }
    }

    /// The positions shown: all values and whole steps around them.
    fn span(self, positions: impl Iterator<Item = f64>) -> Range<f64> {
        if let Self::Percent(_) = self {
            return 0.0..100.0;
        }
        let (low, high) =
            positions.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        if low > high {
            return 0.0..1.0;
        }
        match self {
            // Sizes end where they end; the margin keeps markers off the frame.
            Self::Bytes(_) => {
                let margin = (high - low).max(1.0) * AXIS_MARGIN;
                low - margin..high + margin
            }
            _ => low.floor()..high.ceil().max(low.floor() + 1.0),
        }
    }
}

/// An axis in transformed coordinates, with its own ticks.
struct Ticked {
    range: RangedCoordf64,
    span: Range<f64>,
    axis: Axis,
}

impl Ticked {
    fn new(axis: Axis, span: Range<f64>) -> Self {
        Self { range: span.clone().into(), span, axis }
    }

    fn bold(&self) -> Vec<f64> {
        let step = if let Axis::Percent(_) = self.axis { 20.0 } else { 1.0 };
        let first = (self.span.start / step).ceil() as i64;
        let last = (self.span.end / step).floor() as i64;
        (first..=last).map(|tick| tick as f64 * step).collect()
    }

    /// The lines between decades: 2 to 9 of each.
    fn light(&self) -> Vec<f64> {
        let Axis::Decades(_) = self.axis else { return Vec::new() };
        let decades = self.span.start.floor() as i64..self.span.end.ceil() as i64;
        let between = decades.flat_map(|decade| (2..10).map(move |digit| decade as f64 + f64::from(digit).log10()));
        between.filter(|position| self.span.contains(position)).collect()
    }
}

impl ValueFormatter<f64> for Ticked {
    fn format_ext(&self, value: &f64) -> String {
        self.axis.label(*value)
    }
}

impl Ranged for Ticked {
    type FormatOption = plotters::coord::ranged1d::NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.range.map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        let mut points = self.bold();
        if hint.weight().allow_light_points() {
            points.extend(self.light());
        }
        points
    }

    fn range(&self) -> Range<f64> {
        self.span.clone()
    }
}

impl Figure {
    /// Writes the plot as SVG.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut svg = String::new();
        let root = SVGBackend::with_string(&mut svg, (extent(WIDTH), extent(HEIGHT))).into_drawing_area();
        self.draw(&root).and_then(|()| Ok(root.present()?)).with_context(|| format!("drawing {}", path.display()))?;
        drop(root);
        fs::write(path, in_pixels(&svg)).with_context(|| format!("cannot write {}", path.display()))
    }

    fn draw(&self, root: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>) -> Result<()> {
        root.fill(&WHITE)?;
        let (plot, legend) =
            root.titled(&self.title, (FONT, units(19)))?.split_horizontally(units(WIDTH - LEGEND_WIDTH));
        let series: Vec<(&Series, Vec<(f64, f64)>)> =
            self.series.iter().map(|series| (series, self.positions(series))).collect();
        let all = || series.iter().flat_map(|(_, points)| points.iter());
        let x = Ticked::new(self.x, self.x.span(all().map(|(x, _)| *x)));
        let y = Ticked::new(self.y, self.y.span(all().map(|(_, y)| *y)));
        let mut chart = ChartBuilder::on(&plot)
            .margin(units(10))
            .x_label_area_size(units(48))
            .y_label_area_size(units(64))
            .build_cartesian_2d(x, y)?;
        chart
            .configure_mesh()
            .x_desc(self.x.title())
            .y_desc(self.y.title())
            .axis_desc_style((FONT, units(15)))
            .label_style((FONT, units(13)))
            .set_all_tick_mark_size(units(5))
            .axis_style(BLACK.stroke_width(extent(1)))
            .bold_line_style(BLACK.mix(0.14).stroke_width(extent(1)))
            .light_line_style(BLACK.mix(0.05).stroke_width(extent(1)))
            .draw()?;
        for (series, points) in &series {
            if series.style == Style::Floor {
                chart.draw_series(DashedLineSeries::new(
                    points.iter().copied(),
                    units(6),
                    units(4),
                    series.style.stroke(),
                ))?;
                continue;
            }
            chart.draw_series(LineSeries::new(points.iter().copied(), series.style.stroke()))?;
            if points.len() <= MARKED_POINTS_MAX {
                let markers = points.iter().map(|point| Circle::new(*point, units(3), series.style.color().filled()));
                chart.draw_series(markers)?;
            }
        }
        self.draw_legend(&legend)
    }

    fn positions(&self, series: &Series) -> Vec<(f64, f64)> {
        series.points.iter().filter_map(|(x, y)| Some((self.x.position(*x)?, self.y.position(*y)?))).collect()
    }

    fn draw_legend(&self, area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>) -> Result<()> {
        for (index, series) in self.series.iter().enumerate() {
            let y = units(60 + 26 * i32::try_from(index)?);
            let stroke = |from, to| PathElement::new(vec![(units(from), y), (units(to), y)], series.style.stroke());
            let strokes: &[(i32, i32)] =
                if series.style == Style::Floor { &[(4, 10), (14, 20), (24, 30)] } else { &[(4, 30)] };
            strokes.iter().try_for_each(|(from, to)| area.draw(&stroke(*from, *to)))?;
            let missing = if series.points.is_empty() { " (no figures)" } else { "" };
            area.draw(&Text::new(format!("{}{missing}", series.title), (units(38), y - units(7)), (FONT, units(14))))?;
        }
        Ok(())
    }
}

/// The drawing at its size in pixels: the view box keeps the finer units.
fn in_pixels(svg: &str) -> String {
    let drawn = format!("width=\"{}\" height=\"{}\"", extent(WIDTH), extent(HEIGHT));
    svg.replacen(&drawn, &format!("width=\"{WIDTH}\" height=\"{HEIGHT}\""), 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_what_a_reader_expects() {
        assert_eq!(Axis::Bytes("").label(3.0), "64 B");
        assert_eq!(Axis::Bytes("").label(5.0), "1 KiB");
        assert_eq!(Axis::Decades("").label(-2.0), "0.01");
        assert_eq!(Axis::Decades("").label(3.0), "1000");
        assert_eq!(Axis::Percent("").label(40.0), "40");
    }

    #[test]
    fn what_a_logarithm_cannot_show_is_left_out() {
        assert_eq!(Axis::Decades("").position(0.0), None);
        assert_eq!(Axis::Decades("").position(-1.0), None);
        assert_eq!(Axis::Decades("").position(100.0), Some(2.0));
    }

    #[test]
    fn spans_cover_the_values_and_are_never_empty() {
        assert_eq!(Axis::Decades("").span([0.3, 1.7].into_iter()), 0.0..2.0);
        assert_eq!(Axis::Decades("").span([1.0].into_iter()), 1.0..2.0);
        assert_eq!(Axis::Decades("").span([].into_iter()), 0.0..1.0);
        let bytes = Axis::Bytes("").span([0.0, 10.0].into_iter());
        assert!(bytes.start < 0.0 && bytes.end > 10.0);
    }

    #[test]
    fn ticks_lie_inside_the_span() {
        let axis = Ticked::new(Axis::Decades(""), -1.0..2.0);
        assert_eq!(axis.bold(), [-1.0, 0.0, 1.0, 2.0]);
        assert_eq!(axis.light().len(), 24);
        assert!(axis.light().iter().all(|tick| (-1.0..2.0).contains(tick)));
    }

    #[test]
    fn a_series_without_points_is_shown_as_missing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("figure.svg");
        let series = |title: &str, points| Series { title: title.to_owned(), style: Style::Green, points };
        let series = vec![series("with", vec![(1.0, 2.0), (8.0, 3.0)]), series("without", Vec::new())];
        let figure = Figure { title: "a title".into(), x: Axis::Bytes("size"), y: Axis::Decades("time"), series };
        figure.write(&path).unwrap();
        let svg = std::fs::read_to_string(path).unwrap();
        assert!(svg.contains(&format!("width=\"{WIDTH}\"")) && svg.contains("viewBox=\"0 0 6880 3680\""), "{svg}");
        assert!(svg.contains("without (no figures)") && svg.contains("a title") && !svg.contains("with (no figures)"));
    }
}
