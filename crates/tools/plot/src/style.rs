//! Colours, lines and markers.

use plotters::style::RGBColor;

/// A colour of Okabe and Ito's palette, which colour-blind readers can tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Color {
    /// Dark blue.
    Blue,
    /// Red.
    Vermilion,
    /// Bluish green.
    Green,
    /// Light orange.
    Orange,
    /// Reddish purple.
    Purple,
    /// Light blue.
    Sky,
    /// For what is compared against.
    Black,
    /// For limits.
    Gray,
}

/// How points are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// Not at all: markers alone.
    None,
    /// A line.
    Solid,
    /// A line that stands back.
    Dashed,
}

/// What marks a point, as long as there are few.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marker {
    /// Nothing.
    None,
    /// A disc.
    Circle,
    /// A square.
    Square,
    /// A triangle.
    Triangle,
    /// A cross.
    Cross,
}

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// Of line and marker.
    pub color: Color,
    /// How points are joined.
    pub line: Line,
    /// What marks a point.
    pub marker: Marker,
    /// Whether it is the line that the reader looks for.
    pub wide: bool,
}

impl Color {
    /// In the order in which series take them.
    const SERIES: [Self; 6] = [Self::Blue, Self::Vermilion, Self::Green, Self::Orange, Self::Purple, Self::Sky];

    pub(crate) fn rgb(self) -> RGBColor {
        match self {
            Self::Blue => RGBColor(0, 114, 178),
            Self::Vermilion => RGBColor(213, 94, 0),
            Self::Green => RGBColor(0, 158, 115),
            Self::Orange => RGBColor(230, 159, 0),
            Self::Purple => RGBColor(204, 121, 167),
            Self::Sky => RGBColor(86, 180, 233),
            Self::Black => RGBColor(0, 0, 0),
            Self::Gray => RGBColor(110, 110, 110),
        }
    }
}

impl Style {
    /// A line with round markers.
    pub fn line(color: Color) -> Self {
        Self { color, line: Line::Solid, marker: Marker::Circle, wide: false }
    }

    /// A limit: dashed and gray.
    pub fn floor() -> Self {
        Self { color: Color::Gray, line: Line::Dashed, marker: Marker::None, wide: false }
    }

    /// The style of the series `index`, different from that of the 23 beside it.
    pub fn of_index(index: usize) -> Self {
        const MARKERS: [Marker; 4] = [Marker::Circle, Marker::Square, Marker::Triangle, Marker::Cross];
        let color = Color::SERIES[index % Color::SERIES.len()];
        // One step more a round, so that a colour meets another marker each time.
        let marker = MARKERS[(index + index / Color::SERIES.len() * 3) % MARKERS.len()];
        // Where there are too many points for markers, lines must differ too.
        let line = if (index / Color::SERIES.len()).is_multiple_of(2) { Line::Solid } else { Line::Dashed };
        Self { color, line, marker, wide: false }
    }

    /// The same without a line.
    pub fn points_only(self) -> Self {
        Self { line: Line::None, ..self }
    }

    /// The same without markers, dashed.
    pub fn dashed(self) -> Self {
        Self { line: Line::Dashed, marker: Marker::None, ..self }
    }

    /// The same, drawn to be seen first.
    pub fn wide(self) -> Self {
        Self { wide: true, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn styles_of_neighbouring_series_differ() {
        let styles: Vec<Style> = (0..24).map(Style::of_index).collect();
        for (index, style) in styles.iter().enumerate() {
            let twin = styles[..index].iter().position(|other| other == style);
            assert_eq!(twin, None, "{index} looks as another");
        }
    }
}
