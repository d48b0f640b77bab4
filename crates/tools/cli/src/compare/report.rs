//! The report of a comparison.

use std::collections::BTreeMap;

use machine::Machine;
use serde::Serialize;
use stats::{Align, Ratio, Table, median, ratios};

use super::trial::Trial;
use super::{Side, Trials};

pub const SCHEMA: &str = "crosslane-compare/1";

/// The result of a comparison; docs/compare-result.schema.json describes it.
#[derive(Serialize)]
pub struct Report {
    schema: &'static str,
    provenance: &'static str,
    command: String,
    rounds: usize,
    machine: Machine,
    kernel: Measured,
    lanes: Measured,
    /// Times of kernel TCP by those of lanes, formed round by round.
    ratios: Ratios,
    connections: Connections,
}

/// The runs of one side.
#[derive(Serialize)]
struct Measured {
    wall_s: Times,
    cpu_s: Times,
    /// The last lines of the client's output in the last round.
    output: Vec<String>,
}

/// A time of each round.
#[derive(Serialize)]
struct Times {
    median: f64,
    min: f64,
    max: f64,
    rounds: Vec<f64>,
}

#[derive(Serialize)]
struct Ratios {
    wall: Ratio,
    cpu: Ratio,
}

/// Busy connections of the runs over lanes, by what carried them. Others use kernel TCP and are not counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Connections {
    /// Over lanes on this machine.
    pub lane: u64,
    /// Over windows to another node.
    pub window: u64,
    /// Over kernel TCP nevertheless.
    pub kernel: u64,
    /// Why, and how often.
    pub reasons: BTreeMap<String, u64>,
}

impl Connections {
    pub fn add(&mut self, other: &Self) {
        self.lane += other.lane;
        self.window += other.window;
        self.kernel += other.kernel;
        for (reason, count) in &other.reasons {
            *self.reasons.entry(reason.clone()).or_default() += count;
        }
    }

    /// Returns the number of those that used no kernel TCP.
    pub fn over_lanes(&self) -> u64 {
        self.lane + self.window
    }

    /// Returns the reasons for kernel TCP with their counts.
    pub fn reasons(&self) -> String {
        let reasons: Vec<String> = self.reasons.iter().map(|(name, count)| format!("{name} {count}")).collect();
        reasons.join(", ")
    }

    fn sentence(&self) -> String {
        if self.over_lanes() == 0 && self.reasons.is_empty() {
            return "No connection used a lane: the client made none that carried three requests or more, or none. Both \
                    sides are kernel TCP, once with the library and once without it."
                .to_owned();
        }
        let mut parts = vec![format!("{} over lanes", self.lane)];
        if self.window > 0 {
            parts.push(format!("{} over windows", self.window));
        }
        match self.reasons.is_empty() {
            true => parts.push("none over kernel TCP".to_owned()),
            false => parts.push(format!("{} over kernel TCP nevertheless ({})", self.kernel, self.reasons())),
        }
        format!("Busy connections of the runs over lanes: {}.", parts.join(", "))
    }
}

impl Times {
    fn of(rounds: Vec<f64>) -> Self {
        let (min, max) = (f64::min, f64::max);
        Self {
            median: median(rounds.iter().copied()).unwrap_or(0.0),
            min: rounds.iter().copied().reduce(min).unwrap_or(0.0),
            max: rounds.iter().copied().reduce(max).unwrap_or(0.0),
            rounds,
        }
    }

    fn text(&self) -> String {
        format!("{} ({} to {})", seconds(self.median), seconds(self.min), seconds(self.max))
    }
}

/// Formats seconds for people: `1.24 s`, `38.0 ms`.
fn seconds(value: f64) -> String {
    let (number, unit) = if value >= 1.0 { (value, "s") } else { (value * 1e3, "ms") };
    let decimals = if number >= 100.0 {
        0
    } else if number >= 10.0 {
        1
    } else {
        2
    };
    format!("{number:.decimals$} {unit}")
}

impl Measured {
    fn of(mut trials: Vec<Trial>) -> Self {
        let output = trials.last_mut().map(|last| std::mem::take(&mut last.output)).unwrap_or_default();
        let times = |of: fn(&Trial) -> f64| Times::of(trials.iter().map(of).collect());
        Self { wall_s: times(|trial| trial.wall_s), cpu_s: times(|trial| trial.cpu_s), output }
    }
}

