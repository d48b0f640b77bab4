//! `crosslane top`: shows what `stat` shows, updated continuously, in an order and with a filter of the user's.

mod view;

use std::collections::HashMap;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Paragraph, Row, Table, TableState, Wrap};
use ratatui::{DefaultTerminal, Frame};
use stats_page::reader::{Connection, Process, Snapshot};

use crate::rack_choice::RackChoice;
use crate::stat::without_page::{self, WithoutPage};
use crate::stat::{self, is_shown};
use view::{KEYS, SortableRow, View};

/// Width of a column of addresses: an IPv4 address and a port.
const ADDRESS_WIDTH_MIN: u16 = 22;

/// Options of `crosslane top`.
#[derive(clap::Args)]
pub struct Options {
    /// Print one snapshot as JSON, as stat --json does
    #[arg(long)]
    json: bool,
    /// The rack: a rack file, its address in etcd, or a directory [default: as for run]
    #[arg(long, value_name = "FILE|ETCD|DIR")]
    rack: Option<PathBuf>,
    /// Seconds between updates
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
}

/// Shows the rack until `q` is pressed; without a terminal, prints it once.
pub fn main(options: &Options) -> Result<()> {
    let live = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    if options.json || !live {
        return stat::main(&stat::Options { json: options.json, rack: options.rack.clone(), all: false });
    }
    let rack = RackChoice::new(options.rack.as_deref())?;
    let screen = Screen::new(stat::read(&rack.directories())?, rack);
    let mut terminal = ratatui::try_init().context("initialising the terminal; crosslane stat works without one")?;
    let done = screen.run(&mut terminal, Duration::from_secs(options.interval));
    ratatui::restore();
    done
}

/// Byte counts by key in the last two snapshots.
#[derive(Default)]
struct Rates<Key> {
    before: HashMap<Key, u64>,
    now: HashMap<Key, u64>,
    seconds: f64,
}

impl<Key: std::hash::Hash + Eq> Rates<Key> {
    fn record(&mut self, counts: impl Iterator<Item = (Key, u64)>, elapsed: Duration) {
        self.before = std::mem::replace(&mut self.now, counts.collect());
        self.seconds = elapsed.as_secs_f64();
    }

    /// Returns the bytes per second of a key, or `None` if fewer than two snapshots contain it.
    fn rate(&self, key: &Key) -> Option<u64> {
        let (before, now) = (self.before.get(key)?, self.now.get(key)?);
        (self.seconds > 0.0).then(|| (now.saturating_sub(*before) as f64 / self.seconds) as u64)
    }
}

/// The PID, descriptor and opening time of a connection.
type ConnectionKey = (u32, i32, u64);

struct Screen {
    rack: RackChoice,
    snapshot: Snapshot,
    /// Programs without a page, found only while there is no page at all.
    without_page: WithoutPage,
    sampled_at: Instant,
    processes: Rates<u32>,
    connections: Rates<ConnectionKey>,
    position: TableState,
    view: View,
}

impl Screen {
    fn new(snapshot: Snapshot, rack: RackChoice) -> Self {
        let mut screen = Self {
            rack,
            snapshot: Snapshot::default(),
            without_page: WithoutPage::default(),
            sampled_at: Instant::now(),
            processes: Rates::default(),
            connections: Rates::default(),
            position: TableState::default(),
            view: View::default(),
        };
        screen.update(snapshot);
        screen
    }

    fn run(mut self, terminal: &mut DefaultTerminal, interval: Duration) -> Result<()> {
        loop {
            terminal.draw(|frame| self.draw(frame)).context("drawing")?;
            let left = interval.saturating_sub(self.sampled_at.elapsed());
            if event::poll(left).context("reading the terminal")? {
                if self.handle(&event::read().context("reading the terminal")?) {
                    return Ok(());
                }
            } else {
                let snapshot = stat::read(&self.rack.directories())?;
                self.update(snapshot);
            }
        }
    }

    fn update(&mut self, snapshot: Snapshot) {
        let elapsed = self.sampled_at.elapsed();
        self.sampled_at = Instant::now();
        self.processes.record(snapshot.processes.iter().map(|process| (process.pid, process_bytes(process))), elapsed);
        let connections = shown(&snapshot).map(|(process, connection)| (key(process, connection), bytes(connection)));
        self.connections.record(connections, elapsed);
        // What cannot be found out is not shown.
        let without_page =
            snapshot.processes.is_empty().then(|| without_page::find(&self.rack.directories(), false).ok());
        self.without_page = without_page.flatten().unwrap_or_default();
        self.snapshot = snapshot;
    }

