//! Text tables with aligned columns.

/// The side on which the cells of a column are flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// For words.
    Left,
    /// For numbers.
    Right,
}

/// Rows of cells under a header line.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<(String, Align)>,
    groups: Vec<(String, usize)>,
    is_ruled: bool,
    rows: Vec<Row>,
}

#[derive(Clone, Debug)]
enum Row {
    Cells(Vec<String>),
    Section(String),
}

const GAP: &str = "  ";

impl Table {
    /// Returns a table without rows.
    pub fn new(columns: &[(impl AsRef<str>, Align)]) -> Self {
        let columns = columns.iter().map(|(head, align)| (head.as_ref().to_owned(), *align)).collect();
        Self { columns, groups: Vec::new(), is_ruled: false, rows: Vec::new() }
    }

    /// Returns a table with words in the first column and numbers in the others, and a rule under the header.
    pub fn numeric<S: Into<String>>(header: impl IntoIterator<Item = S>) -> Self {
        let aligns = std::iter::once(Align::Left).chain(std::iter::repeat(Align::Right));
        let columns = header.into_iter().map(Into::into).zip(aligns).collect();
        Self { columns, groups: Vec::new(), is_ruled: true, rows: Vec::new() }
    }

    /// Adds titles above the header, each with the number of columns that it spans.
    ///
    /// # Panics
    /// When the titles do not span all columns.
    #[must_use]
    pub fn groups<S: Into<String>>(mut self, groups: impl IntoIterator<Item = (S, usize)>) -> Self {
        self.groups = groups.into_iter().map(|(title, span)| (title.into(), span)).collect();
        let spanned: usize = self.groups.iter().map(|(_, span)| span).sum();
        assert_eq!(spanned, self.columns.len(), "groups cover the columns");
        self
    }

    /// Adds a row.
    ///
    /// # Panics
    /// When it does not have a cell for each column.
    pub fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.columns.len(), "a row has a cell for each column");
        self.rows.push(Row::Cells(cells));
    }

    /// Adds a title above the rows that follow.
    pub fn section(&mut self, title: String) {
        self.rows.push(Row::Section(title));
    }

    /// Returns whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the lines of the table, without spaces at their ends.
    pub fn render(&self) -> String {
        let widths = self.widths();
        let mut text = String::new();
        if !self.groups.is_empty() {
            push_line(&mut text, &self.group_line(&widths));
        }
        let header: Vec<String> = self.columns.iter().map(|(head, _)| head.clone()).collect();
        push_line(&mut text, &self.cells_line(&header, &widths));
        if self.is_ruled {
            let rule: Vec<String> = widths.iter().map(|width| "-".repeat(*width)).collect();
            push_line(&mut text, &rule.join(GAP));
        }
        for row in &self.rows {
            match row {
                Row::Cells(cells) => push_line(&mut text, &self.cells_line(cells, &widths)),
                Row::Section(title) => push_line(&mut text, title),
            }
        }
        text
    }

    fn widths(&self) -> Vec<usize> {
        let mut widths: Vec<usize> = self.columns.iter().map(|(head, _)| width(head)).collect();
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
            let present = spanned.iter().sum::<usize>() + GAP.len() * span.saturating_sub(1);
            if let Some(last) = spanned.last_mut() {
                *last += width(title).saturating_sub(present);
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
            titles.push(format!("{title:^room$}"));
            first += span;
        }
        titles.join(GAP)
    }

    fn cells_line(&self, cells: &[String], widths: &[usize]) -> String {
        let padded = cells.iter().zip(widths).zip(&self.columns).map(|((cell, width), (_, align))| match align {
            Align::Left => format!("{cell:<width$}"),
            Align::Right => format!("{cell:>width$}"),
        });
        padded.collect::<Vec<_>>().join(GAP)
    }
}

fn width(text: &str) -> usize {
    text.chars().count()
}

fn push_line(text: &mut String, line: &str) {
    text.push_str(line.trim_end());
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_flush_left_and_numbers_flush_right() {
        let mut table = Table::new(&[("NAME", Align::Left), ("BYTES", Align::Right), ("NOTE", Align::Left)]);
        table.row(vec!["a".into(), "1".into(), "é".into()]);
        table.row(vec!["longer".into(), "123456".into(), String::new()]);
        assert_eq!(table.render(), "NAME     BYTES  NOTE\na            1  é\nlonger  123456\n");
    }

    #[test]
    fn columns_align_under_their_groups() {
        let groups = [("", 1), ("kernel TCP", 2), ("AF_UNIX", 1)];
        let mut table = Table::numeric(["size", "p50", "p99", "p50"]).groups(groups);
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
        let mut table = Table::numeric(["a", "b"]).groups([("", 1), ("a long title", 1)]);
        table.row(vec!["1".into(), "2".into()]);
        assert_eq!(table.render().lines().last(), Some("1             2"));
    }

    #[test]
    #[should_panic(expected = "a row has a cell for each column")]
    fn a_short_row_is_a_bug() {
        Table::numeric(["a", "b"]).row(vec!["1".into()]);
    }
}
