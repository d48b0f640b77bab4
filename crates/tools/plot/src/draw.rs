//! Drawing of plots with the SVG backend of plotters.

use std::ops::Range;

use anyhow::Result;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::axis::{self, Ticked};
use crate::overlap::{Overlap, overlaps};
use crate::style::{Line, Marker, Style};
use crate::{Figure, Series};

/// Drawing units per pixel. The backend rounds to whole units; with this many, curves stay smooth.
const UNITS_PER_PIXEL: i32 = 8;
/// Width of the image. In a column of 3.3 inches a pixel of it is half a point, so no font is below 12 pixels.
const WIDTH: i32 = 460;
const CHART_HEIGHT: i32 = 310;
const MARGIN: i32 = 8;
/// Space to the right of the frame for half of the last label.
const MARGIN_RIGHT: i32 = 26;
const X_LABELS: i32 = 44;
const Y_LABELS: i32 = 68;
const FONT: &str = "Helvetica, Arial, sans-serif";
const TITLE_FONT: i32 = 15;
const AXIS_FONT: i32 = 14;
const LABEL_FONT: i32 = 13;
const LEGEND_FONT: i32 = 13;
/// Font of the lines below the title and below the legend.
const NOTE_FONT: i32 = 12;
/// By what the backend divides the size of a font.
const BACKEND_LINE_HEIGHT: f64 = 1.24;
/// Width of a letter as a share of the height of its font, rounded up.
const LETTER_WIDTH: f64 = 0.61;
/// Distance from the left edge of a legend's column to its text.
const LEGEND_TEXT: i32 = 40;
/// Fewest series for which the legend has two columns, if its titles are short.
const TWO_COLUMNS_MIN: usize = 3;
/// Maximum number of points of a series that all get markers; of more, some get one.
const MARKED_POINTS_MAX: usize = 24;
/// Distance of markers along the line of a series with more points.
const MARKER_DISTANCE: f64 = 70.0;
const MARKER_RADIUS: i32 = 3;
/// Radius of an outline, which encloses the marker of another series.
const OUTLINE_RADIUS: i32 = 5;
/// Horizontal distance of the bars of two series at one point.
const BAR_DISTANCE: i32 = 2;
/// Lengths of dashes and gaps. The series of a plot take turns, so that one dashed line shows through another.
const DASHES: [(i32, i32); 3] = [(6, 4), (2, 3), (11, 3)];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<Ticked, Ticked>>;

const fn units(pixels: i32) -> i32 {
    pixels * UNITS_PER_PIXEL
}

const fn extent(pixels: i32) -> u32 {
    units(pixels).unsigned_abs()
}

/// Returns a font whose letters are this many pixels high. The backend takes the height of a line for that of the font.
fn font_of(pixels: i32) -> (&'static str, f64) {
    (FONT, f64::from(units(pixels)) * BACKEND_LINE_HEIGHT)
}

/// Returns the distance of two lines of text.
const fn line_height(font: i32) -> i32 {
    font * 5 / 4
}

/// Returns how many letters of a font have room.
fn letters_in(pixels: i32, font: i32) -> usize {
    (f64::from(pixels) / f64::from(font) / LETTER_WIDTH) as usize
}

/// Breaks a text into lines of at most `letters`, between words where that is possible.
fn wrapped(text: &str, letters: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let word: Vec<char> = word.chars().collect();
        for piece in word.chunks(letters.max(1)) {
            let length = |line: &String| line.chars().count();
            let Some(last) = lines.last_mut() else { continue };
            if !last.is_empty() && length(last) + 1 + piece.len() > letters {
                lines.push(piece.iter().collect());
                continue;
            }
            if !last.is_empty() {
                last.push(' ');
            }
            last.extend(piece);
        }
    }
    lines
}

/// A series with what its place in the plot requires.
struct Drawn<'a> {
    series: &'a Series,
    /// Positions of its points on the axes, in runs between points that the axes cannot show.
    runs: Vec<Vec<(f64, f64)>>,
    bars: Vec<Bar>,
    style: Style,
    dashes: (i32, i32),
    /// Title in the legend, with what the plot alone does not tell, in lines.
    legend: Vec<String>,
}

impl Drawn<'_> {
    fn points(&self) -> impl Iterator<Item = (f64, f64)> {
        self.runs.iter().flatten().copied()
    }
}

