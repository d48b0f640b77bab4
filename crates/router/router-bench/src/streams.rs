//! Benchmark of TCP streams and echo requests through the router between virtual Ethernet, compared with the Linux
//! kernel's forwarding and with the simplest forwarder by AF_PACKET.
//!
//! ```text
//!   source ── veth ── the subject: one namespace, or two nodes joined by lanes ── veth ── sink
//! ```
//!
//! All figures are *measured*. Source, sink and subject share the processors, as on a small machine. The router is the
//! program itself, as `crosslane router up` starts it. Subjects alternate, and ratios are those within a round.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ipnet::{IpNet, Ipv4Net};
use packet::{icmpv4, ipv4};
use router_ports::netlink::{Requests, RouteRequest, VethEndpoint};
use router_ports::{Interface, Namespace, PlainForwarder, Sysctls};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};
use serde::Serialize;

use crate::ethernet::Error;
use crate::statistics::median;

const PORTS: [&str; 2] = ["bench0", "bench1"];
/// Interval of echo requests: the subject sleeps in between.
const ECHO_INTERVAL: Duration = Duration::from_millis(2);
const WRITE_BYTES: usize = 128 << 10;
const TIMEOUT: Duration = Duration::from_secs(10);
const PORT: u16 = 5201;

fn system(doing: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::System { doing, source }
}

/// Returns an address on the network of a side: 1 is the subject, 2 the host.
fn address(side: usize, host: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 8 + side as u8, 0, host)
}

/// What a run measures.
#[derive(Clone, Debug)]
pub struct Options {
    /// The rounds of each figure.
    pub rounds: usize,
    /// The length of a round of streams; a first part of it, as long as a tenth, does not count.
    pub round: Duration,
    /// Echo requests of a round.
    pub echoes: usize,
    /// The program `crosslane`; without it the router is not measured.
    pub program: Option<PathBuf>,
}

impl Options {
    /// The options of the committed results: about two minutes.
    pub fn full() -> Options {
        let program = std::env::current_exe().ok();
        Options { rounds: 7, round: Duration::from_millis(1500), echoes: 300, program }
    }

    /// Some seconds.
    pub fn quick() -> Options {
        Options { rounds: 3, round: Duration::from_millis(500), echoes: 100, ..Options::full() }
    }
}

/// What forwards the packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// The Linux kernel.
    Kernel,
    /// Two threads with blocking calls of AF_PACKET.
    Blocking,
    /// The router, both ports at one node.
    OneNode,
    /// The router, a port at each of two nodes, joined by lanes.
    TwoNodes,
}

impl Subject {
    /// All subjects, in the order in which they are measured.
    pub const ALL: [Subject; 4] = [Subject::Kernel, Subject::Blocking, Subject::OneNode, Subject::TwoNodes];

    /// Returns the name for reports.
    pub fn name(self) -> &'static str {
        match self {
            Subject::Kernel => "kernel",
            Subject::Blocking => "blocking AF_PACKET",
            Subject::OneNode => "router, one node",
            Subject::TwoNodes => "router, two nodes",
        }
    }

    fn is_router(self) -> bool {
        matches!(self, Subject::OneNode | Subject::TwoNodes)
    }
}

/// The results of a subject: medians over the rounds, and medians of ratios within them.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The subject.
    pub subject: Subject,
    /// Payload of one stream in Gb/s.
    pub one_stream_gbps: f64,
    /// Payload of one stream as a multiple of the kernel's.
    pub one_stream_of_kernel: f64,
    /// Payload of four streams in Gb/s.
    pub four_streams_gbps: f64,
    /// Payload of four streams as a multiple of the kernel's.
    pub four_streams_of_kernel: f64,
    /// Median time from an echo request to its reply in us.
    pub echo_p50_us: f64,
    /// This time as a multiple of the blocking forwarder's.
    pub echo_of_blocking: f64,
}

/// The results of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Results {
    /// The processors that sources, sinks and subjects share.
    pub processors: usize,
    /// The subjects.
    pub rows: Vec<Row>,
}

/// Returns the number of steps that [`measure`] reports.
pub fn steps(options: &Options) -> u64 {
    1 + options.rounds as u64
}

