//! Axes: scales, spans, ticks and labels.

use std::ops::Range;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;

/// Margin between the outermost point and the frame, as a share of the axis.
const MARGIN: f64 = 0.02;
/// Approximate number of intervals of a linear axis.
const INTERVALS: f64 = 6.0;
/// Shortest part of a linear axis that values take before it is extended to whole steps.
const EXTENDED: f64 = 0.75;
/// Maximum number of decades for which ticks are at 1, 2 and 5 of each decade.
const FEW_DECADES: f64 = 3.0;
/// Fewest labelled ticks from which a reader can tell the scale.
const TICKS_MIN: usize = 3;
const PARTS: [f64; 3] = [1.0, 2.0, 5.0];
/// Parts of a decade with ticks, from many to few.
const PARTS_CHOICES: [&[f64]; 3] = [&PARTS, &[1.0, 3.0], &[1.0]];
/// Steps of other axes, from many ticks to few.
const STEP_CHOICES: [f64; 6] = [1.0, 2.0, 4.0, 5.0, 10.0, 20.0];
/// Approximate width of a letter of a label, and the height of a label and the least distance of two, in pixels.
const LETTER_WIDTH: f64 = 7.8;
const LABEL_HEIGHT: f64 = 14.0;
const LABEL_DISTANCE: f64 = 5.0;
/// Exponents of powers of ten that are written as decimals. An axis with others writes all its labels as powers.
const EXPONENTS_WRITTEN_OUT: std::ops::RangeInclusive<f64> = -3.0..=4.0;