/// The arrangement of the legend.
#[derive(Clone, Copy)]
struct Columns {
    count: usize,
    letters: usize,
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
        let title = self.title_lines();
        let title_height = MARGIN + title.iter().map(|(_, font)| line_height(*font)).sum::<i32>();
        let notes: Vec<String> =
            self.notes.iter().flat_map(|note| wrapped(note, letters_in(WIDTH - 2 * MARGIN, NOTE_FONT))).collect();
        let notes_height = i32::try_from(notes.len())? * line_height(NOTE_FONT);
        let columns = self.columns();
        let (x, y) = self.spans();
        let drawn = self.drawn(columns, y.end - y.start);
        let legend_top = title_height + CHART_HEIGHT + MARGIN / 2;
        let notes_top = legend_top + legend_height(&drawn, columns) + MARGIN / 2;
        let height = notes_top + notes_height + MARGIN;
        let mut svg = String::new();
        let root = SVGBackend::with_string(&mut svg, (extent(WIDTH), extent(height))).into_drawing_area();
        root.fill(&WHITE)?;
        let mut top = MARGIN;
        for (line, font) in title {
            let style = font_of(font).into_text_style(&root).pos(Pos::new(HPos::Center, VPos::Top));
            root.draw(&Text::new(line, (units(WIDTH / 2), units(top)), style))?;
            top += line_height(font);
        }
        self.draw_chart(&root, title_height, (x, y), &drawn)?;
        draw_legend(&root, legend_top, columns, &drawn)?;
        for (index, note) in notes.into_iter().enumerate() {
            let at = (units(MARGIN), units(notes_top + line_height(NOTE_FONT) * i32::try_from(index)?));
            root.draw(&Text::new(note, at, font_of(NOTE_FONT)))?;
        }
        root.present()?;
        drop(root);
        // The size is given in pixels; the view box keeps the finer units.
        let drawn = format!("width=\"{}\" height=\"{}\"", extent(WIDTH), extent(height));
        Ok(svg.replacen(&drawn, &format!("width=\"{WIDTH}\" height=\"{height}\""), 1))
    }

    /// Returns the lines of the title with the font of each.
    fn title_lines(&self) -> Vec<(String, i32)> {
        let font = |index: usize| if index == 0 { TITLE_FONT } else { NOTE_FONT };
        let lines = self.title.lines().enumerate();
        lines
            .flat_map(|(index, line)| {
                let font = font(index);
                wrapped(line, letters_in(WIDTH - 2 * MARGIN, font)).into_iter().map(move |line| (line, font))
            })
            .collect()
    }

    /// Returns the spans of both axes, which contain all points and bars.
    fn spans(&self) -> (Range<f64>, Range<f64>) {
        let points = || self.series.iter().flat_map(|series| self.runs(series)).flatten();
        let bars = || self.series.iter().flat_map(|series| self.bars(series));
        let x = self.x.span(points().map(|(x, _)| x).chain(bars().map(|bar| bar.x)));
        let ends = bars().flat_map(|bar| [bar.low, bar.high]);
        (x, self.y.span(points().map(|(_, y)| y).chain(ends)))
    }

    fn columns(&self) -> Columns {
        let count = |columns: usize| Columns {
            count: columns,
            letters: letters_in(WIDTH / columns as i32 - LEGEND_TEXT - MARGIN, LEGEND_FONT),
        };
        let two = count(2);
        let are_short = self.series.iter().all(|series| series.title.chars().count() <= two.letters);
        if are_short && self.series.len() >= TWO_COLUMNS_MIN { two } else { count(1) }
    }

    /// Returns the series as they are drawn, one above the other.
    fn drawn(&self, columns: Columns, height: f64) -> Vec<Drawn<'_>> {
        let runs: Vec<_> = self.series.iter().map(|series| self.runs(series)).collect();
        let positions: Vec<Vec<(f64, f64)>> = runs.iter().map(|runs| runs.concat()).collect();
        let overlaps = overlaps(&positions, height);
        let mut dashed = 0;
        let mut all = Vec::new();
        for ((series, runs), overlap) in self.series.iter().zip(runs).zip(overlaps) {
            let style = series.style.above(overlap);
            let dashes = DASHES[dashed % DASHES.len()];
            dashed += usize::from(style.line == Line::Dashed);
            let shown: usize = runs.iter().map(Vec::len).sum();
            let legend = wrapped(&self.legend_title(series, shown, overlap), columns.letters);
            all.push(Drawn { series, runs, bars: self.bars(series), style, dashes, legend });
        }
        all
    }

    /// Returns the title of a series in the legend, with what the plot alone does not tell.
    fn legend_title(&self, series: &Series, shown: usize, overlap: Overlap) -> String {
        let (title, count) = (&series.title, series.points.len());
        match overlap {
            _ if count == 0 => format!("{title} (no figures)"),
            _ if shown < count => format!("{title} ({} of {count} points are not on the axes)", count - shown),
            Overlap::Everywhere(below) => format!("{title} (same as {})", self.series[below].title),
            Overlap::None | Overlap::Partly => title.clone(),
        }
    }

    fn draw_chart(
        &self,
        root: &Area<'_>,
        top: i32,
        (x, y): (Range<f64>, Range<f64>),
        drawn: &[Drawn<'_>],
    ) -> Result<()> {
        let area = root.split_vertically(units(top)).1.split_vertically(units(CHART_HEIGHT)).0;
        let (width, height) = (WIDTH - MARGIN - MARGIN_RIGHT - Y_LABELS, CHART_HEIGHT - 2 * MARGIN - X_LABELS);
        let titles = (self.x.title(&x), self.y.title(&y));
        // A long title gets a smaller font instead of leaving the image.
        let longest = (titles.0.chars().count() * 2 / 3).max(titles.1.chars().count());
        let font = (f64::from(CHART_HEIGHT) / LETTER_WIDTH / longest.max(1) as f64) as i32;
        let x = Ticked::new(self.x, x, axis::Extent::Horizontal(f64::from(width)));
        let y = Ticked::new(self.y, y, axis::Extent::Vertical(f64::from(height)));
        let mut chart = ChartBuilder::on(&area)
            .margin(units(MARGIN))
            .margin_right(units(MARGIN_RIGHT))
            .x_label_area_size(units(X_LABELS))
            .y_label_area_size(units(Y_LABELS))
            .build_cartesian_2d(x, y)?;
        chart
            .configure_mesh()
            .x_desc(titles.0)
            .y_desc(titles.1)
            .axis_desc_style(font_of(font.clamp(NOTE_FONT, AXIS_FONT)))
            .label_style(font_of(LABEL_FONT))
            .set_all_tick_mark_size(units(5))
            .axis_style(BLACK.stroke_width(extent(1)))
            .bold_line_style(BLACK.mix(0.14).stroke_width(extent(1)))
            .light_line_style(BLACK.mix(0.05).stroke_width(extent(1)))
            .draw()?;
        for (index, one) in drawn.iter().enumerate() {
            draw_bars(root, &chart, one, units(BAR_DISTANCE) * (2 * index as i32 + 1 - drawn.len() as i32) / 2)?;
            draw_series(root, &mut chart, index, one)?;
        }
        Ok(())
    }

    /// Returns the positions of a series on the axes, in runs between points that the axes cannot show: a line across
    /// such a point would show a value that nobody found.
    fn runs(&self, series: &Series) -> Vec<Vec<(f64, f64)>> {
        let position = |(x, y): &(f64, f64)| Some((self.x.position(*x)?, self.y.position(*y)?));
        let positions: Vec<Option<(f64, f64)>> = series.points.iter().map(position).collect();
        let runs = positions.split(Option::is_none).filter(|run| !run.is_empty());
        runs.map(|run| run.iter().flatten().copied().collect()).collect()
    }

    /// Returns the bars of the spread of a series as positions. A bar without its point would be the range of a figure
    /// that the plot does not show.
    fn bars(&self, series: &Series) -> Vec<Bar> {
        let bar = |(x, low, high): &(f64, f64, f64)| {
            let (_, y) = series.points.iter().find(|point| point.0 == *x)?;
            let [low, y, high] = [low, y, high].map(|value| self.y.position(*value));
            Some(Bar { x: self.x.position(*x)?, low: low?, point: y?, high: high? })
        };
        series.spread.iter().filter_map(bar).collect()
    }
}