/// Measures all subjects; `step` is called with the name of each step that begins.
///
/// # Errors
/// Fails if namespaces cannot be created or a subject does not forward.
pub fn measure(options: &Options, step: &mut dyn FnMut(&str)) -> Result<Results, Error> {
    step("namespaces");
    let is_measured = |subject: &Subject| !subject.is_router() || options.program.is_some();
    let subjects = Subject::ALL.into_iter().filter(is_measured);
    let testbeds = subjects.map(|subject| Testbed::new(subject, options)).collect::<Result<Vec<_>, _>>()?;
    let mut values = vec![Vec::new(); testbeds.len()];
    for round in 0..options.rounds {
        step(&format!("streams and echoes, round {} of {}", round + 1, options.rounds));
        for (testbed, values) in testbeds.iter().zip(&mut values) {
            let streams = [testbed.streams(1, options.round)?, testbed.streams(4, options.round)?];
            values.push([streams[0], streams[1], testbed.echo_us(options.echoes)?]);
        }
    }
    let of = |values: &[[f64; 3]], at: usize| median_of(values.iter().map(|round| round[at]));
    let ratio = |values: &[[f64; 3]], base: &[[f64; 3]], at: usize| {
        median_of(values.iter().zip(base).map(|(round, base)| round[at] / base[at]))
    };
    let row = |(testbed, rounds): (&Testbed, &Vec<[f64; 3]>)| Row {
        subject: testbed.subject,
        one_stream_gbps: of(rounds, 0),
        one_stream_of_kernel: ratio(rounds, &values[0], 0),
        four_streams_gbps: of(rounds, 1),
        four_streams_of_kernel: ratio(rounds, &values[0], 1),
        echo_p50_us: of(rounds, 2),
        echo_of_blocking: ratio(rounds, &values[1], 2),
    };
    let processors = thread::available_parallelism().map_or(1, usize::from);
    Ok(Results { processors, rows: testbeds.iter().zip(&values).map(row).collect() })
}

/// A subject between a source and a sink.
struct Testbed {
    subject: Subject,
    source: Namespace,
    sink: Arc<Sink>,
    sink_thread: Option<JoinHandle<()>>,
    _forwarder: Option<Blocking>,
    _cluster: Option<Cluster>,
    /// Keep the namespaces, and with them the configuration of their kernels.
    _nodes: Vec<Arc<Namespace>>,
}

impl Testbed {
    fn new(subject: Subject, options: &Options) -> Result<Testbed, Error> {
        let namespace = || Namespace::new().map_err(Error::Namespace);
        let (source, sink) = (namespace()?, namespace()?);
        let nodes = [Arc::new(namespace()?), Arc::new(namespace()?)];
        let second = usize::from(subject == Subject::TwoNodes);
        connect(&nodes[0], &source, 0)?;
        connect(&nodes[second], &sink, 1)?;
        let (mut forwarder, mut cluster) = (None, None);
        match (subject, &options.program) {
            (Subject::Kernel, _) => within(&nodes[0], || {
                let mut sysctls = Sysctls::new();
                let forward = |port| sysctls.set(&format!("net/ipv4/conf/{port}/forwarding"), "1");
                let forwards = PORTS.into_iter().try_for_each(forward);
                sysctls.forget();
                forwards.map_err(system("switching forwarding on"))
            })??,
            (Subject::Blocking, _) => forwarder = Some(Blocking::start(&nodes[0], [&source, &sink])?),
            (_, Some(program)) => cluster = Some(Cluster::start(program, &nodes, subject)?),
            (_, None) => {}
        }
        let sink = Arc::new(Sink::listen(&sink)?);
        let accepting = sink.clone();
        let sink_thread = Some(thread::spawn(move || accepting.run()));
        let testbed = Testbed {
            subject,
            source,
            sink,
            sink_thread,
            _forwarder: forwarder,
            _cluster: cluster,
            _nodes: nodes.to_vec(),
        };
        testbed.warm_up()?;
        Ok(testbed)
    }

    /// Sends echo requests until one is answered: neighbours resolve each other's addresses first.
    fn warm_up(&self) -> Result<(), Error> {
        for _ in 0..50 {
            if self.echo_us(1).is_ok_and(|us| us.is_finite()) {
                return Ok(());
            }
        }
        Err(system("an echo request through the subject")(io::ErrorKind::TimedOut.into()))
    }

