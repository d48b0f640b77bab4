//! Answers as figures: with what was published beside them, as tables and as plots.

use plot::{Axis, Figure, Series, Style};

use super::jobs::Answer;
use super::{FigureData, Row, SOURCE};

/// What the authors of SRNIC publish: figure, series, x, value, and of which NIC.
const PUBLISHED: [(&str, &str, f64, f64, &str); 8] = [
    ("goodput-by-qps", "srnic", 10_000.0, 97.0, "SRNIC"),
    ("goodput-by-qps", "connection-cache", 128.0, 97.0, "ConnectX-6"),
    ("goodput-by-qps", "connection-cache", 16_384.0, 52.0, "ConnectX-6"),
    ("memory-by-qps", "srnic", 10_000.0, 4.4, "SRNIC"),
    ("goodput-by-loss", "srnic", 1.0, 75.0, "SRNIC"),
    ("goodput-by-loss", "go-back-n", 1.0, 25.0, "ConnectX-6"),
    ("latency-by-size", "srnic", 64.0, 3.3, "SRNIC"),
    ("latency-by-size", "connection-cache", 64.0, 1.16, "ConnectX-6"),
];

struct Kind {
    name: &'static str,
    title: &'static str,
    x: &'static str,
    y: &'static str,
    axes: (Axis, Axis),
}

const SLOWDOWN: (Axis, Axis) = (Axis::Decades("size of the flow (B)"), Axis::Decades("slowdown"));

macro_rules! slowdown {
    ($name:literal, $title:literal) => {
        Kind { name: $name, title: $title, x: "bytes, at most", y: "slowdown", axes: SLOWDOWN }
    };
}

const KINDS: [Kind; 12] = [
    Kind {
        name: "goodput-by-qps",
        title: "Goodput of queue pairs that take turns, 100 Gb/s",
        x: "queue pairs",
        y: "Gb/s",
        axes: (Axis::Decades("queue pairs"), Axis::Linear("goodput (Gb/s)")),
    },
    Kind {
        name: "contexts-by-qps",
        title: "PCIe that contexts on their way there and back take of one NIC, 100 Gb/s",
        x: "queue pairs",
        y: "Gb/s",
        axes: (Axis::Decades("queue pairs"), Axis::Linear("both directions together (Gb/s)")),
    },
    Kind {
        name: "memory-by-qps",
        title: "Memory on chip",
        x: "queue pairs",
        y: "MB",
        axes: (Axis::Decades("queue pairs"), Axis::Decades("memory on chip (MB)")),
    },
    Kind {
        name: "goodput-by-loss",
        title: "Goodput of one queue pair by loss, 100 Gb/s",
        x: "loss, %",
        y: "Gb/s",
        axes: (Axis::Linear("packets lost (%)"), Axis::Linear("goodput (Gb/s)")),
    },
    Kind {
        name: "slow-path-by-loss",
        title: "The slow path of SRNIC by loss: a core's time, and headers",
        x: "loss, %",
        y: "%",
        axes: (Axis::Linear("packets lost (%)"), Axis::Linear("share (%)")),
    },
    Kind {
        name: "latency-by-size",
        title: "Half of a round trip, one cable of 100 Gb/s",
        x: "bytes",
        y: "us",
        axes: (Axis::Bytes("message"), Axis::Decades("latency, p50 (us)")),
    },
    slowdown!("slowdown-256-mean", "Slowdown of flows, 256 hosts, mean"),
    slowdown!("slowdown-256-p99", "Slowdown of flows, 256 hosts, p99"),
    slowdown!("slowdown-1024-mean", "Slowdown of flows, 1,024 hosts, mean"),
    slowdown!("slowdown-1024-p99", "Slowdown of flows, 1,024 hosts, p99"),
    slowdown!("slowdown-4096-mean", "Slowdown of flows, 4,096 hosts, mean"),
    slowdown!("slowdown-4096-p99", "Slowdown of flows, 4,096 hosts, p99"),
];

