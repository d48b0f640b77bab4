//! A subject between a source and a sink: setting up their namespaces, and sending through them.

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use packet::ethernet::MacAddress;
use router_ports::netlink::{Requests, RouteRequest, VethEndpoint};
use router_ports::{Interface, Namespace, Sysctls};
use sim::Random;

use super::forwarding::Forwarding;
use super::topology::{Destination, HOSTS, NODE, PORTS, gateway, within};
use super::traffic::{Load, OverloadResult, PacedResult, SendRate, Sink, Source};
use super::{Error, FRAME_BYTES_MIN, Options, Subject, VERSIONS, system};
use crate::processor;

/// How often the source sends at full speed at most to warm the caches.
const WARMING_PASSES_MAX: u32 = 50;

/// A subject between a source and a sink.
pub struct Testbed {
    subject: Subject,
    /// The destinations of each family.
    destinations: usize,
    source: Source,
    sink: Sink,
    /// The thread of the router, if the subject is the router.
    forwarding: Option<Forwarding>,
    /// Keeps the namespace, and with it the configuration of its kernel, while the testbed exists.
    _node: Arc<Namespace>,
}

impl Testbed {
    pub fn new(subject: Subject, options: &Options) -> Result<Testbed, Error> {
        let namespace = || Namespace::new().map_err(Error::Namespace);
        let (source, node, sink) = (namespace()?, namespace()?, namespace()?);
        within(&node, || connect(&[&source, &sink]))??;
        within(&source, || set_up(PORTS[0], HOSTS[0]))??;
        within(&sink, || set_up(PORTS[1], HOSTS[1]))??;
        let destinations = destinations(options);
        let mut sysctls = Sysctls::new();
        within(&node, || prepare_kernel(subject, &destinations, &mut sysctls))??;
        sysctls.forget();
        if subject == Subject::KernelSteered {
            let steer = || steer_to_second(PORTS[0]);
            node.within_with_sysfs(steer).and_then(|result| result).map_err(system("steering packets"))?;
        }
        let port_mac = within(&node, || Interface::by_name(PORTS[0]))??.mac;
        let node = Arc::new(node);
        let forwarding = Forwarding::start(subject, node.clone(), &destinations)?;
        let (source, sink) = (Source::open(source, port_mac, &destinations)?, Sink { namespace: sink });
        let destinations = options.destinations;
        let mut testbed = Testbed { subject, destinations, source, sink, forwarding, _node: node };
        testbed.warm_up()?;
        Ok(testbed)
    }

    pub fn subject(&self) -> Subject {
        self.subject
    }

    /// Sends probes until one arrives: neighbours resolve each other's addresses first, and packets that wait for that
    /// may be dropped.
    fn warm_up(&mut self) -> Result<(), Error> {
        let tries = 100;
        for version in VERSIONS {
            let load = Load { version, frame_bytes: &[FRAME_BYTES_MIN] };
            let mut has_arrived = false;
            for _ in 0..tries {
                has_arrived = has_arrived || self.probe(load, 1)?[0].is_some();
            }
            if !has_arrived {
                return Err(Error::Silent { subject: self.subject, version, sent: tries });
            }
        }
        Ok(())
    }

    /// Sends as fast as possible.
    pub fn overload(&mut self, load: Load, duration: Duration) -> Result<OverloadResult, Error> {
        let _running = self.forwarding.as_ref().map(Forwarding::run);
        self.source.overload(load, duration, &self.sink)
    }

    /// Returns what arrives when the source sends as fast as possible, after a pass over all destinations: the caches
    /// are cold at first, and on a machine whose host reclaims idle memory, so are the frames and the tables.
    pub fn peak(&mut self, load: Load, duration: Duration) -> Result<OverloadResult, Error> {
        let mut frames = 0.0;
        let mut passes = 0;
        while frames < self.destinations as f64 && passes < WARMING_PASSES_MAX {
            frames += self.overload(load, duration)?.offered_mpps * 1e6 * duration.as_secs_f64();
            passes += 1;
        }
        self.overload(load, duration)
    }