/// A bar of the spread of a series, as positions.
#[derive(Clone, Copy)]
struct Bar {
    x: f64,
    low: f64,
    /// The figure whose range this is.
    point: f64,
    high: f64,
}

/// Draws the spread of a series, `shift` units to the right of its points, so that bars of several series do not hide
/// one another. A tick on each bar is at its point.
fn draw_bars(root: &Area<'_>, chart: &Chart<'_, '_>, one: &Drawn<'_>, shift: i32) -> Result<()> {
    let stroke = one.style.color.rgb().mix(0.6).stroke_width(extent(1));
    for Bar { x, low, point, high } in &one.bars {
        let [low, (at, y), high] = [low, point, high].map(|y| chart.backend_coord(&(*x, *y)));
        let bar = [low, high].map(|(x, y)| (x + shift, y));
        let tick = [-1, 1].map(|side| (at + shift + side * units(BAR_DISTANCE) / 2, y));
        for line in [bar, tick] {
            root.draw(&PathElement::new(line.to_vec(), stroke))?;
        }
    }
    Ok(())
}

fn draw_series(root: &Area<'_>, chart: &mut Chart<'_, '_>, index: usize, one: &Drawn<'_>) -> Result<()> {
    let (style, (dash, gap)) = (one.style, one.dashes);
    for run in &one.runs {
        let points = run.iter().copied();
        match style.line {
            Line::None => {}
            Line::Solid => {
                chart.draw_series(LineSeries::new(points, style.stroke()))?;
            }
            Line::Dashed => {
                chart.draw_series(DashedLineSeries::new(points, units(dash), units(gap), style.stroke()))?;
            }
        }
        // Backend coordinates are those of the whole image, so the root draws them.
        let on_image: Vec<(i32, i32)> = run.iter().map(|point| chart.backend_coord(point)).collect();
        if let ([only], Marker::None) = (&on_image[..], style.marker) {
            // A line of one point has no length.
            mark(root, *only, Style { marker: Marker::Circle, ..style })?;
        }
        let is_sparse = style.line != Line::None && one.points().count() > MARKED_POINTS_MAX;
        let marked = if is_sparse { spaced(&on_image, index) } else { on_image };
        marked.into_iter().try_for_each(|at| mark(root, at, style))?;
    }
    Ok(())
}