    /// Handles a terminal event. Returns whether to quit.
    fn handle(&mut self, event: &Event) -> bool {
        let Event::Key(key) = event else { return false };
        if key.kind != KeyEventKind::Press {
            return false;
        }
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return true;
        }
        if self.view.handle(key.code) {
            return false;
        }
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return true,
            KeyCode::Down | KeyCode::Char('j') => self.position.scroll_down_by(1),
            KeyCode::Up | KeyCode::Char('k') => self.position.scroll_up_by(1),
            KeyCode::PageDown => self.position.scroll_down_by(20),
            KeyCode::PageUp => self.position.scroll_up_by(20),
            _ => {}
        }
        false
    }

    fn draw(&mut self, frame: &mut Frame) {
        let processes_height = (self.snapshot.processes.len() as u16 + 3).min(frame.area().height / 2);
        let heights = [Constraint::Length(1), Constraint::Length(processes_height), Constraint::Min(3)];
        let [head, upper, lower] = Layout::vertical(heights).areas(frame.area());
        frame.render_widget(Paragraph::new(self.headline()), head);
        if self.view.shows_keys {
            frame.render_widget(Paragraph::new(KEYS).block(Block::bordered().title("keys")), upper.union(lower));
            return;
        }
        if self.snapshot.processes.is_empty() {
            let is_unused = self.without_page.is_empty();
            let text = if is_unused { stat::nothing_running(&self.rack) } else { String::new() };
            let text = text + &self.without_page.describe();
            frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), upper.union(lower));
            return;
        }
        frame.render_widget(self.process_table(upper.width), upper);
        let table = self.connection_table(lower.width);
        frame.render_stateful_widget(table, lower, &mut self.position);
    }

    fn headline(&self) -> Line<'static> {
        let sum = |of: fn(&Process) -> u64| self.snapshot.processes.iter().map(of).fold(0, u64::saturating_add);
        let fallbacks = sum(|process| process.fallbacks.values().fold(0, |sum: u64, count| sum.saturating_add(*count)));
        Line::from(format!(
            "crosslane  {}  lanes {}  windows {}  kernel {}  fallbacks {fallbacks}  {}   ? shows the keys",
            self.rack,
            sum(|process| process.lane.connections_open),
            sum(|process| process.window.connections_open),
            sum(|process| process.kernel.connections_open),
            self.view.describe(),
        ))
    }

    /// Returns the table of processes. On a narrow screen the counts of each path matter most.
    fn process_table(&self, width: u16) -> Table<'static> {
        let columns = [
            Column::new("PROGRAM", 18),
            Column::new("PID", 8),
            Column::wide("NODE", 12),
            Column::new("LANES", 8),
            Column::wide("SENT", 11),
            Column::wide("RECEIVED", 11),
            Column::new("WINDOWS", 8),
            Column::wide("WINDOW BYTES", 12),
            Column::new("KERNEL", 8),
            Column::wide("KERNEL BYTES", 12),
            Column::second("RATE", 12),
            Column::rest("FALLBACKS", 9),
        ];
        let rows = self.snapshot.processes.iter().map(|process| {
            let rate = self.processes.rate(&process.pid);
            let connections = process.connections.iter().filter(|connection| is_shown(connection));
            let cells = vec![
                process.program.clone(),
                process.pid.to_string(),
                stat::node(process, &self.rack),
                stat::open_of_total(&process.lane),
                units::bytes(process.lane.bytes_sent),
                units::bytes(process.lane.bytes_received),
                stat::open_of_total(&process.window),
                units::bytes(process.window.bytes_sent.saturating_add(process.window.bytes_received)),
                stat::open_of_total(&process.kernel),
                units::bytes(process.kernel.bytes_sent.saturating_add(process.kernel.bytes_received)),
                per_second(rate),
                process.fallbacks.iter().map(|(reason, count)| format!("{reason} {count} ")).collect(),
            ];
            // A process is shown with its connections, by whatever these are found.
            let more = connections.map(|connection| connection_text(connection) + "\n").collect();
            SortableRow { cells, more, name: process.program.clone(), bytes: process_bytes(process), rate }
        });
        table(self.view.arrange(rows).into_iter(), &columns, width, "processes")
    }

    fn connection_table(&self, width: u16) -> Table<'static> {
        let longest = |of: fn(&Connection) -> Option<SocketAddr>| {
            let shown = shown(&self.snapshot).map(|(_, connection)| stat::address(of(connection)).len());
            shown.fold(ADDRESS_WIDTH_MIN, |longest, length| longest.max(length as u16))
        };
        let columns = [
            Column::new("PID", 8),
            Column::second("FD", 6),
            Column::new("PATH", 7),
            Column::second("ROLE", 8),
            Column::wide("LOCAL", longest(|connection| connection.local)),
            Column::new("PEER", longest(|connection| connection.peer)),
            Column::wide("SENT", 11),
            Column::wide("RECEIVED", 11),
            Column::new("RATE", 12),
            Column::wide("SLEEPS", 9),
            Column::second("UP", 7),
        ];
        let rows = shown(&self.snapshot).map(|(process, connection)| {
            let rate = self.connections.rate(&key(process, connection));
            let cells = vec![
                process.pid.to_string(),
                connection.fd.to_string(),
                stat::path(connection).to_owned(),
                connection.role.name().to_owned(),
                stat::address(connection.local),
                stat::address(connection.peer),
                units::bytes(connection.bytes_sent),
                units::bytes(connection.bytes_received),
                per_second(rate),
                connection.sleeps.to_string(),
                stat::age_since(connection.opened_at_ns),
            ];
            let (more, name) = (process.program.clone(), stat::address(connection.peer));
            SortableRow { cells, more, name, bytes: bytes(connection), rate }
        });
        table(self.view.arrange(rows).into_iter(), &columns, width, "connections")
    }
}

