//! Time series of a run as CSV in long format: `time_us,kind,object,value`.
//!
//! | kind | object | value |
//! |---|---|---|
//! | `queue_bytes` | a link's direction, from a switch: `s0->h3` | bytes queued at the switch |
//! | `pauses` | a link's direction: `h3->s0` | how often its sender has been paused since the start |
//! | `window_bytes` | a sending queue pair with an active flow: `h0->h3 qp 17` | most bytes in flight |
//! | `rate_gbps` | the same | rate allowed by congestion control |
//!
//! A row is written when a value differs from that of the sample before; before its first row a value is 0. A queue
//! pair's value is empty from the sample at which it has no active flow.

use std::collections::BTreeMap;
use std::io::{self, Write};

use rnic::nic::SendLimit;
use sim::{Span, Time};

use crate::network::Network;
use crate::rdma::RdmaEndpoint;
use crate::results::{csv_field, microseconds};
use crate::topology::{HostId, NetworkNode, Topology};

/// The shortest interval between samples.
pub const INTERVAL_MIN: Span = Span::from_ps(100_000);
/// The longest interval between samples, in nanoseconds.
const INTERVAL_NS_MAX: f64 = 1e12;

/// Parses an interval between samples, such as `10 us`.
///
/// # Errors
/// When the text is not a time, or the interval is too short or too long.
pub fn parse_interval(text: &str) -> Result<Span, String> {
    let interval = config::parse_nanoseconds(text).filter(|ns| *ns <= INTERVAL_NS_MAX).map(Span::from_ns);
    interval.filter(|interval| *interval >= INTERVAL_MIN).ok_or_else(|| {
        format!("'{text}' is not a time from 100 ns to 1000 s; write nanoseconds, or a time as in \"10 us\"")
    })
}

/// Writes time series of a run.
pub struct SeriesWriter<W: Write> {
    writer: W,
    interval: Span,
    hosts: Vec<String>,
    /// By direction of a link: its name.
    names: Vec<String>,
    /// By direction of a link: the bytes queued and the pauses of the last sample.
    directions: Vec<(u64, u64)>,
    /// By host and number of a sending queue pair: its receiver and its limit in the last sample.
    sends: BTreeMap<(u32, u32), (HostId, SendLimit)>,
}

impl<W: Write> SeriesWriter<W> {
    /// Creates a writer that samples at every multiple of `interval`, and writes the header line.
    ///
    /// # Errors
    /// When the writer fails.
    ///
    /// # Panics
    /// If the interval is below [`INTERVAL_MIN`].
    pub fn new(mut writer: W, interval: Span, topology: &Topology) -> io::Result<Self> {
        assert!(interval >= INTERVAL_MIN, "an interval of {interval}; at least {INTERVAL_MIN}");
        writeln!(writer, "time_us,kind,object,value")?;
        let names = direction_names(topology);
        let hosts = (0..topology.hosts()).map(|host| topology.name(NetworkNode::Host(HostId(host))).to_owned());
        let (hosts, directions) = (hosts.collect(), vec![(0, 0); names.len()]);
        Ok(Self { writer, interval, hosts, names, directions, sends: BTreeMap::new() })
    }

    /// Runs a network like [`Network::run_flows`], and samples it.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn run(&mut self, network: &mut Network<RdmaEndpoint>, end: Time) -> io::Result<bool> {
        // Nothing happens before the first flow's start, which files may set late.
        let first_start = network.flows().first().map_or(Span::ZERO, |flow| flow.start.since(Time::ZERO));
        let mut at = Time::ZERO + self.interval * (first_start.ps() / self.interval.ps()).max(1);
        let mut events = 0;
        while at < end {
            if network.run_flows(at) {
                self.sample(network.now(), network)?; // the last state, at the last flow's end
                self.writer.flush()?;
                return Ok(true);
            }
            // Nothing changes without an event.
            if network.counters().events != events {
                events = network.counters().events;
                self.sample(at, network)?;
            }
            at += self.interval;
        }
        let is_done = network.run_flows(end);
        self.sample(network.now(), network)?;
        self.writer.flush()?;
        Ok(is_done)
    }

    fn sample(&mut self, now: Time, network: &Network<RdmaEndpoint>) -> io::Result<()> {
        let time = microseconds(now.since(Time::ZERO));
        for (index, direction) in network.link_directions().enumerate() {
            let last = &mut self.directions[index];
            for (kind, last, value) in
                [("queue_bytes", &mut last.0, direction.queued_bytes), ("pauses", &mut last.1, direction.pauses)]
            {
                if *last != value {
                    *last = value;
                    writeln!(self.writer, "{time},{kind},{},{value}", self.names[index])?;
                }
            }
        }
        let mut sends = BTreeMap::new();
        for (host, endpoint) in network.endpoints().iter().enumerate() {
            for send in endpoint.active_sends(now) {
                sends.insert((host as u32, send.qp.0), (send.to, send.limit));
            }
        }
        let before = std::mem::replace(&mut self.sends, sends.clone());
        for (key, (to, limit)) in before.iter().filter(|(key, _)| !sends.contains_key(key)) {
            self.write_limit(&time, *key, *to, *limit, true)?;
        }
        for (key, send) in sends.iter().filter(|(key, send)| before.get(key) != Some(send)) {
            self.write_limit(&time, *key, send.0, send.1, false)?;
        }
        Ok(())
    }

    fn write_limit(
        &mut self,
        time: &str,
        (host, qp): (u32, u32),
        to: HostId,
        limit: SendLimit,
        is_end: bool,
    ) -> io::Result<()> {
        let (kind, value) = match limit {
            SendLimit::None => return Ok(()),
            SendLimit::WindowBytes(bytes) => ("window_bytes", bytes.to_string()),
            SendLimit::RateBps(bps) => ("rate_gbps", format!("{:.6}", bps / 1e9)),
        };
        let value = if is_end { String::new() } else { value };
        let object = format!("{}->{} qp {qp}", self.hosts[host as usize], self.hosts[to.0 as usize]);
        writeln!(self.writer, "{time},{kind},{},{value}", csv_field(&object))
    }
}

/// Returns the names of all directions of links; parallel links are numbered from the second on.
fn direction_names(topology: &Topology) -> Vec<String> {
    let mut parallel = BTreeMap::new();
    let mut names = Vec::new();
    for link in topology.links() {
        for ends in [link.ends, [link.ends[1], link.ends[0]]] {
            let name = format!("{}->{}", topology.name(ends[0]), topology.name(ends[1]));
            let count = parallel.entry(name.clone()).or_insert(0);
            *count += 1;
            names.push(csv_field(&if *count == 1 { name } else { format!("{name} {count}") }));
        }
    }
    names
}