/// Returns points at even distances along a line. Those of another series begin elsewhere, so that the markers of two
/// neighbouring lines do not hide one another.
fn spaced(points: &[(i32, i32)], index: usize) -> Vec<(i32, i32)> {
    let distance = MARKER_DISTANCE * f64::from(UNITS_PER_PIXEL);
    let mut left = distance * ((index as f64 * 0.37).fract() + 0.2);
    let mut found = Vec::new();
    for pair in points.windows(2) {
        let (dx, dy) = (f64::from(pair[1].0 - pair[0].0), f64::from(pair[1].1 - pair[0].1));
        let length = (dx * dx + dy * dy).sqrt();
        let mut along = left;
        while along <= length && length > 0.0 {
            let share = along / length;
            found.push((pair[0].0 + (dx * share) as i32, pair[0].1 + (dy * share) as i32));
            along += distance;
        }
        left = along - length;
    }
    found
}

/// Returns the rows of the legend, each with the series in it.
fn legend_rows<'a, 'b>(drawn: &'a [Drawn<'b>], columns: Columns) -> impl Iterator<Item = (&'a [Drawn<'b>], i32)> {
    drawn.chunks(columns.count).map(|row| {
        let lines = row.iter().map(|one| one.legend.len()).max().unwrap_or(1);
        (row, line_height(LEGEND_FONT) * i32::try_from(lines).unwrap_or(1) + 2)
    })
}

fn legend_height(drawn: &[Drawn<'_>], columns: Columns) -> i32 {
    legend_rows(drawn, columns).map(|(_, height)| height).sum()
}

fn draw_legend(root: &Area<'_>, mut top: i32, columns: Columns, drawn: &[Drawn<'_>]) -> Result<()> {
    for (row, height) in legend_rows(drawn, columns) {
        for (column, one) in row.iter().enumerate() {
            let left = MARGIN + WIDTH / columns.count as i32 * i32::try_from(column)?;
            let y = units(top + line_height(LEGEND_FONT) / 2);
            let stroke = |from: i32, to: i32| {
                PathElement::new(vec![(units(left + from), y), (units(left + to), y)], one.style.stroke())
            };
            let (dash, gap) = one.dashes;
            match one.style.line {
                Line::None => {}
                Line::Solid => root.draw(&stroke(0, 32))?,
                Line::Dashed => {
                    let starts = (0..32).step_by((dash + gap).unsigned_abs() as usize);
                    starts.map(|from| stroke(from, (from + dash).min(32))).try_for_each(|dash| root.draw(&dash))?;
                }
            }
            mark(root, (units(left + 16), y), one.series.style)?;
            for (index, line) in one.legend.iter().enumerate() {
                let y = units(top + line_height(LEGEND_FONT) * i32::try_from(index)? + 1);
                root.draw(&Text::new(line.clone(), (units(left + LEGEND_TEXT), y), font_of(LEGEND_FONT)))?;
            }
        }
        top += height;
    }
    Ok(())
}

