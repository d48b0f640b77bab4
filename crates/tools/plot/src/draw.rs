//! Drawing of plots with the SVG backend of plotters.

use anyhow::Result;
use plotters::coord::Shift;
use plotters::coord::ranged1d::Ranged;
use plotters::prelude::*;

use crate::axis::Ticked;
use crate::overlap::{Overlap, overlaps};
use crate::style::{Line, Marker, Style};
use crate::{Figure, Series};

/// Drawing units per pixel. The backend rounds to whole units; with this many, curves stay smooth.
const UNITS_PER_PIXEL: i32 = 8;
const PLOT_WIDTH: i32 = 660;
const HEIGHT: i32 = 460;
const LEGEND_WIDTH_MIN: i32 = 200;
/// Distance from the left edge of the legend to its text, and from the text to the right edge of the image.
const LEGEND_TEXT: i32 = 40;
/// Approximate width of a letter of the legend's font.
const LEGEND_LETTER_WIDTH: f64 = 7.6;
const LEGEND_ROW: i32 = 26;
const LEGEND_TOP: i32 = 60;
const FONT: &str = "Helvetica, Arial, sans-serif";
/// Maximum number of points of a series that gets markers; more would hide the line.
const MARKED_POINTS_MAX: usize = 48;
const MARKER_RADIUS: i32 = 3;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const fn units(pixels: i32) -> i32 {
    pixels * UNITS_PER_PIXEL
}

const fn extent(pixels: i32) -> u32 {
    units(pixels).unsigned_abs()
}

impl Style {
    /// Returns the style for a series that lies on an earlier one: the line shows through the gaps of the dashes.
    fn above(self, overlap: Overlap) -> Self {
        match (overlap, self.line) {
            (Overlap::Partly | Overlap::Everywhere(_), Line::Solid) => Self { line: Line::Dashed, ..self },
            _ => self,
        }
    }

    fn stroke(self) -> ShapeStyle {
        self.color.rgb().stroke_width(extent(if self.wide { 3 } else { 2 }))
    }
}

impl Figure {
    /// Returns the plot as the text of an SVG file.
    ///
    /// # Errors
    /// Errors of the drawing library.
    pub fn svg(&self) -> Result<String> {
        let (width, height) = (PLOT_WIDTH + self.legend_width(), HEIGHT.max(self.legend_height()));
        let mut svg = String::new();
        let root = SVGBackend::with_string(&mut svg, (extent(width), extent(height))).into_drawing_area();
        self.draw(&root)?;
        root.present()?;
        drop(root);
        // The size is given in pixels; the view box keeps the finer units.
        let drawn = format!("width=\"{}\" height=\"{}\"", extent(width), extent(height));
        Ok(svg.replacen(&drawn, &format!("width=\"{width}\" height=\"{height}\""), 1))
    }

    /// Returns the title of a series in the legend, with what the plot alone does not tell.
    fn legend_title(&self, series: &Series, overlap: Overlap) -> String {
        match overlap {
            _ if series.points.is_empty() => format!("{} (no figures)", series.title),
            Overlap::Everywhere(below) => format!("{} (same as {})", series.title, self.series[below].title),
            Overlap::None | Overlap::Partly => series.title.clone(),
        }
    }

    fn legend_width(&self) -> i32 {
        let positions: Vec<Vec<(f64, f64)>> = self.series.iter().map(|series| self.positions(series)).collect();
        let y = self.y.span(positions.iter().flatten().map(|(_, y)| *y));
        let overlaps = overlaps(&positions, y.end - y.start);
        let titles = self.series.iter().zip(overlaps).map(|(series, overlap)| self.legend_title(series, overlap));
        let letters = titles.map(|title| title.chars().count()).max().unwrap_or(0);
        let text = (letters as f64 * LEGEND_LETTER_WIDTH).ceil() as i32;
        (LEGEND_TEXT + text).max(LEGEND_WIDTH_MIN)
    }

