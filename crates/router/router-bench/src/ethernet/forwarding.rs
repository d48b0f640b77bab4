//! The router between two of its ports, on a separate thread.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use ipnet::IpNet;
use router::{Config, Forwarder, Hop, NodeId, Output, Pool, Port, PortConfig, PortId, Rib, Time, VECTOR_PACKETS_MAX};
use router_ports::ethernet::{Backend, open};
use router_ports::{LocalAddresses, Namespace};

use super::topology::{Destination, HOSTS, NODE, PORTS, gateway};
use super::{Error, Subject, system};
use crate::clock::Allowance;
use crate::processor::pin_to_usable;

const BUFFERS: u32 = 4096;
const BUFFER_BYTES: u16 = 2048;
const HEADROOM_BYTES: u16 = 64;
/// The largest number of packets queued for a port.
const QUEUE_PACKETS_MAX: usize = 1024;
/// Loop iterations between two checks of the timers.
const ITERATIONS_BETWEEN_TIMERS: u32 = 256;
/// The longest time of an iteration: several times what the kernel needs to receive and to send a frame.
const ALLOWANCE: Allowance = Allowance { iteration_ns: 20_000, packet_ns: 10_000 };

/// Controls the router's thread.
#[derive(Default)]
struct ThreadControl {
    runs: AtomicBool,
    ends: AtomicBool,
    /// The longest time, in ns, for which the thread was to run but was not scheduled.
    stall_ns_max: AtomicU64,
}

/// The thread of a router. It sleeps unless it is to run, and ends when this value is dropped.
pub struct Forwarding {
    control: Arc<ThreadControl>,
    thread: Option<JoinHandle<()>>,
}

/// A guard: the router runs while it exists.
pub struct Running<'a>(&'a Forwarding);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.control.runs.store(false, Ordering::Relaxed);
    }
}

impl Forwarding {
    /// Starts the thread. Returns `None` if the subject is not the router.
    pub fn start(
        subject: Subject,
        node: Arc<Namespace>,
        destinations: &[Destination],
    ) -> Result<Option<Forwarding>, Error> {
        let backend = match subject {
            Subject::Kernel | Subject::KernelSteered => return Ok(None),
            Subject::Xdp => Backend::Xdp,
            Subject::PacketSocket => Backend::PacketSocket,
        };
        let control = Arc::new(ThreadControl::default());
        let (thread_control, destinations) = (control.clone(), destinations.to_vec());
        let (report, reported) = mpsc::channel();
        let thread = thread::spawn(move || {
            pin_to_usable(1);
            let entered = node.enter().map_err(system("entering a network namespace"));
            match entered.and_then(|()| Router::new(backend, &destinations)) {
                Ok(mut router) => {
                    let _ = report.send(Ok(()));
                    router.run(&thread_control);
                }
                Err(error) => drop(report.send(Err(error))),
            }
        });
        let forwarding = Forwarding { control, thread: Some(thread) };
        match reported.recv() {
            Ok(result) => result.map(|()| Some(forwarding)),
            Err(_) => Err(system("starting a thread")(std::io::ErrorKind::Other.into())),
        }
    }

    /// Lets the router run until the returned guard is dropped.
    pub fn run(&self) -> Running<'_> {
        self.control.runs.store(true, Ordering::Relaxed);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
        Running(self)
    }

    /// Returns the longest stall since the last call, in ns.
    pub fn take_stall_ns_max(&self) -> u64 {
        self.control.stall_ns_max.swap(0, Ordering::Relaxed)
    }
}

impl Drop for Forwarding {
    fn drop(&mut self) {
        self.control.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // An error of the thread has already been reported, or appears in the figures.
            let _ = thread.join();
        }
    }
}

struct Router {
    ports: [Box<dyn Port + Send>; 2],
    forwarder: Forwarder,
    _rib: Rib,
    pool: Pool,
    output: Output,
    begun: Instant,
}