    /// Returns the rate at which the sink receives the payload of `count` streams, in Gb/s.
    fn streams(&self, count: usize, round: Duration) -> Result<f64, Error> {
        let to = SocketAddr::from((address(1, 2), PORT));
        let connect = || (0..count).map(|_| TcpStream::connect_timeout(&to, TIMEOUT)).collect::<io::Result<Vec<_>>>();
        let streams = within(&self.source, connect)?.map_err(system("connecting"))?;
        let is_over = AtomicBool::new(false);
        let received = || self.sink.received_bytes.load(Ordering::Relaxed);
        thread::scope(|scope| {
            for mut stream in streams {
                let is_over = &is_over;
                scope.spawn(move || {
                    let bytes = vec![0; WRITE_BYTES];
                    let _ = stream.set_write_timeout(Some(TIMEOUT));
                    // A stream that fails carries nothing, which the figures show.
                    while !is_over.load(Ordering::Relaxed) && stream.write_all(&bytes).is_ok() {}
                });
            }
            thread::sleep(round / 10);
            let (before, begun) = (received(), Instant::now());
            thread::sleep(round - round / 10);
            let gbps = (received() - before) as f64 * 8.0 / begun.elapsed().as_secs_f64() / 1e9;
            is_over.store(true, Ordering::Relaxed);
            Ok(gbps)
        })
    }

    /// Returns the median time from an echo request to its reply in us.
    fn echo_us(&self, count: usize) -> Result<f64, Error> {
        let socket = within(&self.source, echo_socket)?.map_err(system("a raw socket"))?;
        let mut times = Vec::new();
        for sequence in 0..count as u16 {
            times.extend(echo(&socket, sequence).map_err(system("an echo request"))?);
            thread::sleep(ECHO_INTERVAL);
        }
        median(times).ok_or_else(|| system("an echo request")(io::ErrorKind::TimedOut.into()))
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        self.sink.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.sink_thread.take() {
            // What it did shows in the figures.
            let _ = thread.join();
        }
    }
}

/// Returns the median of the rounds, of which there is at least one.
fn median_of(values: impl Iterator<Item = f64>) -> f64 {
    median(values).unwrap_or(f64::NAN)
}

fn within<T: Send>(namespace: &Namespace, run: impl FnOnce() -> T + Send) -> Result<T, Error> {
    namespace.within(run).map_err(system("entering a network namespace"))
}

/// Joins a node and a host.
fn connect(node: &Namespace, host: &Namespace, side: usize) -> Result<(), Error> {
    let set_up = |own: Ipv4Addr| {
        let (mut requests, index) = (Requests::open()?, Interface::by_name(PORTS[side])?.index);
        requests.set_up(index)?;
        requests.add_address(index, IpNet::V4(Ipv4Net::new_assert(own, 24)))?;
        Ok::<_, Error>((requests, index))
    };
    let veth = || {
        let end = |namespace| VethEndpoint { name: PORTS[side], namespace, mac: None };
        Requests::open()?.add_veth(end(None), end(Some(host.as_fd())))?;
        set_up(address(side, 1)).map(drop)
    };
    within(node, veth)??;
    within(host, || {
        let (mut requests, interface) = set_up(address(side, 2))?;
        let prefix = IpNet::V4(Ipv4Net::new_assert(address(1 - side, 0), 24));
        let gateway = Some(address(side, 1).into());
        Ok(requests.install_routes(&[RouteRequest { prefix, metric: 0, interface, gateway }])?)
    })?
}

/// Receives all streams.
struct Sink {
    listener: TcpListener,
    received_bytes: AtomicU64,
    is_over: AtomicBool,
}

impl Sink {
    fn listen(namespace: &Namespace) -> Result<Sink, Error> {
        let listener = within(namespace, || TcpListener::bind((address(1, 2), PORT)))?.map_err(system("listening"))?;
        listener.set_nonblocking(true).map_err(system("listening"))?;
        Ok(Sink { listener, received_bytes: AtomicU64::new(0), is_over: AtomicBool::new(false) })
    }

    fn run(&self) {
        thread::scope(|scope| {
            while !self.is_over.load(Ordering::Relaxed) {
                match self.listener.accept() {
                    Ok((stream, _)) => _ = scope.spawn(move || self.receive(stream)),
                    Err(_) => thread::sleep(Duration::from_millis(1)),
                }
            }
        });
    }

    fn receive(&self, mut stream: TcpStream) {
        let mut buffer = vec![0; 2 * WRITE_BYTES];
        let _ = stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(TIMEOUT)));
        while let Ok(bytes @ 1..) = stream.read(&mut buffer) {
            self.received_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }
}

