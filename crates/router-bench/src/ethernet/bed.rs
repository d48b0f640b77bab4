//! Three namespaces in a row, and what is sent through them.

use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net};
use packet::ethernet::MacAddress;
use router_ports::netlink::{Requests, RouteRequest, VethEnd};
use router_ports::{Interface, Namespace, Sysctls};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use sim::Random;

use super::subject::Forwarding;
use super::traffic::{Round, Sink, Source};
use super::{Error, Options, Subject, system};

/// The node's interfaces, in its namespace; the others' ends have these names in theirs.
pub const PORTS: [&str; 2] = ["bench0", "bench1"];
/// The node's own addresses, and its neighbours': the source, and the sink.
pub const NODE: [Ipv4Net; 2] =
    [Ipv4Net::new_assert(Ipv4Addr::new(10, 8, 0, 1), 24), Ipv4Net::new_assert(Ipv4Addr::new(10, 9, 0, 1), 24)];
pub const HOSTS: [Ipv4Net; 2] =
    [Ipv4Net::new_assert(Ipv4Addr::new(10, 8, 0, 2), 24), Ipv4Net::new_assert(Ipv4Addr::new(10, 9, 0, 2), 24)];

/// A subject between a source and a sink.
pub struct Bed {
    subject: Subject,
    source: Source,
    sink: Sink,
    /// The router's thread, if it is the router.
    forwarding: Option<Forwarding>,
    /// It lasts as long as somebody has it; what its kernel was told goes with it.
    _node: Arc<Namespace>,
}

/// Processors that this process may use.
pub fn processors() -> usize {
    sched_getaffinity(None).map_or(1, |set| set.count() as usize)
}

/// Puts the calling thread on the first or second processor that it may use, if there are two.
pub fn pin(second: bool) {
    let Ok(all) = sched_getaffinity(None) else { return };
    let usable: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).take(2).collect();
    let [first, other] = usable[..] else { return };
    let mut one = CpuSet::new();
    one.set(if second { other } else { first });
    // Where that is refused, the figures are of a machine that moves its threads.
    let _ = sched_setaffinity(None, &one);
}

/// The mask of the second processor, as `/sys` wants it.
fn second_processor() -> Option<String> {
    let all = sched_getaffinity(None).ok()?;
    let second = (0..CpuSet::MAX_CPU.min(32)).filter(|cpu| all.is_set(*cpu)).nth(1)?;
    Some(format!("{:x}", 1u32 << second))
}

impl Bed {
    pub fn new(subject: Subject, options: &Options) -> Result<Bed, Error> {
        let namespace = || Namespace::new().map_err(Error::Namespace);
        let (source, node, sink) = (namespace()?, namespace()?, namespace()?);
        within(&node, || connect(&[&source, &sink]))??;
        within(&source, || set_up(PORTS[0], HOSTS[0]))??;
        within(&sink, || set_up(PORTS[1], HOSTS[1]))??;
        let destinations = destinations(options);
        let mut sysctls = Sysctls::new();
        within(&node, || prepare_kernel(subject, &destinations, &mut sysctls))??;
        sysctls.keep();
        if subject == Subject::KernelSteered {
            let steer = || steer_to_second(PORTS[0]);
            node.within_with_sysfs(steer).and_then(|result| result).map_err(system("steering packets"))?;
        }
        let port_mac = within(&node, || Interface::by_name(PORTS[0]))??.mac;
        let node = Arc::new(node);
        let forwarding = Forwarding::start(subject, node.clone(), &destinations)?;
        let (source, sink) = (Source::open(source, port_mac, &destinations)?, Sink::open(sink)?);
        let mut bed = Bed { subject, source, sink, forwarding, _node: node };
        bed.warm_up()?;
        Ok(bed)
    }

    pub fn subject(&self) -> Subject {
        self.subject
    }