/// The scale of an axis, with its title.
#[derive(Clone, Copy, Debug)]
pub enum Axis {
    /// Bytes, logarithmic, with ticks at powers of two.
    Bytes(&'static str),
    /// A positive quantity, logarithmic, with ticks at powers of ten.
    Decades(&'static str),
    /// A quantity, linear. The axis starts at zero unless the values lie close together far above zero.
    Linear(&'static str),
    /// Bytes, linear from zero, with ticks at multiples of a power of two.
    EvenBytes(&'static str),
    /// A percentage, linear from 0 to 100.
    Percent(&'static str),
}

impl Axis {
    /// Returns the title of an axis that shows `span`, with the scale unless it is linear from zero.
    pub(crate) fn title(self, span: &Range<f64>) -> String {
        match self {
            Self::Bytes(title) | Self::Decades(title) => format!("{title}, log scale"),
            Self::Linear(title) if span.start > 0.0 => format!("{title}, not from 0"),
            Self::Linear(title) | Self::EvenBytes(title) | Self::Percent(title) => title.to_owned(),
        }
    }

    /// Returns the position of a value on the axis; `None` if the axis cannot show it.
    pub(crate) fn position(self, value: f64) -> Option<f64> {
        let position = match self {
            Self::Bytes(_) => value.log2() / 2.0,
            Self::Decades(_) => value.log10(),
            Self::Linear(_) | Self::EvenBytes(_) | Self::Percent(_) => value,
        };
        position.is_finite().then_some(position)
    }

    /// Returns the label of a tick of an axis that shows `span`.
    fn label(self, position: f64, span: &Range<f64>) -> String {
        match self {
            Self::Bytes(_) => units::size(4f64.powf(position).round() as u64),
            Self::Decades(_) => decade_label(position, span),
            Self::Linear(_) | Self::EvenBytes(_) => decimal(position, 3),
            Self::Percent(_) => format!("{position:.0}"),
        }
    }

    /// Returns the span of positions that the axis shows: all given positions, extended to whole steps.
    pub(crate) fn span(self, positions: impl Iterator<Item = f64>) -> Range<f64> {
        if let Self::Percent(_) = self {
            return 0.0..100.0;
        }
        let (low, high) =
            positions.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        if low > high {
            return 0.0..1.0;
        }
        match self {
            Self::Bytes(_) => bytes_span(low, high),
            Self::Linear(_) => linear_span(low, high),
            Self::EvenBytes(_) => 0.0..high.max(2.0) * (1.0 + MARGIN),
            Self::Decades(_) | Self::Percent(_) => decades_span(low, high),
        }
    }

    fn step(self, span: &Range<f64>) -> f64 {
        match self {
            Self::Percent(_) => 20.0,
            // The span ends at a whole step, and is longer than the values for which the step was chosen.
            Self::Linear(_) => nice_step((span.end - span.start) * EXTENDED),
            Self::EvenBytes(_) => ((span.end - span.start) / INTERVALS / 2.0).log2().ceil().max(0.0).exp2(),
            // Powers of two if they are few, otherwise of four.
            Self::Bytes(_) if span.end - span.start <= FEW_DECADES => 0.5,
            Self::Bytes(_) | Self::Decades(_) => 1.0,
        }
    }
}

/// Returns the label of a power of ten, or a multiple of one, on an axis that shows `span`.
fn decade_label(exponent: f64, span: &Range<f64>) -> String {
    if [span.start, span.end].iter().all(|end| EXPONENTS_WRITTEN_OUT.contains(&end.floor())) {
        return decimal(10f64.powf(exponent), 6);
    }
    // Logarithms of powers of ten may be inexact.
    let power = (exponent + 1e-9).floor();
    let times = match decimal(10f64.powf(exponent - power), 3).as_str() {
        "1" => String::new(),
        digits => format!("{digits}·"),
    };
    format!("{times}10{}", superscript(power as i64))
}

fn superscript(number: i64) -> String {
    let digit = |letter: char| match letter {
        '-' => '⁻',
        '1' => '¹',
        '2' => '²',
        '3' => '³',
        '0' | '4'..='9' => char::from_u32('⁰' as u32 + letter as u32 - '0' as u32).unwrap_or(letter),
        other => other,
    };
    number.to_string().chars().map(digit).collect()
}

/// Returns a number as text, without digits that come from rounding errors.
fn decimal(number: f64, digits: usize) -> String {
    let text = format!("{number:.digits$}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

/// Returns a step of 1, 2 or 5 times a power of ten of which about [`INTERVALS`] fit into `length`.
fn nice_step(length: f64) -> f64 {
    let rough = length / INTERVALS;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|step| step * power >= rough * 0.999);
    step.unwrap_or(10.0) * power
}

/// Returns a span of at least two powers of two. It is not extended to whole steps; the margin keeps markers off the
/// frame.
fn bytes_span(low: f64, high: f64) -> Range<f64> {
    let ticks = |low: f64, high: f64| (high * 2.0 + 1e-9).floor() - (low * 2.0 - 1e-9).ceil() + 1.0;
    let (mut low, mut high) = (low, high);
    while ticks(low, high) < TICKS_MIN as f64 {
        high = (high * 2.0 + 1e-9).floor() / 2.0 + 0.5;
        if ticks(low, high) < TICKS_MIN as f64 {
            low = (low * 2.0 - 1e-9).ceil() / 2.0 - 0.5;
        }
    }
    let margin = (high - low) * MARGIN;
    low - margin..high + margin
}

fn linear_span(low: f64, high: f64) -> Range<f64> {
    let low = if low >= 0.0 && low < high / 2.0 { 0.0 } else { low };
    let length = if high > low { high - low } else { high.abs().max(1.0) };
    let step = nice_step(length);
    let first = (low / step).floor() * step;
    let last = ((high + length * MARGIN) / step).ceil() * step;
    first..last.max(first + step)
}

/// Returns a span of whole decades, or one that ends at 1, 2 or 5 of a decade if there are few.
fn decades_span(low: f64, high: f64) -> Range<f64> {
    let whole = low.floor()..high.ceil().max(low.floor() + 1.0);
    if whole.end - whole.start > FEW_DECADES {
        return whole;
    }
    let parts = || {
        (whole.start as i64 - 1..=whole.end as i64).flat_map(|decade| PARTS.map(|part| decade as f64 + part.log10()))
    };
    // A line at the lowest value would be hidden by the frame.
    let start = parts().filter(|part| *part < low - 1e-9).fold(f64::NEG_INFINITY, f64::max);
    let above = if low < high { high - 1e-9 } else { high + 1e-9 };
    let end = parts().filter(|part| *part >= above).fold(f64::INFINITY, f64::min).min(whole.end);
    if start < end { start..end } else { whole }
}

/// An axis in transformed coordinates, which computes its ticks itself.
pub(crate) struct Ticked {
    range: RangedCoordf64,
    span: Range<f64>,
    axis: Axis,
    /// Positions of the labelled ticks.
    labelled: Vec<f64>,
}

/// The direction of an axis, with its length in pixels.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Extent {
    Horizontal(f64),
    Vertical(f64),
}

impl Ticked {
    /// Returns an axis with as many ticks as have room for their labels.
    pub(crate) fn new(axis: Axis, span: Range<f64>, extent: Extent) -> Self {
        let mut choices = choices(axis, &span);
        let fits = |ticks: &Vec<f64>| ticks.len() >= TICKS_MIN && have_room(axis, &span, ticks, extent);
        let labelled = choices.iter().position(fits).map_or(0, |index| index);
        Self { range: span.clone().into(), span, axis, labelled: choices.swap_remove(labelled) }
    }

    /// Returns the minor ticks of a logarithmic axis: 2 to 9 of each decade.
    fn light(&self) -> Vec<f64> {
        let Axis::Decades(_) = self.axis else { return Vec::new() };
        let decades = self.span.start.floor() as i64..self.span.end.ceil() as i64;
        let between = decades.flat_map(|decade| (2..10).map(move |digit| decade as f64 + f64::from(digit).log10()));
        between.filter(|position| self.span.contains(position)).collect()
    }
}

/// Returns sets of ticks, from many to few; never an empty list.
fn choices(axis: Axis, span: &Range<f64>) -> Vec<Vec<f64>> {
    if matches!(axis, Axis::Decades(_)) && span.end - span.start <= FEW_DECADES {
        let with_parts = |parts: &&[f64]| ticks_in_decades(span, parts);
        let whole = PARTS_CHOICES.iter().map(with_parts).filter(|ticks| ticks.len() > TICKS_MIN);
        let even = [1.0, 2.0, 5.0].map(|factor| ticks_within_a_decade(span, factor));
        return whole.chain(even).collect();
    }
    let step = axis.step(span);
    STEP_CHOICES.iter().map(|factor| ticks_at(span, step * factor)).collect()
}

/// Returns the multiples of `step` in a span.
fn ticks_at(span: &Range<f64>, step: f64) -> Vec<f64> {
    // Rounding must not lose the outermost tick.
    let first = (span.start / step - 1e-9).ceil() as i64;
    let last = (span.end / step + 1e-9).floor() as i64;
    (first..=last).map(|tick| tick as f64 * step).collect()
}

/// Returns these parts of each decade in a span.
fn ticks_in_decades(span: &Range<f64>, parts: &[f64]) -> Vec<f64> {
    let decades = span.start.floor() as i64..=span.end.ceil() as i64;
    let ticks = decades.flat_map(|decade| parts.iter().map(move |part| decade as f64 + part.log10()));
    ticks.filter(|tick| span.start - 1e-9 <= *tick && *tick <= span.end + 1e-9).collect()
}

/// Returns the ticks of a logarithmic axis that shows a part of a decade: even steps of the value, longer by `factor`.
fn ticks_within_a_decade(span: &Range<f64>, factor: f64) -> Vec<f64> {
    let (low, high) = (10f64.powf(span.start), 10f64.powf(span.end));
    ticks_at(&(low..high), nice_step(high - low) * factor)
        .into_iter()
        .map(f64::log10)
        .filter(|at| at.is_finite())
        .collect()
}

/// Returns whether the labels of these ticks do not touch.
fn have_room(axis: Axis, span: &Range<f64>, ticks: &[f64], extent: Extent) -> bool {
    let (length, is_horizontal) = match extent {
        Extent::Horizontal(length) => (length, true),
        Extent::Vertical(length) => (length, false),
    };
    let per_unit = length / (span.end - span.start);
    let size = |tick: f64| match is_horizontal {
        true => axis.label(tick, span).chars().count() as f64 * LETTER_WIDTH,
        false => LABEL_HEIGHT,
    };
    ticks
        .windows(2)
        .all(|pair| (pair[1] - pair[0]) * per_unit >= f64::midpoint(size(pair[0]), size(pair[1])) + LABEL_DISTANCE)
}

impl ValueFormatter<f64> for Ticked {
    fn format_ext(&self, value: &f64) -> String {
        self.axis.label(*value, &self.span)
    }
}

impl Ranged for Ticked {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.range.map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        let mut points = self.labelled.clone();
        if hint.weight().allow_light_points() {
            points.extend(self.light());
        }
        points
    }

    fn range(&self) -> Range<f64> {
        self.span.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_decimals_sizes_or_powers_of_ten() {
        let label = |axis: Axis, position| axis.label(position, &(0.0..4.0));
        assert_eq!(label(Axis::Bytes(""), 3.0), "64 B");
        assert_eq!(label(Axis::Bytes(""), 5.0), "1 KiB");
        assert_eq!(label(Axis::Percent(""), 40.0), "40");
        assert_eq!(label(Axis::Linear(""), 0.30000000000000004), "0.3");
        assert_eq!(label(Axis::Linear(""), -0.0), "0");
    }

    #[test]
    fn all_labels_of_decades_are_decimals_or_all_are_powers() {
        let labels = |low: f64, high: f64| labels(&Ticked::new(Axis::Decades(""), low.log10()..high.log10(), LONG));
        assert_eq!(labels(1e-3, 1e1), ["0.001", "0.01", "0.1", "1", "10"]);
        assert_eq!(labels(1e-5, 1.0), ["10⁻⁵", "10⁻⁴", "10⁻³", "10⁻²", "10⁻¹", "10⁰"]);
        assert_eq!(labels(1e3, 2e5), ["10³", "2·10³", "5·10³", "10⁴", "2·10⁴", "5·10⁴", "10⁵", "2·10⁵"]);
        assert_eq!(labels(2e-3, 5e-3)[..3], ["0.002", "0.0025", "0.003"]);
        assert_eq!(labels(2e-6, 5e-6)[..3], ["2·10⁻⁶", "2.5·10⁻⁶", "3·10⁻⁶"]);
        assert_eq!(labels(5e11, 1e13), ["5·10¹¹", "10¹²", "2·10¹²", "5·10¹²", "10¹³"]);
    }

    #[test]
    fn values_that_a_logarithmic_axis_cannot_show_have_no_position() {
        assert_eq!(Axis::Decades("").position(0.0), None);
        assert_eq!(Axis::Decades("").position(-1.0), None);
        assert_eq!(Axis::Decades("").position(100.0), Some(2.0));
        assert_eq!(Axis::Linear("").position(f64::NAN), None);
    }

    #[test]
    fn spans_cover_the_values_and_are_never_empty() {
        assert_eq!(Axis::Decades("").span([-1.7, 2.7].into_iter()), -2.0..3.0);
        let few = Axis::Decades("").span([2.75, 3.99].into_iter());
        assert_eq!((few.start, few.end), (500f64.log10(), 4.0));
        let one = Axis::Decades("").span([1.0].into_iter());
        assert!(one.start <= 1.0 && one.end > 1.0, "{one:?}");
        let at_the_end = Axis::Decades("").span([0.0, 1.2].into_iter());
        assert!((-0.31..-0.3).contains(&at_the_end.start), "0.5, so that a line at 1 is visible: {at_the_end:?}");
        assert_eq!(Axis::EvenBytes("").span([64.0, 2048.0].into_iter()), 0.0..2048.0 * 1.02);
        assert_eq!(Axis::Decades("").span([].into_iter()), 0.0..1.0);
        let bytes = Axis::Bytes("").span([0.0, 10.0].into_iter());
        assert!(bytes.start < 0.0 && bytes.end > 10.0);
        for (low, high) in [(3.0, 3.0), (3.0, 3.5), (3.2, 3.3), (3.1, 3.9)] {
            let few = Ticked::new(Axis::Bytes(""), Axis::Bytes("").span([low, high].into_iter()), LONG);
            assert!(few.labelled.len() >= 3 && few.span.start < low && high < few.span.end, "{low} {:?}", few.span);
        }
        assert_eq!(Axis::Linear("").span([3.0, 55.0].into_iter()), 0.0..60.0);
        assert_eq!(Axis::Linear("").span([610.0, 690.0].into_iter()), 600.0..700.0);
        for value in [0.0, 5.0, -5.0] {
            let one = Axis::Linear("").span([value].into_iter());
            assert!(one.start < one.end && one.start <= value && value <= one.end, "{one:?}");
        }
    }

    const LONG: Extent = Extent::Horizontal(2000.0);

    fn labels(axis: &Ticked) -> Vec<String> {
        axis.labelled.iter().map(|tick| axis.format_ext(tick)).collect()
    }

    #[test]
    fn ticks_lie_inside_the_span() {
        let axis = Ticked::new(Axis::Decades(""), -2.0..2.0, LONG);
        assert_eq!(axis.labelled, [-2.0, -1.0, 0.0, 1.0, 2.0]);
        assert_eq!(axis.light().len(), 32);
        assert!(axis.light().iter().all(|tick| (-2.0..2.0).contains(tick)));
        let few = Ticked::new(Axis::Decades(""), 500f64.log10()..4.0, LONG);
        assert_eq!(labels(&few), ["500", "1000", "2000", "5000", "10000"]);
        for (low, high, expected) in [
            (500.0, 1000.0, &["500", "600", "700", "800", "900", "1000"][..]),
            (1.0, 2.0, &["1", "1.2", "1.4", "1.6", "1.8", "2"]),
            (0.02, 0.05, &["0.02", "0.025", "0.03", "0.035", "0.04", "0.045", "0.05"]),
        ] {
            let part = Ticked::new(Axis::Decades(""), f64::log10(low)..f64::log10(high), LONG);
            assert_eq!(labels(&part), expected);
        }
        let bytes = Ticked::new(Axis::EvenBytes(""), 0.0..2088.0, LONG);
        assert_eq!(bytes.labelled, [0.0, 256.0, 512.0, 768.0, 1024.0, 1280.0, 1536.0, 1792.0, 2048.0]);
        assert_eq!(Ticked::new(Axis::Linear(""), 0.0..60.0, LONG).labelled, [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0]);
    }

    #[test]
    fn a_linear_axis_has_five_to_nine_ticks() {
        for high in [1.0, 1.3, 1.7, 2.2, 2.6, 3.4, 4.1, 5.1, 6.6, 7.7, 9.1].map(|digits: f64| digits * 131.0) {
            let axis = Ticked::new(Axis::Linear(""), Axis::Linear("").span([0.0, high].into_iter()), LONG);
            assert!((5..=9).contains(&axis.labelled.len()), "{high}: {:?}", labels(&axis));
        }
    }

    #[test]
    fn labels_have_room() {
        let short = Extent::Horizontal(370.0);
        let windows = Axis::Bytes("").span([6.0, 13.0].into_iter());
        assert_eq!(labels(&Ticked::new(Axis::Bytes(""), windows, short)), ["4 KiB", "64 KiB", "1 MiB", "16 MiB"]);
        let decades = Ticked::new(Axis::Decades(""), 0.0..12.0, short);
        assert!(have_room(decades.axis, &decades.span, &decades.labelled, short), "{:?}", labels(&decades));
        assert!(decades.labelled.len() >= 3);
        let three = Ticked::new(Axis::Decades(""), 2.0..5.0, Extent::Horizontal(200.0));
        assert_eq!(labels(&three), ["10²", "10³", "10⁴", "10⁵"]);
        let upright = Ticked::new(Axis::Decades(""), 2.0..5.0, Extent::Vertical(200.0));
        assert_eq!(labels(&upright).len(), 10);
    }

    #[test]
    fn a_title_states_a_scale_that_is_not_linear_from_zero() {
        let title = |axis: Axis, span| axis.title(&span);
        assert_eq!(title(Axis::Linear("ns"), 0.0..1.0), "ns");
        assert_eq!(title(Axis::Linear("ns"), 600.0..700.0), "ns, not from 0");
        assert_eq!(title(Axis::Decades("ns"), 0.0..1.0), "ns, log scale");
        assert_eq!(title(Axis::Bytes("window"), 0.0..1.0), "window, log scale");
        assert_eq!(title(Axis::Percent("share (%)"), 0.0..100.0), "share (%)");
    }
}
