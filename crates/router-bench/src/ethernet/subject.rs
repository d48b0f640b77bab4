//! The router between two of its ports, on a thread of its own.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use ipnet::{IpNet, Ipv4Net};
use router::{Config, Forwarder, Hop, NodeId, Output, Pool, Port, PortConfig, PortId, Rib, Time, VECTOR_PACKETS_MAX};
use router_ports::ethernet::{Backend, open};
use router_ports::{LocalAddresses, Namespace};

use super::bed::{HOSTS, NODE, PORTS, pin};
use super::{Error, Subject, system};

const BUFFERS: u32 = 4096;
const BUFFER_BYTES: u16 = 2048;
const HEADROOM_BYTES: u16 = 64;
/// Packets that wait for a port.
const QUEUE_PACKETS_MAX: usize = 1024;
/// Timers are looked at each so many turns.
const TURNS_BETWEEN_TIMERS: u32 = 256;

/// What the thread is to do.
#[derive(Default)]
struct Orders {
    runs: AtomicBool,
    ends: AtomicBool,
}

/// A router's thread. It sleeps unless it is told to run, and ends with this.
pub struct Forwarding {
    orders: Arc<Orders>,
    thread: Option<JoinHandle<()>>,
}

/// While this lives, the router runs.
pub struct Running<'a>(&'a Forwarding);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.orders.runs.store(false, Ordering::Relaxed);
    }
}

impl Forwarding {
    /// `None` when the subject is no router.
    pub fn start(
        subject: Subject,
        node: Arc<Namespace>,
        destinations: &[(Ipv4Net, Ipv4Addr)],
    ) -> Result<Option<Forwarding>, Error> {
        let backend = match subject {
            Subject::Kernel | Subject::KernelSteered => return Ok(None),
            Subject::Xdp => Backend::Xdp,
            Subject::PacketSocket => Backend::PacketSocket,
        };
        let orders = Arc::new(Orders::default());
        let (told, prefixes) = (orders.clone(), destinations.iter().map(|(network, _)| *network).collect::<Vec<_>>());
        let (report, reported) = mpsc::channel();
        let thread = thread::spawn(move || {
            pin(true);
            let entered = node.enter().map_err(system("entering a network namespace"));
            match entered.and_then(|()| Router::new(backend, &prefixes)) {
                Ok(mut router) => {
                    let _ = report.send(Ok(()));
                    router.obey(&told);
                }
                Err(error) => drop(report.send(Err(error))),
            }
        });
        let forwarding = Forwarding { orders, thread: Some(thread) };
        match reported.recv() {
            Ok(result) => result.map(|()| Some(forwarding)),
            Err(_) => Err(system("starting a thread")(std::io::ErrorKind::Other.into())),
        }
    }

    /// Has it run for as long as the answer lives.
    pub fn run(&self) -> Running<'_> {
        self.orders.runs.store(true, Ordering::Relaxed);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
        Running(self)
    }
}

impl Drop for Forwarding {
    fn drop(&mut self) {
        self.orders.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It has said what it had to say.
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
    fn new(backend: Backend, prefixes: &[Ipv4Net]) -> Result<Router, Error> {
        let local = LocalAddresses::new();
        for address in NODE {
            local.insert(IpAddr::V4(address.addr())).map_err(system("telling an address"))?;
        }
        let opened = [open(PORTS[0], Some(backend), false, &local)?, open(PORTS[1], Some(backend), false, &local)?];
        let (mut rib, tables) = Rib::new().map_err(system("memory for tables"))?;
        let mut forwarder = Forwarder::new(Config::new(NodeId(0)), tables);
        let mut pool = Pool::new(BUFFERS, BUFFER_BYTES, HEADROOM_BYTES);
        let mut output = Output::new(QUEUE_PACKETS_MAX);
        for (side, port) in opened.iter().enumerate() {
            let mut config = PortConfig::new(port.interface.mac, port.interface.mtu_bytes as u16)
                .with_addresses([IpNet::V4(NODE[side])]);
            config.has_kernel = port.port.has_kernel();
            let set = forwarder.set_port(Time::ZERO, PortId(side as u8), config, &mut pool, &mut output);
            set.map_err(|error| system("setting a port")(std::io::Error::other(error)))?;
        }
        let gateway = IpAddr::V4(HOSTS[1].addr());
        let adjacency = forwarder
            .pin_adjacency(Time::ZERO, PortId(1), gateway, &mut pool, &mut output)
            .map_err(|error| system("a neighbour")(std::io::Error::other(error)))?;
        for prefix in prefixes {
            let hop = Hop { node: NodeId(0), port: PortId(1), adjacency };
            rib.announce(NodeId(0), IpNet::V4(*prefix), 1, &[hop])?;
        }
        let ports = opened.map(|opened| opened.port);
        Ok(Router { ports, forwarder, _rib: rib, pool, output, begun: Instant::now() })
    }

    fn obey(&mut self, orders: &Orders) {
        while !orders.ends.load(Ordering::Relaxed) {
            if orders.runs.load(Ordering::Relaxed) {
                self.turns();
            } else {
                thread::park();
            }
        }
    }

    /// Some turns without looking at the orders.
    fn turns(&mut self) {
        let mut frames = Vec::with_capacity(VECTOR_PACKETS_MAX);
        for _ in 0..TURNS_BETWEEN_TIMERS {
            let now = self.now();
            for side in [0, 1] {
                // A port that fails forwards nothing, and the figures say so.
                let _ = self.ports[side].receive(&mut self.pool, &mut frames, VECTOR_PACKETS_MAX);
                if !frames.is_empty() {
                    let (pool, output) = (&mut self.pool, &mut self.output);
                    self.forwarder.ingress(now, PortId(side as u8), &mut frames, pool, output);
                }
            }
            self.transmit();
        }
        let now = self.now();
        self.forwarder.poll(now, &mut self.pool, &mut self.output);
        self.transmit();
        self.output.events.clear();
        self.output.to_kernel.drain(..).for_each(|packet| self.pool.free(packet));
    }

    fn transmit(&mut self) {
        for (port, queue) in self.ports.iter_mut().zip(&mut self.output.to_ports) {
            if !queue.is_empty() {
                let _ = port.transmit(&mut self.pool, queue);
            }
        }
    }

    fn now(&self) -> Time {
        Time::from_ns(self.begun.elapsed().as_nanos() as u64)
    }
}