    /// Sends at a rate. The longest stall of the router's thread counts as a stall of the trial.
    pub fn pace(&mut self, load: Load, pace: SendRate) -> Result<PacedResult, Error> {
        let stall_ns_max =
            |forwarding: &Option<Forwarding>| forwarding.as_ref().map_or(0, Forwarding::take_stall_ns_max);
        // Discards the stall of earlier runs.
        stall_ns_max(&self.forwarding);
        let running = self.forwarding.as_ref().map(Forwarding::run);
        let mut paced = self.source.pace(load, pace, &self.sink)?;
        drop(running);
        let stall_ns = stall_ns_max(&self.forwarding);
        paced.stall_ns_max = paced.stall_ns_max.max(stall_ns);
        Ok(paced)
    }

    /// Sends frames one by one and returns the time that each took.
    pub fn probe(&mut self, load: Load, count: usize) -> Result<Vec<Option<Duration>>, Error> {
        let _running = self.forwarding.as_ref().map(Forwarding::run);
        self.source.probe(load, count, &self.sink)
    }
}

/// Creates the pairs of interfaces between the node, in whose namespace the calling thread is, and its hosts.
fn connect(hosts: &[&Namespace; 2]) -> Result<(), Error> {
    let mut requests = Requests::open()?;
    for (side, host) in hosts.iter().enumerate() {
        let mac = |endpoint| Some(MacAddress([2, 0, 0, 0, endpoint, side as u8]));
        requests.add_veth(
            VethEndpoint { name: PORTS[side], namespace: None, mac: mac(1) },
            VethEndpoint { name: PORTS[side], namespace: Some(host.as_fd()), mac: mac(2) },
        )?;
        set_up(PORTS[side], NODE[side])?;
    }
    Ok(())
}

fn set_up(interface: &str, networks: [IpNet; 2]) -> Result<(), Error> {
    let mut requests = Requests::open()?;
    let index = Interface::by_name(interface)?.index;
    requests.set_up(index)?;
    Ok(networks.into_iter().try_for_each(|network| requests.add_address(index, network))?)
}

/// Returns random, distinct networks of each family with an address in each: networks of 256 addresses in 16.0.0.0/4,
/// which is not used here, and /48 networks in 3fff::/20, which is reserved for documentation (RFC 9637).
fn destinations(options: &Options) -> Vec<Destination> {
    let mut random = Random::new(options.seed, "destinations");
    let mut drawn = |bits: u32| {
        let mut distinct = BTreeSet::new();
        while distinct.len() < options.destinations {
            distinct.insert(random.below(1 << bits));
        }
        distinct
    };
    let v4 = drawn(20).into_iter().map(|number| {
        let network = 0x1000_0000 | (number as u32) << 8;
        (IpNet::V4(Ipv4Net::new_assert(network.into(), 24)), IpAddr::V4((network | 9).into()))
    });
    let v6 = drawn(28).into_iter().map(|number| {
        let network = 0x3fff << 112 | u128::from(number) << 80;
        (IpNet::V6(Ipv6Net::new_assert(network.into(), 48)), IpAddr::V6((network | 9).into()))
    });
    v4.chain(v6).collect()
}

/// Configures the kernel to forward by these routes, or not to forward.
fn prepare_kernel(subject: Subject, destinations: &[Destination], sysctls: &mut Sysctls) -> Result<(), Error> {
    let is_kernel = matches!(subject, Subject::Kernel | Subject::KernelSteered);
    for port in PORTS {
        if is_kernel {
            let name = format!("net/ipv4/conf/{port}/forwarding");
            sysctls.set(&name, "1").map_err(system("switching forwarding on"))?;
        } else {
            sysctls.configure_port(port).map_err(system("switching forwarding off"))?;
        }
    }
    if is_kernel {
        sysctls.set("net/ipv6/conf/all/forwarding", "1").map_err(system("switching forwarding on"))?;
        let interface = Interface::by_name(PORTS[1])?.index;
        let request = |(prefix, address): &Destination| {
            let gateway = Some(gateway(*address));
            RouteRequest { prefix: *prefix, metric: 0, interface, gateway }
        };
        Requests::open()?.install_routes(&destinations.iter().map(request).collect::<Vec<_>>())?;
    }
    Ok(())
}

/// Steers the packets that an interface receives to the second processor, if there is one.
fn steer_to_second(interface: &str) -> std::io::Result<()> {
    let usable = processor::usable().unwrap_or_default();
    let Some(second) = usable.get(1).filter(|processor| **processor < 32) else { return Ok(()) };
    fs::write(format!("/sys/class/net/{interface}/queues/rx-0/rps_cpus"), format!("{:x}", 1u32 << second))
}