impl Router {
    fn new(backend: Backend, destinations: &[Destination]) -> Result<Router, Error> {
        let local = LocalAddresses::new();
        for address in NODE.as_flattened() {
            local.insert(address.addr()).map_err(system("registering an address"))?;
        }
        let opened = [open(PORTS[0], Some(backend), &[], &local)?, open(PORTS[1], Some(backend), &[], &local)?];
        let (mut rib, tables) = Rib::new().map_err(system("memory for tables"))?;
        let mut forwarder = Forwarder::new(Config::new(NodeId(0)), tables);
        let mut pool = Pool::new(BUFFERS, BUFFER_BYTES, HEADROOM_BYTES);
        let mut output = Output::new(QUEUE_PACKETS_MAX);
        for (side, port) in opened.iter().enumerate() {
            let mut config =
                PortConfig::new(port.interface.mac, port.interface.mtu_bytes as u16).with_addresses(NODE[side]);
            config.has_kernel = port.port.has_kernel();
            let set = forwarder.set_port(Time::ZERO, PortId(side as u8), config, &mut pool, &mut output);
            set.map_err(|error| system("setting a port")(std::io::Error::other(error)))?;
        }
        let mut hop = |gateway: IpAddr| {
            let pinned = forwarder.pin_adjacency(Time::ZERO, PortId(1), gateway, &mut pool, &mut output);
            let adjacency = pinned.map_err(|error| system("a neighbour")(std::io::Error::other(error)))?;
            Ok::<_, Error>(Hop { node: NodeId(0), port: PortId(1), adjacency })
        };
        let hops = [hop(HOSTS[1][0].addr())?, hop(HOSTS[1][1].addr())?];
        // The answers of IPv6 neighbours are sent to these addresses.
        for address in NODE.as_flattened() {
            rib.announce(NodeId(0), IpNet::from(address.addr()), 0, &[Hop::kernel(NodeId(0))])?;
        }
        for (prefix, address) in destinations {
            let hop = hops[usize::from(gateway(*address).is_ipv6())];
            rib.announce(NodeId(0), *prefix, 1, &[hop])?;
        }
        let ports = opened.map(|opened| opened.port);
        Ok(Router { ports, forwarder, _rib: rib, pool, output, begun: Instant::now() })
    }

    fn run(&mut self, control: &ThreadControl) {
        let mut polled_ns = None;
        while !control.ends.load(Ordering::Relaxed) {
            if control.runs.load(Ordering::Relaxed) {
                let stall_ns = self.run_iterations(&mut polled_ns);
                control.stall_ns_max.fetch_max(stall_ns, Ordering::Relaxed);
            } else {
                thread::park();
                // The thread was not to run in this time.
                polled_ns = None;
            }
        }
    }

    /// Runs a bounded number of iterations without checking the control flags, and returns the longest stall in ns.
    /// `polled_ns` is the time at which the previous iteration began, if there was one.
    fn run_iterations(&mut self, polled_ns: &mut Option<u64>) -> u64 {
        let mut frames = Vec::with_capacity(VECTOR_PACKETS_MAX);
        let (mut received, mut stall_ns_max) = (0, 0);
        for _ in 0..ITERATIONS_BETWEEN_TIMERS {
            let now_ns = self.now_ns();
            let now = Time::from_ns(now_ns);
            let iteration_ns = now_ns - polled_ns.replace(now_ns).unwrap_or(now_ns);
            stall_ns_max = stall_ns_max.max(ALLOWANCE.stall_ns(iteration_ns, received));
            received = 0;
            for side in [0, 1] {
                // A port that fails forwards nothing, which the figures show.
                let _ = self.ports[side].receive(&mut self.pool, &mut frames, VECTOR_PACKETS_MAX);
                received += frames.len() as u64;
                if !frames.is_empty() {
                    let (pool, output) = (&mut self.pool, &mut self.output);
                    self.forwarder.ingress(now, PortId(side as u8), &mut frames, pool, output);
                }
            }
            self.transmit();
        }
        let now = Time::from_ns(self.now_ns());
        self.forwarder.poll(now, &mut self.pool, &mut self.output);
        self.transmit();
        self.output.events.clear();
        self.output.to_kernel.drain(..).for_each(|packet| self.pool.free(packet));
        stall_ns_max
    }

    fn transmit(&mut self) {
        for (port, queue) in self.ports.iter_mut().zip(&mut self.output.to_ports) {
            if !queue.is_empty() {
                let _ = port.transmit(&mut self.pool, queue);
            }
        }
    }

    fn now_ns(&self) -> u64 {
        self.begun.elapsed().as_nanos() as u64
    }
}