    fn legend_height(&self) -> i32 {
        LEGEND_TOP + LEGEND_ROW * (i32::try_from(self.series.len()).unwrap_or(i32::MAX / LEGEND_ROW / 2) + 1)
    }

    fn draw(&self, root: &Area<'_>) -> Result<()> {
        root.fill(&WHITE)?;
        let mut below = root.margin(units(6), 0, 0, 0);
        for (index, line) in self.title.lines().enumerate() {
            below = below.titled(line, (FONT, units(if index == 0 { 19 } else { 14 })))?;
        }
        let (plot, legend) = below.split_horizontally(units(PLOT_WIDTH));
        let positions: Vec<Vec<(f64, f64)>> = self.series.iter().map(|series| self.positions(series)).collect();
        let bars: Vec<Vec<(f64, f64, f64)>> = self.series.iter().map(|series| self.bars(series)).collect();
        let all = || positions.iter().flatten();
        let ends = || bars.iter().flatten().flat_map(|(_, low, high)| [*low, *high]);
        let x = Ticked::new(self.x, self.x.span(all().map(|(x, _)| *x)));
        let y = Ticked::new(self.y, self.y.span(all().map(|(_, y)| *y).chain(ends())));
        let height = y.range().end - y.range().start;
        let overlaps = overlaps(&positions, height);
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
        for (((series, points), bars), overlap) in self.series.iter().zip(&positions).zip(&bars).zip(&overlaps) {
            let style = series.style.above(*overlap);
            for (x, low, high) in bars {
                let bar =
                    PathElement::new(vec![(*x, *low), (*x, *high)], style.color.rgb().mix(0.6).stroke_width(extent(1)));
                chart.draw_series(std::iter::once(bar))?;
            }
            match style.line {
                Line::None => {}
                Line::Solid => {
                    chart.draw_series(LineSeries::new(points.iter().copied(), style.stroke()))?;
                }
                Line::Dashed => {
                    let dashes = DashedLineSeries::new(points.iter().copied(), units(6), units(4), style.stroke());
                    chart.draw_series(dashes)?;
                }
            }
            if style.line == Line::None || points.len() <= MARKED_POINTS_MAX {
                let on_frame = points.iter().map(|point| chart.backend_coord(point));
                // Backend coordinates are those of the whole image, so the root draws them.
                on_frame.map(|at| (at.0, at.1)).try_for_each(|at| mark(root, at, style))?;
            }
        }
        self.draw_legend(&legend, &overlaps)
    }

    fn positions(&self, series: &Series) -> Vec<(f64, f64)> {
        series.points.iter().filter_map(|(x, y)| Some((self.x.position(*x)?, self.y.position(*y)?))).collect()
    }

    /// Returns the bars of the spread of a series as positions.
    fn bars(&self, series: &Series) -> Vec<(f64, f64, f64)> {
        let bar = |(x, low, high): &(f64, f64, f64)| {
            Some((self.x.position(*x)?, self.y.position(*low)?, self.y.position(*high)?))
        };
        series.spread.iter().filter_map(bar).collect()
    }

    fn draw_legend(&self, area: &Area<'_>, overlaps: &[Overlap]) -> Result<()> {
        for (index, (series, overlap)) in self.series.iter().zip(overlaps).enumerate() {
            let y = units(LEGEND_TOP + LEGEND_ROW * i32::try_from(index)?);
            let style = series.style.above(*overlap);
            let stroke = |from, to| PathElement::new(vec![(units(from), y), (units(to), y)], style.stroke());
            let strokes: &[(i32, i32)] = match style.line {
                Line::None => &[],
                Line::Solid => &[(4, 30)],
                Line::Dashed => &[(4, 10), (14, 20), (24, 30)],
            };
            strokes.iter().try_for_each(|(from, to)| area.draw(&stroke(*from, *to)))?;
            if series.style.line == Line::None || series.points.len() <= MARKED_POINTS_MAX {
                mark(area, (units(17), y), series.style)?;
            }
            let title = self.legend_title(series, *overlap);
            area.draw(&Text::new(title, (units(LEGEND_TEXT), y - units(7)), (FONT, units(14))))?;
        }
        Ok(())
    }
}

