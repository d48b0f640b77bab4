//! Aligned text tables, and how numbers are written in them.

pub use plot::size;

/// A table whose first column is flush left and whose others are flush right.
pub struct Table {
    groups: Vec<(String, usize)>,
    header: Vec<String>,
    rows: Vec<Row>,
}

enum Row {
    Cells(Vec<String>),
    Section(String),
}

const GAP: &str = "  ";

impl Table {
    pub fn new<S: Into<String>>(header: impl IntoIterator<Item = S>) -> Self {
        Self { groups: Vec::new(), header: header.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// Titles above the header, each over as many columns as it says.
    pub fn groups<S: Into<String>>(mut self, groups: impl IntoIterator<Item = (S, usize)>) -> Self {
        self.groups = groups.into_iter().map(|(title, span)| (title.into(), span)).collect();
        assert_eq!(
            self.groups.iter().map(|(_, span)| span).sum::<usize>(),
            self.header.len(),
            "groups cover the columns"
        );
        self
    }

    pub fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.header.len(), "a row has a cell for each column");
        self.rows.push(Row::Cells(cells));
    }

    /// A title over the rows that follow.
    pub fn section(&mut self, title: String) {
        self.rows.push(Row::Section(title));
    }

    pub fn render(&self) -> String {
        let widths = self.widths();
        let mut text = String::new();
        if !self.groups.is_empty() {
            push_line(&mut text, &self.group_line(&widths));
        }
        push_line(&mut text, &cells_line(&self.header, &widths));
        let rule: Vec<String> = widths.iter().map(|width| "-".repeat(*width)).collect();
        push_line(&mut text, &rule.join(GAP));
        for row in &self.rows {
            match row {
                Row::Cells(cells) => push_line(&mut text, &cells_line(cells, &widths)),
                Row::Section(title) => push_line(&mut text, title),
            }
        }
        text
    }

    fn widths(&self) -> Vec<usize> {
        let mut widths: Vec<usize> = self.header.iter().map(|title| width(title)).collect();
        for row in &self.rows {
            if let Row::Cells(cells) = row {
                for (column, cell) in cells.iter().enumerate() {
                    widths[column] = widths[column].max(width(cell));
                }
            }
        }
        let mut first = 0;
        for (title, span) in &self.groups {
            let spanned = &mut widths[first..first + span];
            let have = spanned.iter().sum::<usize>() + GAP.len() * span.saturating_sub(1);
            if let Some(last) = spanned.last_mut() {
                *last += width(title).saturating_sub(have);
            }
            first += span;
        }
        widths
    }

    fn group_line(&self, widths: &[usize]) -> String {
        let mut first = 0;
        let mut titles = Vec::new();
        for (title, span) in &self.groups {
            let room = widths[first..first + span].iter().sum::<usize>() + GAP.len() * span.saturating_sub(1);
            let padding = room.saturating_sub(width(title));
            let (left, right) = (padding / 2, padding - padding / 2);
            titles.push(format!("{}{title}{}", " ".repeat(left), " ".repeat(right)));
            first += span;
        }
        titles.join(GAP)
    }
}

fn width(text: &str) -> usize {
    text.chars().count()
}

fn cells_line(cells: &[String], widths: &[usize]) -> String {
    let padded = cells.iter().zip(widths).enumerate().map(|(column, (cell, room))| {
        let padding = " ".repeat(room.saturating_sub(width(cell)));
        if column == 0 { format!("{cell}{padding}") } else { format!("{padding}{cell}") }
    });
    padded.collect::<Vec<_>>().join(GAP)
}

fn push_line(text: &mut String, line: &str) {
    text.push_str(line.trim_end());
    text.push('\n');
}

/// What stands where there is no number.
pub const NOTHING: &str = "-";