/// The figures that have values, in their order, with what was published.
pub fn figures(answers: Vec<Answer>) -> Vec<FigureData> {
    let figure = |kind: &Kind| {
        let of_kind = answers.iter().filter(|(name, _)| *name == kind.name);
        let rows: Vec<Row> = of_kind.map(|(_, row)| with_published(kind.name, row)).collect();
        let Kind { name, title, x, y, .. } = *kind;
        (!rows.is_empty()).then_some(FigureData { name, title, x, y, rows })
    };
    KINDS.iter().filter_map(figure).collect()
}

fn with_published(figure: &str, row: &Row) -> Row {
    let is_same = |(of, series, x, ..): &&(&str, &str, f64, f64, &str)| {
        *of == figure && *series == row.series && (x - row.x).abs() < 1e-9
    };
    let found = PUBLISHED.iter().find(is_same);
    Row { published: found.map(|known| known.3), published_of: found.map(|known| known.4), ..row.clone() }
}

/// All figures as one page of tables.
pub fn markdown(figures: &[FigureData], seed: u64) -> String {
    let mut page = format!(
        "# The RNIC's figures\n\nSeed {seed}. Values are *modelled* by `crosslane rnic figures`; *published* ones are \
         from {SOURCE}.\n"
    );
    for FigureData { title, x, y, rows, name } in figures {
        page += &format!("\n## {title}\n\n![{title}]({name}.svg)\n\n| series | {x} | {y}, modelled | published |\n");
        page += "|---|--:|--:|--:|\n";
        for row in rows {
            let published = match (row.published, row.published_of) {
                (Some(value), Some(of)) => format!("{value} ({of})"),
                _ => "-".to_owned(),
            };
            page += &format!("| {} | {} | {:.2} | {published} |\n", row.series, row.x, row.y);
        }
    }
    page
}

/// A figure as a plot: a line for each series, and points for what was published.
pub fn plot(figure: &FigureData) -> Figure {
    let axes = KINDS.iter().find(|kind| kind.name == figure.name).map_or(SLOWDOWN, |kind| kind.axes);
    let mut names: Vec<&str> = Vec::new();
    for row in &figure.rows {
        if !names.contains(&row.series.as_str()) {
            names.push(&row.series);
        }
    }
    let line = |(index, name): (usize, &&str)| {
        let mut points: Vec<(f64, f64)> =
            figure.rows.iter().filter(|row| row.series == **name).map(|row| (row.x, row.y)).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series { title: format!("{name}, modelled"), style: Style::of_index(index), points }
    };
    let mut series: Vec<Series> = names.iter().enumerate().map(line).collect();
    for (index, name) in names.iter().enumerate() {
        let known = PUBLISHED.iter().filter(|(of, series, ..)| *of == figure.name && series == name);
        let points: Vec<(f64, f64)> = known.clone().map(|(_, _, x, y, _)| (*x, *y)).collect();
        if let Some((.., of)) = known.clone().next() {
            let style = Style::of_index(names.len() + index).points_only();
            series.push(Series { title: format!("{of}, published"), style, points });
        }
    }
    Figure { title: figure.title.to_owned(), x: axes.0, y: axes.1, series }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pcie::result::Provenance;

    #[test]
    fn published_values_stand_beside_their_own_points_only() {
        let row = |series: &str, x| Row {
            series: series.to_owned(),
            x,
            y: 1.0,
            provenance: Provenance::Modelled,
            published: None,
            published_of: None,
        };
        let figures = figures(vec![
            ("goodput-by-loss", row("srnic", 1.0)),
            ("goodput-by-loss", row("irn", 1.0)),
            ("goodput-by-qps", row("connection-cache", 16_384.0)),
        ]);
        let values: Vec<Option<f64>> =
            figures.iter().flat_map(|figure| figure.rows.iter().map(|row| row.published)).collect();
        assert_eq!(values, [Some(52.0), Some(75.0), None]);
        let page = markdown(&figures, 7);
        assert!(
            page.contains("| srnic | 1 | 1.00 | 75 (SRNIC) |") && page.contains("| irn | 1 | 1.00 | - |"),
            "{page}"
        );
        assert!(plot(&figures[1]).svg().unwrap().contains("SRNIC, published"));
    }
}
