//! `lab-link DEVICE OWN NODES PEER [ROUNDS]`: trains this node's link with a peer over a device, then exchanges words
//! with the peer, ringing its doorbell each time.
//!
//! DEVICE is `pci:ADDRESS`, `vfio:ADDRESS`, `file:PATH` or `server:PATH`. The node with the lower slot sends first. If
//! the device has interrupts, a ring that does not arrive as an interrupt is a failure, because the memory is not
//! polled.

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fabric::device::{
    Device, DeviceConfig, DeviceDoorbell, DeviceInbound, DeviceLink, DeviceOutbound, NodeSlot, PciAccess,
};
use fabric::{Doorbell, Inbound, Link, LinkState, Outbound, WaitOutcome};
use lab::guest_tool;
use rustix::event::{PollFd, PollFlags, Timespec};

const USAGE: &str = "usage: lab-link pci:ADDRESS|vfio:ADDRESS|file:PATH|server:PATH OWN NODES PEER [ROUNDS]";
const ROUNDS: u64 = 100;
/// Time limit after which a wait counts as a hang.
const HANG_TIMEOUT: Duration = Duration::from_secs(600);
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Offset of the word. Its complement is at the end of the window.
const WORD: usize = 0;

fn main() -> ExitCode {
    guest_tool::main("lab-link", |arguments| {
        println!("lab-link: {}", run(arguments)?);
        Ok(())
    })
}

fn run(arguments: &[String]) -> Result<String> {
    let [device, own, nodes, peer, rounds @ ..] = arguments else { bail!(USAGE) };
    let slot = |text: &str| text.parse::<u8>().map(NodeSlot).context(USAGE);
    let (own, peer, nodes) = (slot(own)?, slot(peer)?, slot(nodes)?.0);
    ensure!(own != peer && own.0 < nodes && peer.0 < nodes, "nodes {own} and {peer} of {nodes}: {USAGE}");
    let rounds = rounds.first().map_or(Ok(ROUNDS), |text| text.parse()).context(USAGE)?;
    let device = open(device, &DeviceConfig::new(own, nodes))?;
    let mut link = device.link(peer);
    train(&device, &mut link)?;
    let endpoint = Endpoint {
        sends_first: own.0 < peer.0,
        inbound: link.inbound(),
        outbound: link.outbound(),
        doorbell: link.doorbell(),
    };
    for round in 1..=rounds {
        endpoint.round(round).with_context(|| format!("round {round} of {rounds} with node {peer}"))?;
    }
    let wakeups = if endpoint.doorbell.descriptor().is_some() { "woken by interrupts" } else { "woken by polling" };
    Ok(format!("{}; {rounds} rounds with node {peer}, {wakeups}", device.describe()))
}

fn open(device: &str, config: &DeviceConfig) -> Result<Device> {
    let opened = match device.split_once(':').context(USAGE)? {
        ("pci", address) => Device::open_pci(address, PciAccess::Sysfs, config),
        ("vfio", address) => Device::open_pci(address, PciAccess::Vfio, config),
        ("file", path) => Device::open_file(Path::new(path), config),
        ("server", path) => Device::connect_server(Path::new(path), config),
        _ => bail!(USAGE),
    };
    Ok(opened?)
}

fn train(device: &Device, link: &mut DeviceLink) -> Result<()> {
    let deadline = Instant::now() + HANG_TIMEOUT;
    while link.train() != LinkState::Up {
        ensure!(Instant::now() < deadline, "the link is not up after {} s", HANG_TIMEOUT.as_secs());
        device.poll()?;
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

struct Endpoint {
    sends_first: bool,
    inbound: DeviceInbound,
    outbound: DeviceOutbound,
    doorbell: DeviceDoorbell,
}

impl Endpoint {
    /// Sends a word and receives the same word, at the start and at the end of the windows.
    fn round(&self, round: u64) -> Result<()> {
        if self.sends_first {
            self.send(round);
            self.receive(round)
        } else {
            self.receive(round)?;
            self.send(round);
            Ok(())
        }
    }

    fn send(&self, round: u64) {
        self.outbound.store_u64(self.outbound.len_bytes() - size_of::<u64>(), !round, Ordering::Relaxed);
        self.outbound.fence();
        self.outbound.store_u64(WORD, round, Ordering::Release);
        self.outbound.fence();
        self.doorbell.ring();
    }

    fn receive(&self, round: u64) -> Result<()> {
        let deadline = Instant::now() + HANG_TIMEOUT;
        loop {
            self.wait_for_ring(deadline)?;
            if self.inbound.load_u64(WORD, Ordering::Acquire) == round {
                break;
            }
        }
        let last = self.inbound.load_u64(self.inbound.len_bytes() - size_of::<u64>(), Ordering::Relaxed);
        ensure!(
            last == !round,
            "the window's last word is {last:#x}, not {:#x}, though it was stored before the first",
            !round
        );
        Ok(())
    }

    /// Blocks until the peer rings.
    fn wait_for_ring(&self, deadline: Instant) -> Result<()> {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if let Some(descriptor) = self.doorbell.descriptor() {
            let mut polled = [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)];
            let timeout = Timespec::try_from(remaining).context("the time limit")?;
            let ready = rustix::event::poll(&mut polled, Some(&timeout))?;
            ensure!(ready == 1, "no interrupt after {} s", HANG_TIMEOUT.as_secs());
        }
        ensure!(self.doorbell.wait(Some(remaining)) == WaitOutcome::Rung, "no ring for {} s", HANG_TIMEOUT.as_secs());
        Ok(())
    }
}