/// Three significant digits, and no more than three decimals.
fn significant(value: f64) -> String {
    let decimals = match value.abs() {
        magnitude if magnitude >= 99.95 => 0,
        magnitude if magnitude >= 9.995 => 1,
        magnitude if magnitude >= 0.9995 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

fn optional(value: Option<f64>, write: impl Fn(f64) -> String) -> String {
    value.filter(|value| value.is_finite()).map_or_else(|| NOTHING.to_owned(), write)
}

/// Nanoseconds as microseconds, without the unit.
pub fn micros(ns: Option<f64>) -> String {
    optional(ns, |ns| significant(ns / 1e3))
}

/// A ratio: `2.41x`.
pub fn times(ratio: Option<f64>) -> String {
    optional(ratio, |ratio| format!("{}x", significant(ratio)))
}

/// A share: `63%`.
pub fn percent(share: Option<f64>) -> String {
    optional(share, |share| format!("{}%", significant(share * 100.0)))
}

/// A rate a second: `94.5 k`, `23.1 M`.
pub fn rate(per_second: Option<f64>) -> String {
    optional(per_second, |rate| match rate {
        rate if rate >= 999_500.0 => format!("{} M", significant(rate / 1e6)),
        rate if rate >= 999.5 => format!("{} k", significant(rate / 1e3)),
        rate => significant(rate),
    })
}

/// Bytes a second as GB/s, without the unit.
pub fn gigabytes(bytes_per_second: Option<f64>) -> String {
    optional(bytes_per_second, |rate| if rate < 1e6 { format!("{:.5}", rate / 1e9) } else { significant(rate / 1e9) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_under_their_groups() {
        let mut table = Table::new(["size", "p50", "p99", "p50"]).groups([("", 1), ("kernel TCP", 2), ("AF_UNIX", 1)]);
        table.row(vec!["8 B".into(), "57.1".into(), "80.0".into(), "1.25".into()]);
        table.section("large, and a title that widens nothing".into());
        table.row(vec!["1 MiB".into(), "µs".into(), "8".into(), "9".into()]);
        let expected = [
            "       kernel TCP  AF_UNIX",
            "size    p50   p99      p50",
            "-----  ----  ----  -------",
            "8 B    57.1  80.0     1.25",
            "large, and a title that widens nothing",
            "1 MiB    µs     8        9",
        ];
        assert_eq!(table.render().lines().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_long_group_title_widens_its_last_column() {
        let mut table = Table::new(["a", "b"]).groups([("", 1), ("a long title", 1)]);
        table.row(vec!["1".into(), "2".into()]);
        assert_eq!(table.render().lines().last(), Some("1             2"));
    }

    #[test]
    #[should_panic(expected = "a row has a cell for each column")]
    fn a_short_row_is_a_bug() {
        Table::new(["a", "b"]).row(vec!["1".into()]);
    }

    #[test]
    fn numbers_carry_three_digits() {
        assert_eq!(micros(Some(83.4)), "0.083");
        assert_eq!(micros(Some(1_234.0)), "1.23");
        assert_eq!(micros(Some(57_149.0)), "57.1");
        assert_eq!(micros(Some(99_960.0)), "100");
        assert_eq!(times(Some(103.4)), "103x");
        assert_eq!(percent(Some(0.634)), "63.4%");
        assert_eq!(rate(Some(94_500.0)), "94.5 k");
        assert_eq!(rate(Some(999_900.0)), "1.00 M");
        assert_eq!(gigabytes(Some(60_000.0)), "0.00006");
        assert_eq!(gigabytes(Some(44.2e9)), "44.2");
    }

    #[test]
    fn what_is_missing_is_a_dash() {
        assert_eq!(micros(None), NOTHING);
        assert_eq!(times(Some(f64::NAN)), NOTHING);
    }

    #[test]
    fn sizes_use_the_largest_whole_unit() {
        assert_eq!(size(1), "1 B");
        assert_eq!(size(1024), "1 KiB");
        assert_eq!(size(1500), "1500 B");
        assert_eq!(size(4 << 20), "4 MiB");
    }
}
