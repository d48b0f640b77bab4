//! Axes: scales, spans, ticks and labels.

use std::ops::Range;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;

/// Margin between the outermost point and the frame, as a share of the axis.
const MARGIN: f64 = 0.02;
/// Approximate number of intervals of a linear axis.
const INTERVALS: f64 = 6.0;
/// Maximum number of decades for which ticks are at 1, 2 and 5 of each decade.
const FEW_DECADES: f64 = 3.0;
/// Fewest ticks from which a reader can tell values apart.
const TICKS_MIN: usize = 4;
const PARTS: [f64; 3] = [1.0, 2.0, 5.0];
/// Exponents of powers of ten that are written as decimals; others are written as powers.
const EXPONENTS_WRITTEN_OUT: std::ops::RangeInclusive<f64> = -3.0..=4.0;

/// The scale of an axis, with its title.
#[derive(Clone, Copy, Debug)]
pub enum Axis {
    /// Bytes, logarithmic, with ticks at powers of four.
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
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Bytes(title) | Self::Decades(title) | Self::Linear(title) | Self::EvenBytes(title) => title,
            Self::Percent(title) => title,
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

    fn label(self, position: f64) -> String {
        match self {
            Self::Bytes(_) => units::size(4f64.powf(position).round() as u64),
            Self::Decades(_) => decade_label(position),
            Self::Linear(_) | Self::EvenBytes(_) => linear_label(position),
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
            // Not extended to whole steps; the margin keeps markers off the frame.
            Self::Bytes(_) => {
                let margin = (high - low).max(1.0) * MARGIN;
                low - margin..high + margin
            }
            Self::Linear(_) => linear_span(low, high),
            Self::EvenBytes(_) => 0.0..high.max(1.0) * (1.0 + MARGIN),
            Self::Decades(_) | Self::Percent(_) => decades_span(low, high),
        }
    }

    fn step(self, span: &Range<f64>) -> f64 {
        match self {
            Self::Percent(_) => 20.0,
            Self::Linear(_) => nice_step(span.end - span.start),
            Self::EvenBytes(_) => ((span.end - span.start) / INTERVALS / 2.0).log2().ceil().max(0.0).exp2(),
            Self::Bytes(_) | Self::Decades(_) => 1.0,
        }
    }
}

