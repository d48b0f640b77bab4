//! Colours, lines and markers.

use plotters::style::RGBColor;

/// A colour of the palette of Okabe and Ito, which colour-blind readers can distinguish.
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
    /// For references.
    Black,
    /// For bounds.
    Gray,
}

/// How points are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// No line, only markers.
    None,
    /// A solid line.
    Solid,
    /// A dashed line, for references.
    Dashed,
}

/// The marker of a point. Series with many points are drawn without markers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marker {
    /// No marker.
    None,
    /// A disc.
    Circle,
    /// A square.
    Square,
    /// A triangle.
    Triangle,
    /// A cross.
    Cross,
    /// A circle around the disc of another series.
    OpenCircle,
    /// The outline of a square.
    OpenSquare,
    /// The outline of a triangle.
    OpenTriangle,
    /// An upright cross.
    Plus,
}

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// Colour of line and markers.
    pub color: Color,
    /// How points are connected.
    pub line: Line,
    /// Marker of each point.
    pub marker: Marker,
    /// Whether the line is wide, to emphasise it.
    pub wide: bool,
}

impl Color {
    /// Colours of consecutive series.
    const SERIES: [Self; 6] = [Self::Blue, Self::Vermilion, Self::Green, Self::Orange, Self::Purple, Self::Sky];

    /// Returns a marker that no colour of a similar shade of gray has.
    fn marker(self) -> Marker {
        match self {
            Self::Blue | Self::Purple | Self::Black => Marker::Circle,
            Self::Vermilion | Self::Sky | Self::Gray => Marker::Square,
            Self::Green => Marker::Triangle,
            Self::Orange => Marker::Cross,
        }
    }

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
    /// Returns a solid line with the marker of its colour, which tells it from others in black-and-white print.
    pub fn line(color: Color) -> Self {
        Self { color, line: Line::Solid, marker: color.marker(), wide: false }
    }

    /// Returns the style of a bound: dashed and gray.
    pub fn floor() -> Self {
        Self { color: Color::Gray, line: Line::Dashed, marker: Marker::None, wide: false }
    }

    /// Returns the style of the series `index`. Any 24 consecutive series have different styles.
    pub fn of_index(index: usize) -> Self {
        const MARKERS: [Marker; 4] = [Marker::Circle, Marker::Square, Marker::Triangle, Marker::Cross];
        let color = Color::SERIES[index % Color::SERIES.len()];
        // The offset grows with each round through the colours, so that a colour gets another marker each time.
        let marker = MARKERS[(index + index / Color::SERIES.len() * 3) % MARKERS.len()];
        // Series with too many points for markers are distinguished by their lines.
        let line = if (index / Color::SERIES.len()).is_multiple_of(2) { Line::Solid } else { Line::Dashed };
        Self { color, line, marker, wide: false }
    }

    /// Returns the style of points that belong to a line of this style, such as published ones: its colour, and the
    /// outline of its marker, which also shows around it.
    pub fn counterpart(self) -> Self {
        let marker = match self.marker {
            Marker::Circle => Marker::OpenCircle,
            Marker::Square => Marker::OpenSquare,
            Marker::Triangle => Marker::OpenTriangle,
            Marker::Cross => Marker::Plus,
            Marker::None | Marker::OpenCircle | Marker::OpenSquare | Marker::OpenTriangle | Marker::Plus => self.marker,
        };
        Self { marker, line: Line::None, ..self }
    }

    /// Returns this style without a line.
    pub fn points_only(self) -> Self {
        Self { line: Line::None, ..self }
    }

    /// Returns this style without markers and with a dashed line.
    pub fn dashed(self) -> Self {
        Self { line: Line::Dashed, marker: Marker::None, ..self }
    }

    /// Returns this style with a wide line, for emphasis.
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
            assert_eq!(twin, None, "series {index} has the style of another");
        }
    }
}