/// A column of a table on the screen.
struct Column {
    head: &'static str,
    width: u16,
    rank: Rank,
    takes_rest: bool,
}

/// Which columns are left out when not all fit: first those of the highest rank. A column that is shown is as wide as
/// its contents, since a port without its last digits would be another one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Always,
    Second,
    Wide,
}

impl Column {
    const fn new(head: &'static str, width: u16) -> Self {
        Self { head, width, rank: Rank::Always, takes_rest: false }
    }

    const fn wide(head: &'static str, width: u16) -> Self {
        Self { rank: Rank::Wide, ..Self::new(head, width) }
    }

    const fn second(head: &'static str, width: u16) -> Self {
        Self { rank: Rank::Second, ..Self::new(head, width) }
    }

    const fn rest(head: &'static str, width: u16) -> Self {
        Self { takes_rest: true, ..Self::new(head, width) }
    }

    fn constraint(&self) -> Constraint {
        if self.takes_rest { Constraint::Min(self.width) } else { Constraint::Length(self.width) }
    }
}

/// Returns a table with the columns of all ranks that fit in `width`.
fn table(
    rows: impl Iterator<Item = Vec<String>>,
    columns: &[Column],
    width: u16,
    title: &'static str,
) -> Table<'static> {
    const FRAME: u16 = 2;
    let widths = |to: Rank| columns.iter().filter(move |column| column.rank <= to).map(|column| column.width + 1);
    let fits = |rank: &Rank| width >= FRAME + widths(*rank).sum::<u16>() - 1;
    let shown_to = [Rank::Wide, Rank::Second].into_iter().find(fits).unwrap_or(Rank::Always);
    let is_shown = |column: &&Column| column.rank <= shown_to;
    let rows = rows.map(|cells| {
        let cells = cells.into_iter().zip(columns).filter(|(_, column)| is_shown(column));
        Row::new(cells.map(|(cell, _)| Cell::from(cell)))
    });
    let shown = || columns.iter().filter(is_shown);
    let head = Row::new(shown().map(|column| Cell::from(column.head))).style(Style::new().add_modifier(Modifier::BOLD));
    Table::new(rows, shown().map(Column::constraint)).header(head).block(Block::bordered().title(title))
}

fn shown(snapshot: &Snapshot) -> impl Iterator<Item = (&Process, &Connection)> {
    snapshot.processes.iter().flat_map(|process| {
        let shown = process.connections.iter().filter(|connection| is_shown(connection));
        shown.map(move |connection| (process, connection))
    })
}

fn key(process: &Process, connection: &Connection) -> ConnectionKey {
    (process.pid, connection.fd, connection.opened_at_ns)
}

fn bytes(connection: &Connection) -> u64 {
    connection.bytes_sent.saturating_add(connection.bytes_received)
}

fn per_second(rate: Option<u64>) -> String {
    rate.map_or_else(|| "-".to_owned(), |rate| format!("{}/s", units::bytes(rate)))
}