fn decade_label(exponent: f64) -> String {
    let digit = (10f64.powf(exponent - exponent.floor())).round();
    if !EXPONENTS_WRITTEN_OUT.contains(&exponent.floor()) {
        let times = if digit > 1.0 { format!("{digit}·") } else { String::new() };
        format!("{times}10{}", superscript(exponent.floor() as i64))
    } else if digit > 1.0 || exponent != exponent.round() {
        linear_label(10f64.powf(exponent))
    } else if exponent < 0.0 {
        format!("{:.*}", (-exponent).round() as usize, 10f64.powf(exponent))
    } else {
        format!("{:.0}", 10f64.powf(exponent))
    }
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

/// Returns a position as text, without digits that come from rounding errors.
fn linear_label(position: f64) -> String {
    let text = format!("{position:.3}");
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
    let parts =
        || (whole.start as i64..=whole.end as i64).flat_map(|decade| PARTS.map(|part| decade as f64 + part.log10()));
    let start = parts().filter(|part| *part <= low + 1e-9).fold(whole.start, f64::max);
    let end = parts().filter(|part| *part >= high - 1e-9).fold(f64::INFINITY, f64::min).min(whole.end);
    if start < end { start..end } else { whole }
}

/// An axis in transformed coordinates, which computes its ticks itself.
pub(crate) struct Ticked {
    range: RangedCoordf64,
    span: Range<f64>,
    axis: Axis,
}

impl Ticked {
    pub(crate) fn new(axis: Axis, span: Range<f64>) -> Self {
        Self { range: span.clone().into(), span, axis }
    }

    /// Returns whether there are few enough decades for ticks at 2 and 5 of each.
    fn has_parts(&self) -> bool {
        matches!(self.axis, Axis::Decades(_)) && self.span.end - self.span.start <= FEW_DECADES
    }

    fn bold(&self) -> Vec<f64> {
        if self.has_parts() {
            let decades = self.span.start.floor() as i64..=self.span.end.ceil() as i64;
            let ticks = decades.flat_map(|decade| PARTS.map(|part| decade as f64 + part.log10()));
            let is_shown = |tick: &f64| self.span.start - 1e-9 <= *tick && *tick <= self.span.end + 1e-9;
            let ticks: Vec<f64> = ticks.filter(is_shown).collect();
            return if ticks.len() < TICKS_MIN { self.within_a_decade() } else { ticks };
        }
        let step = self.axis.step(&self.span);
        // Rounding must not lose the outermost tick.
        let first = (self.span.start / step - 1e-9).ceil() as i64;
        let last = (self.span.end / step + 1e-9).floor() as i64;
        (first..=last).map(|tick| tick as f64 * step).collect()
    }

    /// Returns the ticks of a logarithmic axis that shows a part of a decade: even steps of the value.
    fn within_a_decade(&self) -> Vec<f64> {
        let (low, high) = (10f64.powf(self.span.start), 10f64.powf(self.span.end));
        let step = nice_step(high - low);
        let (first, last) = ((low / step - 1e-9).ceil() as i64, (high / step + 1e-9).floor() as i64);
        (first..=last).map(|tick| (tick as f64 * step).log10()).collect()
    }

    /// Returns the minor ticks of a logarithmic axis: 2 to 9 of each decade.
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
    type FormatOption = NoDefaultFormatting;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_decimals_sizes_or_powers_of_ten() {
        assert_eq!(Axis::Bytes("").label(3.0), "64 B");
        assert_eq!(Axis::Bytes("").label(5.0), "1 KiB");
        assert_eq!(Axis::Decades("").label(-2.0), "0.01");
        assert_eq!(Axis::Decades("").label(3.0), "1000");
        assert_eq!(Axis::Decades("").label(-6.0), "10⁻⁶");
        assert_eq!(Axis::Decades("").label(12.0), "10¹²");
        assert_eq!(Axis::Decades("").label(2e-5_f64.log10()), "2·10⁻⁵");
        assert_eq!(Axis::Percent("").label(40.0), "40");
        assert_eq!(Axis::Linear("").label(0.30000000000000004), "0.3");
        assert_eq!(Axis::Linear("").label(-0.0), "0");
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
        assert_eq!(Axis::EvenBytes("").span([64.0, 2048.0].into_iter()), 0.0..2048.0 * 1.02);
        assert_eq!(Axis::Decades("").span([].into_iter()), 0.0..1.0);
        let bytes = Axis::Bytes("").span([0.0, 10.0].into_iter());
        assert!(bytes.start < 0.0 && bytes.end > 10.0);
        assert_eq!(Axis::Linear("").span([3.0, 55.0].into_iter()), 0.0..60.0);
        assert_eq!(Axis::Linear("").span([610.0, 690.0].into_iter()), 600.0..700.0);
        for value in [0.0, 5.0, -5.0] {
            let one = Axis::Linear("").span([value].into_iter());
            assert!(one.start < one.end && one.start <= value && value <= one.end, "{one:?}");
        }
    }

    #[test]
    fn ticks_lie_inside_the_span() {
        let axis = Ticked::new(Axis::Decades(""), -2.0..2.0);
        assert_eq!(axis.bold(), [-2.0, -1.0, 0.0, 1.0, 2.0]);
        assert_eq!(axis.light().len(), 32);
        assert!(axis.light().iter().all(|tick| (-2.0..2.0).contains(tick)));
        let few = Ticked::new(Axis::Decades(""), 500f64.log10()..4.0);
        let labels: Vec<String> = few.bold().into_iter().map(|tick| few.format_ext(&tick)).collect();
        assert_eq!(labels, ["500", "1000", "2000", "5000", "10000"]);
        for (low, high, expected) in [
            (500.0, 1000.0, &["500", "600", "700", "800", "900", "1000"][..]),
            (1.0, 2.0, &["1", "1.2", "1.4", "1.6", "1.8", "2"]),
            (0.02, 0.05, &["0.02", "0.025", "0.03", "0.035", "0.04", "0.045", "0.05"]),
        ] {
            let part = Ticked::new(Axis::Decades(""), f64::log10(low)..f64::log10(high));
            let labels: Vec<String> = part.bold().into_iter().map(|tick| part.format_ext(&tick)).collect();
            assert_eq!(labels, expected);
        }
        let bytes = Ticked::new(Axis::EvenBytes(""), 0.0..2088.0);
        assert_eq!(bytes.bold(), [0.0, 256.0, 512.0, 768.0, 1024.0, 1280.0, 1536.0, 1792.0, 2048.0]);
        assert_eq!(Ticked::new(Axis::Linear(""), 0.0..60.0).bold(), [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0]);
    }
}
