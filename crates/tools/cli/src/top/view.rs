//! What the user has chosen to see: the order of the rows, and a text that they contain.

use std::cmp::Reverse;

use ratatui::crossterm::event::KeyCode;

/// The keys, for `?`.
pub const KEYS: &str = "\
s        sort by the next column: process, program or peer, bytes, rate
r        reverse the order
/        show only rows that contain a text; Enter ends it, Esc removes it
arrows   scroll the connections; so do j, k, Page Up and Page Down
?        show or hide this list
q        quit";

/// The order of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// By process, as `stat` prints them.
    #[default]
    Process,
    /// Processes by program, connections by the other side's address.
    Name,
    /// Those that have carried the most bytes first.
    Bytes,
    /// Those that carry the most bytes per second first.
    Rate,
}

impl Order {
    fn next(self) -> Self {
        match self {
            Self::Process => Self::Name,
            Self::Name => Self::Bytes,
            Self::Bytes => Self::Rate,
            Self::Rate => Self::Process,
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Name => "name",
            Self::Bytes => "bytes",
            Self::Rate => "rate",
        }
    }
}

/// A row of a table, and what it is sorted by.
#[derive(Clone, Debug, Default)]
pub struct SortableRow {
    /// The cells of the table.
    pub cells: Vec<String>,
    /// Text that is not in the row and by which it is found too.
    pub more: String,
    /// What [`Order::Name`] sorts by.
    pub name: String,
    /// Bytes carried.
    pub bytes: u64,
    /// Bytes per second; `None` if not known yet.
    pub rate: Option<u64>,
}

/// The choices.
#[derive(Clone, Debug, Default)]
pub struct View {
    order: Order,
    is_reversed: bool,
    filter: String,
    is_editing: bool,
    /// The keys are shown instead of the tables.
    pub shows_keys: bool,
}

impl View {
    /// Handles a key. Returns whether it was one of the view's.
    pub fn handle(&mut self, key: KeyCode) -> bool {
        if self.is_editing {
            match key {
                KeyCode::Enter => self.is_editing = false,
                KeyCode::Esc => (self.is_editing, self.filter) = (false, String::new()),
                KeyCode::Backspace => _ = self.filter.pop(),
                KeyCode::Char(character) => self.filter.push(character),
                _ => {}
            }
            return true;
        }
        match key {
            KeyCode::Esc if self.shows_keys => self.shows_keys = false,
            KeyCode::Esc if !self.filter.is_empty() => self.filter.clear(),
            KeyCode::Char('s') => self.order = self.order.next(),
            KeyCode::Char('r') => self.is_reversed = !self.is_reversed,
            KeyCode::Char('/') => self.is_editing = true,
            KeyCode::Char('?') => self.shows_keys = !self.shows_keys,
            _ => return false,
        }
        true
    }

    /// Returns the rows that contain the text, in the chosen order.
    pub fn arrange(&self, rows: impl Iterator<Item = SortableRow>) -> Vec<Vec<String>> {
        let wanted = self.filter.to_lowercase();
        let contains = |text: &String| text.to_lowercase().contains(&wanted);
        let mut rows: Vec<SortableRow> =
            rows.filter(|row| wanted.is_empty() || contains(&row.more) || row.cells.iter().any(contains)).collect();
        match self.order {
            Order::Process => {}
            Order::Name => rows.sort_by(|one, other| one.name.cmp(&other.name)),
            Order::Bytes => rows.sort_by_key(|row| Reverse(row.bytes)),
            Order::Rate => rows.sort_by_key(|row| Reverse(row.rate)),
        }
        if self.is_reversed {
            rows.reverse();
        }
        rows.into_iter().map(|row| row.cells).collect()
    }

    /// Returns what is chosen, for the headline.
    pub fn describe(&self) -> String {
        let direction = if self.is_reversed { ", reversed" } else { "" };
        let filter = match (self.is_editing, self.filter.as_str()) {
            (true, text) => format!("  /{text}_"),
            (false, "") => String::new(),
            (false, text) => format!("  only '{text}'"),
        };
        format!("by {}{direction}{filter}", self.order.title())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<SortableRow> {
        [("redis", 5, Some(1)), ("Nginx", 9, None), ("curl", 7, Some(3))]
            .map(|(name, bytes, rate)| SortableRow {
                cells: vec![name.to_owned()],
                more: format!("of-{name}"),
                name: name.to_owned(),
                bytes,
                rate,
            })
            .into()
    }

    fn names(view: &View) -> Vec<String> {
        view.arrange(rows().into_iter()).concat()
    }

    fn press(view: &mut View, keys: &str) {
        keys.chars().for_each(|key| assert!(view.handle(KeyCode::Char(key)), "{key}"));
    }

    #[test]
    fn s_changes_the_order_and_r_reverses_it() {
        let mut view = View::default();
        assert_eq!(names(&view), ["redis", "Nginx", "curl"]);
        for (key, order) in [
            ("s", ["Nginx", "curl", "redis"]),
            ("s", ["Nginx", "curl", "redis"]),
            ("s", ["curl", "redis", "Nginx"]),
            ("r", ["Nginx", "redis", "curl"]),
        ] {
            press(&mut view, key);
            assert_eq!(names(&view), order, "{}", view.describe());
        }
        assert_eq!(view.describe(), "by rate, reversed");
        press(&mut view, "s");
        assert_eq!(names(&view), ["curl", "Nginx", "redis"]);
    }

    #[test]
    fn a_text_shows_only_rows_that_contain_it() {
        let mut view = View::default();
        press(&mut view, "/nGq");
        assert!(view.handle(KeyCode::Backspace));
        assert_eq!((names(&view), view.describe().as_str()), (vec!["Nginx".to_owned()], "by process  /nG_"));
        assert!(view.handle(KeyCode::Enter));
        assert_eq!(view.describe(), "by process  only 'nG'");
        assert!(!view.handle(KeyCode::Char('q')), "q is not part of the text any more");
        assert!(view.handle(KeyCode::Esc));
        assert_eq!(names(&view).len(), 3);
        assert!(!view.handle(KeyCode::Esc), "there is nothing to remove: it quits");
        press(&mut view, "/of-c");
        assert_eq!(names(&view), ["curl"]);
        assert!(view.handle(KeyCode::Esc));
        assert_eq!((names(&view).len(), view.describe().as_str()), (3, "by process"));
    }

    #[test]
    fn the_keys_are_shown_until_they_are_hidden() {
        let mut view = View::default();
        press(&mut view, "?");
        assert!(view.shows_keys);
        assert!(view.handle(KeyCode::Esc), "it does not quit");
        assert!(!view.shows_keys);
    }
}