/// Draws the marker of a style at a point of the image.
fn mark(area: &Area<'_>, (x, y): (i32, i32), style: Style) -> Result<()> {
    let (radius, fill) = (units(MARKER_RADIUS), style.color.rgb().filled());
    let (outer, outline) = (units(OUTLINE_RADIUS), style.color.rgb().stroke_width(extent(1) * 3 / 2));
    let path = |points: Vec<(i32, i32)>| area.draw(&PathElement::new(points, outline));
    match style.marker {
        Marker::None => {}
        Marker::Circle => area.draw(&Circle::new((x, y), radius, fill))?,
        Marker::Square => {
            area.draw(&Rectangle::new([(x - radius, y - radius), (x + radius, y + radius)], fill))?;
        }
        Marker::Triangle => area.draw(&TriangleMarker::new((x, y), radius * 3 / 2, fill))?,
        Marker::Cross => area.draw(&plotters::element::Cross::new((x, y), radius, style.stroke()))?,
        Marker::OpenCircle => area.draw(&Circle::new((x, y), outer, outline))?,
        Marker::OpenSquare => {
            // The backend draws rectangles with the thinnest of lines.
            let (left, right, top, bottom) = (x - outer, x + outer, y - outer, y + outer);
            path(vec![(left, top), (right, top), (right, bottom), (left, bottom), (left, top), (right, top)])?;
        }
        Marker::OpenTriangle => {
            let (left, right, top) = ((x - outer, y + outer * 2 / 3), (x + outer, y + outer * 2 / 3), (x, y - outer));
            path(vec![left, right, top, left, right])?;
        }
        Marker::Plus => {
            path(vec![(x - outer, y), (x + outer, y)])?;
            path(vec![(x, y - outer), (x, y + outer)])?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Axis, Color};

    fn figure(series: Vec<Series>) -> Figure {
        let notes = Vec::new();
        Figure { title: "a title".into(), x: Axis::Bytes("size"), y: Axis::Decades("time"), series, notes }
    }

    fn series(title: &str, points: Vec<(f64, f64)>) -> Series {
        Series::new(title, Style { marker: Marker::Circle, ..Style::line(Color::Green) }, points)
    }

    #[test]
    fn a_series_without_points_is_shown_as_missing() {
        let svg = figure(vec![series("with", vec![(1.0, 2.0), (8.0, 3.0)]), series("without", Vec::new())]);
        let svg = svg.svg().unwrap();
        assert!(svg.contains("width=\"460\"") && svg.contains("viewBox=\"0 0 3680 "), "{svg}");
        assert!(svg.contains("without (no figures)") && svg.contains("a title") && !svg.contains("with (no figures)"));
    }

    /// Returns the height of an image in pixels.
    fn height(svg: &str) -> i32 {
        let text = svg.split("height=\"").nth(1).and_then(|rest| rest.split('"').next());
        text.unwrap().parse().unwrap()
    }

    /// Returns the lines of text of an image, from the top.
    fn texts(svg: &str) -> Vec<&str> {
        svg.split("</text>").filter_map(|part| part.rsplit('\n').nth(1)).collect()
    }

    #[test]
    fn text_is_readable_in_a_column_of_a_paper() {
        let svg = figure(vec![series("one", vec![(1.0, 2.0), (8.0, 3.0)])]);
        let svg = Figure { notes: vec!["a note".into()], ..svg }.svg().unwrap();
        // 3.3 inches are 237.6 points; the sizes are in the units of the view box.
        let points_per_unit = 237.6 / f64::from(units(WIDTH));
        let sizes = svg.split("font-size=\"").skip(1).map(|rest| rest.split('"').next().unwrap());
        let sizes: Vec<f64> = sizes.map(|size| size.parse::<f64>().unwrap() * points_per_unit).collect();
        assert!(sizes.len() > 8 && sizes.iter().all(|points| (6.0..9.0).contains(points)), "{sizes:?}");
    }

    #[test]
    fn long_texts_are_wrapped_and_the_image_grows() {
        let long = "a title that is longer than a line of the legend, and goes on for quite some time";
        let one = figure(vec![series("short", vec![(1.0, 2.0)])]).svg().unwrap();
        let mut figure = figure((0..8).map(|_| series(long, vec![(1.0, 2.0)])).collect());
        figure.notes.push("https://example.org/".to_owned() + &"x".repeat(100));
        figure.title = format!("{long}\n{long}");
        let many = figure.svg().unwrap();
        assert!(many.contains("width=\"460\"") && height(&many) > height(&one) + 250, "{}", height(&many));
        let longest = texts(&many).into_iter().map(|line| line.chars().count()).max().unwrap();
        assert!((50..=64).contains(&longest), "{longest}");
        assert!(wrapped("", 10) == [""] && wrapped("ab  cdefg", 4) == ["ab", "cdef", "g"]);
    }

    #[test]
    fn short_titles_stand_in_two_columns() {
        let height_of = |title: &str| {
            let all = (0..6).map(|index| series(&format!("{title} {index}"), vec![(1.0, f64::from(index + 1))]));
            height(&figure(all.collect()).svg().unwrap())
        };
        assert!(height_of("a title of more than thirty letters") > height_of("short") + 40);
    }

    #[test]
    fn points_that_an_axis_cannot_show_interrupt_the_line_and_are_counted() {
        let points = vec![(1.0, 5.0), (2.0, 6.0), (4.0, 0.0), (8.0, f64::NAN), (16.0, 6.0), (32.0, 5.0)];
        let svg = figure(vec![series("with zeros", points)]).svg().unwrap();
        assert!(texts(&svg).contains(&"with zeros (2 of 6 points are not on the axes)"), "{:?}", texts(&svg));
        let lines = svg.lines().filter(|line| line.contains("polyline") && line.contains("#009E73"));
        assert_eq!(lines.count(), 3, "two runs and the legend");
    }

    #[test]
    fn a_line_of_one_point_has_a_marker() {
        let one = Series::new("one", Style::floor(), vec![(4.0, 10.0)]);
        assert_eq!(figure(vec![one]).svg().unwrap().matches("<circle").count(), 1);
    }

    #[test]
    fn counterparts_have_outlines() {
        let drawn = |index: usize| {
            let style = Style::of_index(index).counterpart();
            let one = Series::new("one", Style { color: Color::Black, ..style }, vec![(4.0, 10.0)]);
            let svg = figure(vec![one]).svg().unwrap();
            let shapes = svg.lines().filter(|line| line.contains("stroke-width=\"12\"")).count();
            (style.marker, shapes)
        };
        let all = [0, 1, 2, 3].map(drawn);
        assert_eq!(all.map(|(_, shapes)| shapes), [2, 2, 2, 4], "at the point and in the legend");
        let markers = [Marker::OpenCircle, Marker::OpenSquare, Marker::OpenTriangle, Marker::Plus];
        assert_eq!(all.map(|(marker, _)| marker), markers);
    }

    #[test]
    fn long_lines_have_a_few_markers() {
        let wave = |start: i32| (start..start + 500).map(|x| (f64::from(x), 10.0 + f64::from(x) / 100.0)).collect();
        let svg = figure(vec![series("one", wave(1)), series("two", wave(1))]).svg().unwrap();
        let count = svg.matches("<circle").count();
        assert!((8..80).contains(&count), "{count}");
    }

    #[test]
    fn a_figure_without_points_is_a_figure() {
        for series in [Vec::new(), vec![series("one", Vec::new())], vec![series("one", vec![(f64::NAN, 0.0)])]] {
            let svg = figure(series).svg().unwrap();
            assert!(svg.contains("a title") && svg.contains("size, log scale"), "{svg}");
        }
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
        let spread = vec![(4.0, 1.0, 1000.0), (8.0, 1.0, 20.0)];
        let bars = series("one", vec![(4.0, 10.0), (16.0, 10.0)]).with_spread(spread);
        let with = figure(vec![bars]);
        let (with, without) = (with.svg().unwrap(), without.svg().unwrap());
        let has_label = |svg: &str| svg.lines().any(|line| line.trim() == "1000");
        assert!(has_label(&with) && !has_label(&without), "the axis covers the bars");
        let bars = |svg: &str| svg.matches("opacity=\"0.6\"").count();
        assert_eq!((bars(&with), bars(&without)), (2, 0), "a bar and its tick; none where there is no point");
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
