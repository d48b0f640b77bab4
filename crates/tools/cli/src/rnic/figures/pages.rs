//! Turns values into figures with the published values alongside: tables and plots.

use plot::{Axis, Figure, Series, Style};

use super::jobs::FigureRow;
use super::{FigureData, Row, SOURCE};

/// Values from the SRNIC paper: figure, series, x, value, and the NIC that was measured.
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

struct FigureKind {
    name: &'static str,
    title: &'static str,
    x: &'static str,
    y: &'static str,
    axes: (Axis, Axis),
}

const SLOWDOWN: (Axis, Axis) = (Axis::Decades("size of the flow (B)"), Axis::Decades("slowdown"));

const fn slowdown(name: &'static str, title: &'static str) -> FigureKind {
    FigureKind { name, title, x: "bytes, at most", y: "slowdown", axes: SLOWDOWN }
}

const KINDS: [FigureKind; 14] = [
    FigureKind {
        name: "goodput-by-qps",
        title: "Goodput by number of queue pairs, 100 Gb/s",
        x: "queue pairs",
        y: "Gb/s",
        axes: (Axis::Decades("queue pairs"), Axis::Linear("goodput (Gb/s)")),
    },
    FigureKind {
        name: "contexts-by-qps",
        title: "PCIe bandwidth of context reads and writes of one NIC, 100 Gb/s",
        x: "queue pairs",
        y: "Gb/s",
        axes: (Axis::Decades("queue pairs"), Axis::Linear("both directions together (Gb/s)")),
    },
    FigureKind {
        name: "memory-by-qps",
        title: "Memory on chip",
        x: "queue pairs",
        y: "MB",
        axes: (Axis::Decades("queue pairs"), Axis::Decades("memory on chip (MB)")),
    },
    FigureKind {
        name: "goodput-by-loss",
        title: "Goodput of one queue pair by loss, 100 Gb/s",
        x: "loss, %",
        y: "Gb/s",
        axes: (Axis::Linear("packets lost (%)"), Axis::Linear("goodput (Gb/s)")),
    },
    FigureKind {
        name: "slow-path-by-loss",
        title: "The slow path of SRNIC by loss: a core's time, and headers",
        x: "loss, %",
        y: "%",
        axes: (Axis::Linear("packets lost (%)"), Axis::Linear("share (%)")),
    },
    FigureKind {
        name: "spray-by-skew",
        title: "Goodput over eight paths, relative to one path in order",
        x: "us that the longest path is longer",
        y: "%",
        axes: (Axis::Linear("longest path's additional delay (µs)"), Axis::Linear("goodput relative to in order (%)")),
    },
    FigureKind {
        name: "rate-by-size",
        title: "Messages a second, 200 Gb/s, PCIe generation 4",
        x: "bytes",
        y: "Mops/s",
        axes: (Axis::Bytes("message"), Axis::Decades("millions of messages a second")),
    },
    FigureKind {
        name: "latency-by-size",
        title: "Half of a round trip, one cable of 100 Gb/s",
        x: "bytes",
        y: "us",
        axes: (Axis::Bytes("message"), Axis::Decades("latency, p50 (µs)")),
    },
    slowdown("slowdown-256-mean", "Slowdown of flows, 256 hosts, mean"),
    slowdown("slowdown-256-p99", "Slowdown of flows, 256 hosts, p99"),
    slowdown("slowdown-1024-mean", "Slowdown of flows, 1,024 hosts, mean"),
    slowdown("slowdown-1024-p99", "Slowdown of flows, 1,024 hosts, p99"),
    slowdown("slowdown-4096-mean", "Slowdown of flows, 4,096 hosts, mean"),
    slowdown("slowdown-4096-p99", "Slowdown of flows, 4,096 hosts, p99"),
];

/// Returns the figures that have values, in the order of `KINDS`, with the published values.
pub fn figures(rows: Vec<FigureRow>) -> Vec<FigureData> {
    let figure = |kind: &FigureKind| {
        let of_kind = rows.iter().filter(|(name, _)| *name == kind.name);
        let rows: Vec<Row> = of_kind.map(|(_, row)| with_published(kind.name, row)).collect();
        let FigureKind { name, title, x, y, .. } = *kind;
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

/// Returns all figures as a Markdown page of tables.
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

/// Returns a figure as a plot with a line for each series and points for the published values.
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
        Series::new(format!("{name}, modelled"), Style::of_index(index), points)
    };
    let mut series: Vec<Series> = names.iter().enumerate().map(line).collect();
    for (index, name) in names.iter().enumerate() {
        let known = PUBLISHED.iter().filter(|(of, series, ..)| *of == figure.name && series == name);
        let points: Vec<(f64, f64)> = known.clone().map(|(_, _, x, y, _)| (*x, *y)).collect();
        if let Some((.., of)) = known.clone().next() {
            let style = Style::of_index(index).counterpart();
            series.push(Series::new(format!("{of}, published"), style, points));
        }
    }
    Figure { title: figure.title.to_owned(), x: axes.0, y: axes.1, series, notes: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pcie::result::Provenance;

    #[test]
    fn published_values_are_attached_only_to_their_own_points() {
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
        let plot = plot(&figures[1]);
        assert!(plot.svg().unwrap().contains("SRNIC, published"));
        let style = |title: &str| plot.series.iter().find(|series| series.title == title).unwrap().style;
        let (modelled, published) = (style("srnic, modelled"), style("SRNIC, published"));
        assert!(modelled.color == published.color && modelled.marker != published.marker, "{published:?}");
    }
}
