//! Aligned columns of text.

/// On which side a column's cells end evenly.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// Rows under a head.
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub fn new(columns: &[(impl AsRef<str>, Align)]) -> Self {
        let columns = columns.iter().map(|(head, align)| (head.as_ref().to_owned(), *align)).collect();
        Self { columns, rows: Vec::new() }
    }

    /// Adds a row with one cell a column.
    pub fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.columns.len());
        self.rows.push(cells);
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The table as lines without blanks at their ends.
    pub fn render(&self) -> String {
        let heads: Vec<String> = self.columns.iter().map(|(head, _)| head.clone()).collect();
        let widths: Vec<usize> = (0..heads.len()).map(|column| self.width(column)).collect();
        std::iter::once(&heads).chain(&self.rows).map(|cells| self.line(cells, &widths)).collect()
    }

    fn width(&self, column: usize) -> usize {
        let head = self.columns[column].0.chars().count();
        self.rows.iter().map(|cells| cells[column].chars().count()).fold(head, usize::max)
    }

    fn line(&self, cells: &[String], widths: &[usize]) -> String {
        let mut line = String::new();
        for ((cell, width), (_, align)) in cells.iter().zip(widths).zip(&self.columns) {
            let pad = " ".repeat(width - cell.chars().count());
            let (before, after) = if *align == Align::Left { ("", pad.as_str()) } else { (pad.as_str(), "") };
            line.push_str(&format!("{before}{cell}{after}  "));
        }
        format!("{}\n", line.trim_end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_start_and_numbers_end_evenly() {
        let mut table = Table::new(&[("NAME", Align::Left), ("BYTES", Align::Right), ("NOTE", Align::Left)]);
        table.row(vec!["a".into(), "1".into(), "é".into()]);
        table.row(vec!["longer".into(), "123456".into(), String::new()]);
        assert_eq!(table.render(), "NAME     BYTES  NOTE\na            1  é\nlonger  123456\n");
    }
}
