//! `crosslane bench interleaved`: one of the two loops of `crosslane bench windows`' four parties. A program of one
//! node, whose calls the loaded library answers, and the proxy of the other node, in one thread.

use std::net::{SocketAddr, SocketAddrV4};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use crosslane_bench::windows::interleaved::program::{Called, Neighbour, call, serve};
use crosslane_bench::windows::interleaved::{Asks, How, Length, Loop, places, rack};
use monitor::{Settings, open_device};
use proxy::Counters;
use proxy::driver::Embedded;

/// Which loop, and for how long.
#[derive(clap::Args)]
pub struct Options {
    /// The server of node a and the proxy of node b, or the client of node b and the proxy of node a
    #[arg(value_enum)]
    which: Loop,
    /// Where the device and the directories of the nodes are
    #[arg(long, value_name = "DIR")]
    places: PathBuf,
    /// Bytes of a message
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    message_bytes: u32,
    /// Whom of its parties the loop asks: both loops alike
    #[arg(long, value_enum, default_value_t = Asks::Both)]
    asks: Asks,
    /// Where the server listens
    #[arg(long, value_name = "ADDRESS", required_if_eq("which", "call"))]
    address: Option<SocketAddrV4>,
    /// How long to measure
    #[arg(long, value_name = "MS", default_value_t = 100)]
    milliseconds: u64,
    /// Measure so many round trips instead
    #[arg(long, value_name = "N")]
    trips: Option<u64>,
}

/// Goes round until the client has measured.
pub fn main(options: &Options) -> Result<()> {
    let mut neighbour = Proxy::new(options)?;
    let (size_bytes, asks) = (options.message_bytes as usize, options.asks);
    match (options.which, options.address) {
        (Loop::Call, Some(address)) => {
            let length = options.trips.map_or(Length::Milliseconds(options.milliseconds), Length::Trips);
            say(&call(address, How { size_bytes, asks, length }, &mut neighbour)?);
        }
        _ => serve(size_bytes, asks, &mut neighbour, |line| println!("{line}"))?,
    }
    let Counters { frames_sent, bytes_sent, .. } = neighbour.proxy.counters();
    println!("frames_sent {frames_sent}\nbytes_sent {bytes_sent}");
    Ok(())
}

fn say(called: &Called) {
    for (ns, count) in called.latencies.counts() {
        println!("hist {ns:.2} {count}");
    }
    let Called { latencies, trips, idle_turn_ns, idle_receive_ns } = called;
    println!("max_ns {:.2}\ntrips {trips}", latencies.max_ns());
    println!("idle_turn_ns {idle_turn_ns:.2}\nidle_receive_ns {idle_receive_ns:.2}");
}

/// The other party.
struct Proxy {
    proxy: Embedded,
    turns: u32,
}

/// Turns between two looks whether something has gone wrong, which are a system call each.
const TURNS_PER_LOOK: u32 = 4096;

impl Proxy {
    fn new(options: &Options) -> Result<Self> {
        let (peer, slot) = options.which.slots();
        let (rack, places) = (rack(), places(&options.places));
        let device = open_device(&rack, slot, &places)?;
        let command = std::env::current_exe().context("finding this program")?;
        let settings = Settings { rack, slot, places, command, etcd: None, replaces_proxy: false };
        let configuration = settings.configuration(None);
        Ok(Self { proxy: Embedded::new(configuration, &device, peer as u8)?, turns: 0 })
    }
}

impl Neighbour for Proxy {
    #[inline]
    fn turn(&mut self) -> Result<bool> {
        self.turns = self.turns.wrapping_add(1);
        match self.turns.is_multiple_of(TURNS_PER_LOOK).then(|| self.proxy.complaint()).flatten() {
            Some(complaint) => bail!("{complaint}"),
            None => Ok(self.proxy.turn()),
        }
    }

    fn carried_bytes(&self) -> (u64, u64) {
        let Counters { bytes_sent, bytes_received, .. } = self.proxy.counters();
        (bytes_sent, bytes_received)
    }

    fn mirror(&mut self, address: SocketAddrV4) -> Result<()> {
        self.proxy.mirror(SocketAddr::V4(address)).with_context(|| format!("standing in for {address}"))
    }

    fn has_connections(&self) -> bool {
        self.proxy.connections() > 0
    }

    fn link(&mut self) -> Result<bool> {
        let is_there = self.proxy.train();
        self.turn().map(|_| is_there)
    }
}
