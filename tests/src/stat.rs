//! The output of `crosslane stat --json`.

use serde_json::Value;

/// The output of one `crosslane stat --json`.
#[derive(Clone, Debug)]
pub struct Stat(Value);

/// Bytes and connections by path, of one process or several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes sent and received over lanes.
    pub lane_bytes: u64,
    /// Bytes sent and received over kernel TCP.
    pub kernel_bytes: u64,
    /// Connections that ever were over lanes.
    pub lane_connections: u64,
    /// Connections that ever were over kernel TCP.
    pub kernel_connections: u64,
}

impl Stat {
    /// Parses the output; panics if it does not match the schema.
    #[track_caller]
    pub fn parse(text: &str) -> Self {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("stat --json: {error}\n{text}"));
        assert!(value["processes"].is_array(), "stat --json has no processes:\n{text}");
        Self(value)
    }

    /// Processes whose program's name contains a word.
    pub fn named<'a>(&'a self, program: &'a str) -> impl Iterator<Item = &'a Value> {
        self.processes().filter(move |process| text_of(process, "program").contains(program))
    }

    pub(crate) fn processes(&self) -> impl Iterator<Item = &Value> {
        self.0["processes"].as_array().into_iter().flatten()
    }

    /// Sum over the processes whose program's name contains a word.
    pub fn traffic_of(&self, program: &str) -> Traffic {
        self.named(program).map(traffic).fold(Traffic::default(), Traffic::plus)
    }

    /// The traffic of one process.
    pub fn traffic_of_pid(&self, pid: u32) -> Option<Traffic> {
        self.processes().find(|process| process["pid"].as_u64() == Some(pid.into())).map(traffic)
    }
}

impl Traffic {
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            lane_bytes: self.lane_bytes + other.lane_bytes,
            kernel_bytes: self.kernel_bytes + other.kernel_bytes,
            lane_connections: self.lane_connections + other.lane_connections,
            kernel_connections: self.kernel_connections + other.kernel_connections,
        }
    }

    /// The maximum of each count.
    pub fn max(self, other: Self) -> Self {
        Self {
            lane_bytes: self.lane_bytes.max(other.lane_bytes),
            kernel_bytes: self.kernel_bytes.max(other.kernel_bytes),
            lane_connections: self.lane_connections.max(other.lane_connections),
            kernel_connections: self.kernel_connections.max(other.kernel_connections),
        }
    }
}

pub(crate) fn traffic(process: &Value) -> Traffic {
    let total = |name: &str| {
        let value = process["totals"][name].as_u64();
        value.unwrap_or_else(|| panic!("stat --json: no number totals.{name} in {process}"))
    };
    Traffic {
        lane_bytes: total("lane_bytes_sent") + total("lane_bytes_received"),
        kernel_bytes: total("kernel_bytes_sent") + total("kernel_bytes_received"),
        lane_connections: total("lane_connections_total"),
        kernel_connections: total("kernel_connections_total"),
    }
}

fn text_of<'a>(process: &'a Value, name: &str) -> &'a str {
    process[name].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str = r#"{"processes": [
        {"pid": 7, "program": "nginx", "totals": {
            "lane_bytes_sent": 1, "lane_bytes_received": 2, "lane_connections_total": 16,
            "kernel_bytes_sent": 4, "kernel_bytes_received": 8, "kernel_connections_total": 32}},
        {"pid": 8, "program": "nginx", "totals": {
            "lane_bytes_sent": 1, "lane_bytes_received": 2, "lane_connections_total": 1,
            "kernel_bytes_sent": 0, "kernel_bytes_received": 0, "kernel_connections_total": 0}}]}"#;

    #[test]
    fn traffic_of_one_and_of_all_workers() {
        let stat = Stat::parse(ANSWER);
        let both = Traffic { lane_bytes: 6, kernel_bytes: 12, lane_connections: 17, kernel_connections: 32 };
        assert_eq!(stat.traffic_of("nginx"), both);
        assert_eq!(stat.traffic_of_pid(8).unwrap().lane_bytes, 3);
        assert_eq!(stat.traffic_of_pid(9), None);
        assert_eq!(stat.traffic_of("redis"), Traffic::default());
    }
}