/// Draws the marker of a style at a point of the image.
fn mark(area: &Area<'_>, (x, y): (i32, i32), style: Style) -> Result<()> {
    let (radius, fill) = (units(MARKER_RADIUS), style.color.rgb().filled());
    match style.marker {
        Marker::None => {}
        Marker::Circle => area.draw(&Circle::new((x, y), radius, fill))?,
        Marker::Square => {
            area.draw(&Rectangle::new([(x - radius, y - radius), (x + radius, y + radius)], fill))?;
        }
        Marker::Triangle => area.draw(&TriangleMarker::new((x, y), radius * 3 / 2, fill))?,
        Marker::Cross => area.draw(&plotters::element::Cross::new((x, y), radius, style.stroke()))?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Axis, Color};

    fn figure(series: Vec<Series>) -> Figure {
        Figure { title: "a title".into(), x: Axis::Bytes("size"), y: Axis::Decades("time"), series }
    }

    fn series(title: &str, points: Vec<(f64, f64)>) -> Series {
        Series::new(title, Style::line(Color::Green), points)
    }

    #[test]
    fn a_series_without_points_is_shown_as_missing() {
        let svg = figure(vec![series("with", vec![(1.0, 2.0), (8.0, 3.0)]), series("without", Vec::new())]);
        let svg = svg.svg().unwrap();
        assert!(svg.contains("width=\"860\"") && svg.contains("viewBox=\"0 0 6880 3680\""), "{svg}");
        assert!(svg.contains("without (no figures)") && svg.contains("a title") && !svg.contains("with (no figures)"));
    }

    #[test]
    fn the_image_grows_with_the_legend() {
        let long = "a title that is longer than the minimum width";
        let svg = figure((0..40).map(|_| series(long, Vec::new())).collect()).svg().unwrap();
        assert!(!svg.contains("width=\"860\"") && !svg.contains("height=\"460\""), "{svg}");
    }

    #[test]
    fn a_series_that_lies_on_another_is_dashed_and_said_to() {
        let one = series("one", vec![(4.0, 10.0), (16.0, 20.0)]);
        let two = Series::new("two", Style::line(Color::Blue), one.points.clone());
        let svg = figure(vec![one, two]).svg().unwrap();
        assert!(svg.contains("two (same as one)"), "{svg}");
        let strokes =
            |color: &str| svg.lines().filter(|line| line.contains("polyline") && line.contains(color)).count();
        assert!(strokes("#0072B2") > 10 * strokes("#009E73"), "dashes on a line");
    }

    #[test]
    fn spread_is_drawn_and_shown_whole() {
        let without = figure(vec![series("one", vec![(4.0, 10.0), (16.0, 10.0)])]);
        let bars = series("one", vec![(4.0, 10.0), (16.0, 10.0)]).with_spread(vec![(4.0, 1.0, 1000.0)]);
        let with = figure(vec![bars]);
        let (with, without) = (with.svg().unwrap(), without.svg().unwrap());
        let has_label = |svg: &str| svg.lines().any(|line| line.trim() == "1000");
        assert!(has_label(&with) && !has_label(&without), "the axis covers the bars");
        let bars = |svg: &str| svg.matches("opacity=\"0.6\"").count();
        assert_eq!((bars(&with), bars(&without)), (1, 0));
    }

    #[test]
    fn markers_lie_on_their_points() {
        let svg = figure(vec![series("one", vec![(4.0, 10.0), (16.0, 10.0)])]).svg().unwrap();
        let line = svg.lines().find(|line| line.contains("polyline") && line.contains("#009E73")).unwrap();
        let start = line.split("points=\"").nth(1).unwrap().split(' ').next().unwrap();
        let (x, y) = start.split_once(',').unwrap();
        assert!(svg.contains(&format!("<circle cx=\"{x}\" cy=\"{y}\"")), "{start} in {svg}");
    }
}