    /// Neighbours ask for each other first, and what waits for them may be dropped.
    fn warm_up(&mut self) -> Result<(), Error> {
        let tries = 100;
        for _ in 0..tries {
            let times = self.probe(60, 1)?;
            if times[0].is_some() {
                return Ok(());
            }
        }
        Err(Error::Silent { subject: self.subject, sent: tries })
    }

    /// Sends as fast as it goes.
    pub fn overload(&mut self, frame_bytes: usize, duration: Duration) -> Result<Round, Error> {
        let _running = self.forwarding.as_ref().map(Forwarding::run);
        self.source.overload(frame_bytes, duration, &self.sink)
    }

    /// Sends frames one by one. How long each took.
    pub fn probe(&mut self, frame_bytes: usize, count: usize) -> Result<Vec<Option<Duration>>, Error> {
        let _running = self.forwarding.as_ref().map(Forwarding::run);
        self.source.probe(frame_bytes, count, &self.sink)
    }
}

pub fn within<T: Send>(namespace: &Namespace, run: impl FnOnce() -> T + Send) -> Result<T, Error> {
    namespace.within(run).map_err(system("entering a network namespace"))
}

/// Pairs of interfaces between the node, whose namespace the thread is in, and its hosts.
fn connect(hosts: &[&Namespace; 2]) -> Result<(), Error> {
    let mut requests = Requests::open()?;
    for (side, host) in hosts.iter().enumerate() {
        let mac = |place| Some(MacAddress([2, 0, 0, 0, place, side as u8]));
        requests.add_veth(
            VethEnd { name: PORTS[side], namespace: None, mac: mac(1) },
            VethEnd { name: PORTS[side], namespace: Some(host.as_fd()), mac: mac(2) },
        )?;
        set_up(PORTS[side], NODE[side])?;
    }
    Ok(())
}

fn set_up(interface: &str, network: Ipv4Net) -> Result<(), Error> {
    let mut requests = Requests::open()?;
    let index = Interface::by_name(interface)?.index;
    requests.set_up(index)?;
    requests.add_address(index, IpNet::V4(network))?;
    Ok(())
}

/// Random networks of 256 addresses in 16.0.0.0/4, which is nobody's here, each once; and an address in each.
fn destinations(options: &Options) -> Vec<(Ipv4Net, Ipv4Addr)> {
    let mut random = Random::new(options.seed, "destinations");
    let mut taken = std::collections::BTreeSet::new();
    while taken.len() < options.destinations {
        taken.insert(0x10_0000 | random.below(1 << 20) as u32);
    }
    let address = |bits: u32| Ipv4Addr::from(bits);
    taken
        .into_iter()
        .map(|network| (Ipv4Net::new_assert(address(network << 8), 24), address(network << 8 | 9)))
        .collect()
}

/// The kernel forwards by these routes, or nothing.
fn prepare_kernel(subject: Subject, destinations: &[(Ipv4Net, Ipv4Addr)], sysctls: &mut Sysctls) -> Result<(), Error> {
    let is_kernel = matches!(subject, Subject::Kernel | Subject::KernelSteered);
    for port in PORTS {
        if is_kernel {
            let name = format!("net/ipv4/conf/{port}/forwarding");
            sysctls.set(&name, "1").map_err(system("switching forwarding on"))?;
        } else {
            sysctls.for_port(port).map_err(system("switching forwarding off"))?;
        }
    }
    if is_kernel {
        let interface = Interface::by_name(PORTS[1])?.index;
        let gateway = Some(IpAddr::V4(HOSTS[1].addr()));
        let request =
            |(network, _): &(Ipv4Net, _)| RouteRequest { prefix: IpNet::V4(*network), metric: 0, interface, gateway };
        Requests::open()?.install_routes(&destinations.iter().map(request).collect::<Vec<_>>())?;
    }
    Ok(())
}

fn steer_to_second(interface: &str) -> std::io::Result<()> {
    let Some(mask) = second_processor() else { return Ok(()) };
    fs::write(format!("/sys/class/net/{interface}/queues/rx-0/rps_cpus"), mask)
}