impl Report {
    /// Returns the summary of all rounds.
    pub fn of(command: String, machine: Machine, trials: Trials) -> Self {
        let Trials { kernel, lanes, connections } = trials;
        let (rounds, kernel, lanes) = (lanes.len(), Measured::of(kernel), Measured::of(lanes));
        let ratio = |over: &Times, under: &Times| Ratio::of(&ratios(&over.rounds, &under.rounds));
        let ratios = Ratios { wall: ratio(&kernel.wall_s, &lanes.wall_s), cpu: ratio(&kernel.cpu_s, &lanes.cpu_s) };
        Self { schema: SCHEMA, provenance: "measured", command, rounds, machine, kernel, lanes, ratios, connections }
    }

    /// Returns the report for people.
    pub fn text(&self) -> String {
        let mut table = Table::new(&[
            ("", Align::Left),
            ("KERNEL TCP", Align::Right),
            ("LANES", Align::Right),
            ("TIMES LESS", Align::Right),
        ]);
        let mut row = |name: &str, kernel: &Times, lanes: &Times, ratio: &Ratio| {
            let [low, high] = ratio.interval.map(|ratio| units::times(Some(ratio)));
            let ratio = format!("{} ({low} to {high})", units::times(Some(ratio.median)));
            table.row(vec![name.to_owned(), kernel.text(), lanes.text(), ratio]);
        };
        row("wall time", &self.kernel.wall_s, &self.lanes.wall_s, &self.ratios.wall);
        row("processor time", &self.kernel.cpu_s, &self.lanes.cpu_s, &self.ratios.cpu);
        let interval = match self.rounds {
            rounds if rounds < Ratio::ROUNDS_MIN => "smallest and largest ratio",
            _ => "95% interval",
        };
        let outputs = [(Side::Kernel, &self.kernel.output), (Side::Lanes, &self.lanes.output)];
        let outputs = outputs.map(|(side, lines)| {
            let lines: String = lines.iter().map(|line| format!("  {line}\n")).collect();
            let lines = if lines.is_empty() { "  nothing\n".to_owned() } else { lines };
            format!("\nOver {}, the command printed in the last round:\n{lines}", side.name())
        });
        let busy = self.machine.busy_warning().map(|warning| format!("Note: {warning}.\n")).unwrap_or_default();
        format!(
            "{}: {} alternating rounds, measured\n\n{}\nMedian (min to max) of the whole command, its start included; \
             times less: median ({interval}).\n{}\n{busy}{}",
            self.command,
            self.rounds,
            table.render(),
            self.connections.sentence(),
            outputs.concat()
        )
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    fn trials(walls_s: &[f64], output: &str) -> Vec<Trial> {
        let trial = |wall_s: &f64| Trial {
            wall_s: *wall_s,
            cpu_s: wall_s / 2.0,
            status: ExitStatus::from_raw(0),
            output: vec![output.to_owned()],
        };
        walls_s.iter().map(trial).collect()
    }

    #[test]
    fn ratios_are_formed_round_by_round_and_both_outputs_are_shown() {
        let reasons = BTreeMap::from([("no_answer".to_owned(), 2)]);
        let connections = Connections { lane: 6, window: 0, kernel: 2, reasons };
        let (kernel, lanes) = (trials(&[2.0, 20.0, 2.0], "slow"), trials(&[0.5, 5.0, 0.5], "fast"));
        let report = Report::of("client".to_owned(), Machine::describe(None), Trials { kernel, lanes, connections });
        assert_eq!((report.ratios.wall.median, report.ratios.cpu.median), (4.0, 4.0));
        let text = report.text();
        for words in [
            "client: 3 alternating rounds",
            "2.00 s (2.00 s to 20.0 s)",
            "500 ms (500 ms to 5.00 s)",
            "smallest and largest",
            "6 over lanes, 2 over kernel TCP nevertheless (no_answer 2)",
            "  slow\n",
            "  fast\n",
        ] {
            assert!(text.contains(words), "{words:?} is missing:\n{text}");
        }
    }

    #[test]
    fn a_client_of_short_connections_is_compared_and_told_so() {
        let connections = Connections::default();
        let (kernel, lanes) = (trials(&[2.0], "one"), trials(&[2.0], "two"));
        let trials = Trials { kernel, lanes, connections };
        let text = Report::of("client".to_owned(), Machine::describe(None), trials).text();
        assert!(text.contains("No connection used a lane") && text.contains("1.00x"), "{text}");
    }
}