/// Returns what a connection is found by.
fn connection_text(connection: &Connection) -> String {
    let (path, role) = (stat::path(connection), connection.role.name());
    format!("{path} {role} {} {}", stat::address(connection.local), stat::address(connection.peer))
}

fn process_bytes(process: &Process) -> u64 {
    [process.lane, process.window, process.kernel]
        .iter()
        .fold(0, |sum: u64, totals| sum.saturating_add(totals.bytes_sent).saturating_add(totals.bytes_received))
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn drawn(screen: &mut Screen) -> String {
        drawn_in(screen, 140)
    }

    fn drawn_in(screen: &mut Screen, width: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, 20)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn an_empty_rack_shows_how_to_start_a_program() {
        let text = drawn(&mut Screen::new(Snapshot::default(), RackChoice::Directory("/r".into())));
        assert!(text.contains("Nothing runs over crosslane in /r."), "{text}");
    }

    #[test]
    fn a_connection_has_a_line_and_q_quits() {
        let rack = tempfile::tempdir().unwrap();
        let config = stats_page::PageConfig { rack: rack.path(), node: None, program: b"served" };
        let connection = stats_page::NewConnection {
            path: stats_page::DataPath::Lane,
            role: stats_page::Role::Connect,
            fd: 77,
            local: None,
            peer: "127.77.0.1:80".parse().ok(),
            reason: None,
        };
        let slot = stats_page::StatsPage::create(&config).open_connection(&connection);
        slot.add_sent(4096);
        let mut screen =
            Screen::new(stat::read(&[rack.path().to_owned()]).unwrap(), RackChoice::Directory(rack.path().into()));
        let text = drawn(&mut screen);
        for word in ["served", "77", "127.77.0.1:80", "4.0 KiB", "connections"] {
            assert!(text.contains(word), "{word} in\n{text}");
        }
        let narrow = drawn_in(&mut screen, 80);
        for head in ["PROGRAM", "LANES", "WINDOWS", "KERNEL", "FALLBACKS", "PATH", "PEER", " RATE", " UP"] {
            assert!(narrow.contains(head), "{head} in\n{narrow}");
        }
        assert!(narrow.contains("served") && narrow.contains("127.77.0.1:80") && !narrow.contains("LOCAL"), "{narrow}");
        for (width, has_second) in [(79, true), (70, false), (60, false)] {
            let narrow = drawn_in(&mut screen, width);
            assert!(narrow.contains("127.77.0.1:80 "), "{narrow}");
            assert_eq!(narrow.contains("ROLE"), has_second, "{narrow}");
        }
        let press = |character| Event::Key(KeyCode::Char(character).into());
        assert!(!screen.handle(&press('j')));
        let type_text = |screen: &mut Screen, text: &str| text.chars().all(|key| !screen.handle(&press(key)));
        // A filter finds the process by its connection, and the connection by its program.
        assert!(type_text(&mut screen, "/:80"));
        assert!(drawn(&mut screen).contains("served"), "{}", drawn(&mut screen));
        assert!(!screen.handle(&Event::Key(KeyCode::Esc.into())) && type_text(&mut screen, "/SERVED"));
        assert!(drawn(&mut screen).contains("127.77.0.1:80"), "{}", drawn(&mut screen));
        assert!(type_text(&mut screen, "q"), "q is a letter of the text");
        assert!(!drawn(&mut screen).contains("127.77.0.1:80"), "{}", drawn(&mut screen));
        assert!(!screen.handle(&Event::Key(KeyCode::Esc.into())) && type_text(&mut screen, "?"));
        assert!(drawn(&mut screen).contains("reverse the order"), "{}", drawn(&mut screen));
        assert!(type_text(&mut screen, "?"));
        assert!(screen.handle(&press('q')));
    }

    #[test]
    fn a_rate_needs_two_snapshots() {
        let mut rates = Rates::default();
        rates.record([(1, 1024)].into_iter(), Duration::from_secs(1));
        assert_eq!((rates.rate(&1), per_second(None).as_str()), (None, "-"));
        rates.record([(1, 5120), (2, 7)].into_iter(), Duration::from_secs(2));
        assert_eq!((per_second(rates.rate(&1)).as_str(), rates.rate(&2)), ("2.0 KiB/s", None));
        rates.record([(1, 0)].into_iter(), Duration::from_secs(2));
        assert_eq!(rates.rate(&1), Some(0), "a new process with the same PID");
    }
}