/// The threads of the blocking forwarder.
struct Blocking {
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Blocking {
    fn start(node: &Namespace, hosts: [&Namespace; 2]) -> Result<Blocking, Error> {
        let interface = |namespace: &Namespace, side: usize| within(namespace, || Interface::by_name(PORTS[side]));
        let is_over = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for (from, to) in [(0, 1), (1, 0)] {
            let destination = interface(hosts[to], to)??.mac;
            let (from, to) = (interface(node, from)??, interface(node, to)??);
            let forwarder = within(node, || PlainForwarder::open(&from, &to, destination))?;
            let (forwarder, is_over) = (forwarder.map_err(system("a packet socket"))?, is_over.clone());
            threads.push(thread::spawn(move || forwarder.run(&is_over)));
        }
        Ok(Blocking { is_over, threads })
    }
}

impl Drop for Blocking {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// A cluster of two nodes, started by the command.
struct Cluster {
    program: PathBuf,
    folder: tempfile::TempDir,
}

impl Cluster {
    fn start(program: &Path, nodes: &[Arc<Namespace>; 2], subject: Subject) -> Result<Cluster, Error> {
        let folder = tempfile::Builder::new().prefix("bench-").tempdir().map_err(system("a folder"))?;
        let path = |node: usize| format!("/proc/{}/fd/{}", std::process::id(), nodes[node].as_fd().as_raw_fd());
        let [first, second] = match subject {
            Subject::OneNode => [&PORTS[..], &[]],
            _ => [&PORTS[..1], &PORTS[1..]],
        };
        let ports = |devices: &[&str]| {
            let port = |device: &&str| format!("\n[[nodes.ports]]\ndevice = \"{device}\"\n");
            match devices {
                [] => "\n[[nodes.ports]]\ndevice = \"bench-tap\"\nkind = \"tap\"\n".to_owned(),
                _ => devices.iter().map(port).collect::<String>(),
            }
        };
        let node = |name: &str, node: usize, devices: &[&str]| {
            format!("\n[[nodes]]\nname = \"{name}\"\nnamespace = \"{}\"\n{}", path(node), ports(devices))
        };
        let text = format!("version = 1\nname = \"bench\"\n{}{}", node("a", 0, first), node("b", 1, second));
        fs::write(folder.path().join("cluster.toml"), text).map_err(system("the cluster file"))?;
        let cluster = Cluster { program: program.to_owned(), folder };
        match cluster.command("up").map_err(system("starting the router"))?.success() {
            true => Ok(cluster),
            false => Err(system("starting the router")(io::Error::other("crosslane router up failed"))),
        }
    }

    fn command(&self, subcommand: &str) -> io::Result<std::process::ExitStatus> {
        let mut command = Command::new(&self.program);
        command.env("CROSSLANE_RACK", self.folder.path()).args(["router", subcommand, "--cluster"]);
        command.arg(self.folder.path().join("cluster.toml")).stdout(Stdio::null()).status()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // An error has been printed by the command.
        let _ = self.command("down");
    }
}

fn echo_socket() -> io::Result<OwnedFd> {
    let protocol = Some(rustix::net::ipproto::ICMP);
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(Duration::from_millis(200)))?;
    rustix::net::connect(&socket, &SocketAddr::from((address(1, 2), 0)))?;
    Ok(socket)
}

/// Sends an echo request, and returns the time until its reply in us; `None` if there is none.
fn echo(socket: &OwnedFd, sequence: u16) -> io::Result<Option<f64>> {
    let message = icmpv4::Message::EchoRequest { identifier: 77, sequence, data: &[0; 48] };
    let mut bytes = vec![0; message.total_bytes()];
    message.emit(&mut bytes);
    let begun = Instant::now();
    rustix::net::send(socket, &bytes, SendFlags::empty())?;
    let mut reply = [0; 256];
    while let Ok((length, _)) = rustix::net::recv(socket, &mut reply[..], RecvFlags::empty()) {
        let Ok(packet) = ipv4::Packet::new_checked(&reply[..length]) else { continue };
        match icmpv4::Message::parse(packet.payload()) {
            Ok(icmpv4::Message::EchoReply { sequence: of, .. }) if of == sequence => {
                return Ok(Some(begun.elapsed().as_secs_f64() * 1e6));
            }
            _ => {}
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_and_the_blocking_forwarder_carry_streams_and_echoes() {
        let options = Options { rounds: 1, round: Duration::from_millis(100), echoes: 5, program: None };
        match measure(&options, &mut |_| {}) {
            Err(Error::Namespace(error)) => println!("skipped: no network namespaces ({error}); run it as root"),
            Err(error) => panic!("{error}"),
            Ok(results) => {
                let carries = |row: &Row| row.one_stream_gbps > 0.0 && row.four_streams_gbps > 0.0;
                assert!(results.rows.len() == 2 && results.rows.iter().all(carries), "{results:?}");
            }
        }
    }
}
