//! The two programs: ordinary sockets that do not block, so that a proxy can have its turns between their calls.

#![allow(unsafe_code)] // A connect that does not block is libc's alone.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::{Asks, How, Length};
use crate::launch::NODE_A;
use stats::Latencies;

/// How long connecting may take: longer than each of its steps waits.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// How long the end of a connection may take to reach the other node.
const PART_LIMIT: Duration = Duration::from_secs(2);
/// Round trips before the first that counts, and as many at least that count.
const TRIPS_MIN: u64 = 100;
/// Turns, or calls, over which one that finds nothing is timed: shorter than connections are looked at.
const IDLE_TIMES: u32 = 100;

/// Turns of a proxy that say that they brought nothing between two looks at what it has carried all the same.
const TURNS_PER_LOOK: u64 = 64;
/// How long a loop asks one party before it says that the other loop is gone.
const CARRY_LIMIT: Duration = Duration::from_secs(5);

/// The other party of a program's loop.
pub trait Neighbour {
    /// One turn; whether there was something to do.
    ///
    /// # Errors
    /// The link cannot be used any more.
    fn turn(&mut self) -> Result<bool>;
    /// Bytes of programs that it has sent to the other proxy and received from it.
    fn carried_bytes(&self) -> (u64, u64);
    /// Stands in for a listener of the other node.
    ///
    /// # Errors
    /// What the kernel answers.
    fn mirror(&mut self, address: SocketAddrV4) -> Result<()>;
    /// A turn and a step towards a link; whether both of its ends have begun.
    ///
    /// # Errors
    /// As [`Neighbour::turn`].
    fn link(&mut self) -> Result<bool>;
    /// Whether connections are there that are not over.
    fn has_connections(&self) -> bool;
}

/// Turns until the proxy has said all ends of connections that are to be said. The other loop may be gone by then.
fn part(proxy: &mut impl Neighbour) -> Result<()> {
    let deadline = Instant::now() + PART_LIMIT;
    while proxy.has_connections() && Instant::now() < deadline {
        proxy.turn()?;
    }
    Ok(())
}

/// Turns until the proxy has carried what it is to carry. `false`: `is_over`, which is asked now and then.
fn carry(
    proxy: &mut impl Neighbour,
    has_carried: impl Fn((u64, u64)) -> bool,
    mut is_over: impl FnMut() -> Result<bool>,
) -> Result<bool> {
    let begun = Instant::now();
    for turn in 1_u64.. {
        let looks = turn.is_multiple_of(TURNS_PER_LOOK);
        if (proxy.turn()? || looks) && has_carried(proxy.carried_bytes()) {
            return Ok(true);
        }
        if looks && is_over()? {
            return Ok(false);
        }
        ensure!(!looks || begun.elapsed() < CARRY_LIMIT, "nothing comes from the other loop");
    }
    Ok(false)
}

/// Sends back what comes, until the client closes; says `ready ADDRESS` to `say` before.
pub fn serve(size_bytes: usize, asks: Asks, proxy: &mut impl Neighbour, say: impl FnOnce(&str)) -> Result<()> {
    let node: Ipv4Addr = NODE_A.parse().context("an address")?;
    let listener = TcpListener::bind(SocketAddrV4::new(node, 0)).context("listening")?;
    listener.set_nonblocking(true).context("a listener that does not block")?;
    let std::net::SocketAddr::V4(address) = listener.local_addr().context("the listener's address")? else {
        bail!("a listener of another family")
    };
    proxy.mirror(address)?;
    say(&format!("ready {address}"));
    let stream = loop {
        proxy.link()?;
        match listener.accept() {
            Ok((stream, _)) => break stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("accepting"),
        }
    };
    let mut end = Stream::new(stream, size_bytes)?;
    match asks {
        Asks::Both => serve_both(&mut end, proxy)?,
        Asks::Next => serve_next(&mut end, proxy)?,
    }
    drop(end);
    part(proxy)
}

/// Asks the program and the proxy in turn.
fn serve_both(end: &mut Stream, proxy: &mut impl Neighbour) -> Result<()> {
    while let Some(has_come) = end.receive()? {
        if has_come {
            end.send(proxy)?;
        }
        proxy.turn()?;
    }
    Ok(())
}

/// Asks whose turn it is: the proxy, until the message has gone to the other one; the program, which answers; the
/// proxy, until it has the answer.
fn serve_next(end: &mut Stream, proxy: &mut impl Neighbour) -> Result<()> {
    let size_bytes = end.message.len() as u64;
    for trip in 1.. {
        // The client may have closed instead. It cannot have sent: that comes by this proxy.
        let is_over = || end.receive().map(|received| received.is_none());
        if !carry(proxy, |(sent_bytes, _)| sent_bytes >= trip * size_bytes, is_over)? {
            return Ok(());
        }
        while !end.receive()?.context("the client closed the connection")? {}
        end.send(proxy)?;
        carry(proxy, |(_, received_bytes)| received_bytes >= trip * size_bytes, || Ok(false))?;
    }
    Ok(())
}

/// What the client found.
pub struct Called {
    /// Of round trips.
    pub latencies: Latencies,
    /// Round trips, warming up among them.
    pub trips: u64,
    /// A turn of the proxy that has nothing to do.
    pub idle_turn_ns: f64,
    /// A call of the program that receives nothing.
    pub idle_receive_ns: f64,
}

/// Times round trips to a server, each on its own.
pub fn call(to: SocketAddrV4, how: How, proxy: &mut impl Neighbour) -> Result<Called> {
    let How { size_bytes, asks, length } = how;
    let begun = Instant::now();
    while !proxy.link()? {
        ensure!(begun.elapsed() < CONNECT_LIMIT, "the link does not come up");
    }
    let mut end = Stream::new(connect(to, proxy)?, size_bytes)?;
    let (warm_up, counted, warm_up_trips, trips_min) = match length {
        Length::Milliseconds(milliseconds) => (milliseconds / 5, milliseconds, TRIPS_MIN, TRIPS_MIN),
        Length::Trips(trips) => (0, 0, 0, trips),
    };
    let mut trips = 0;
    let (mut latencies, mut begun) = (Latencies::new(), Instant::now());
    while trips < warm_up_trips || begun.elapsed() < Duration::from_millis(warm_up) {
        trips += 1;
        end.round_trip(trips, asks, proxy)?;
    }
    begun = Instant::now();
    while latencies.samples() < trips_min || begun.elapsed() < Duration::from_millis(counted) {
        trips += 1;
        latencies.add(end.round_trip(trips, asks, proxy)?.as_nanos() as f64, 1);
    }
    let (idle_turn_ns, idle_receive_ns) = idle_ns(&mut end, proxy)?;
    drop(end);
    part(proxy)?;
    Ok(Called { latencies, trips, idle_turn_ns, idle_receive_ns })
}

/// What both parties of a loop take while nothing comes.
fn idle_ns(end: &mut Stream, proxy: &mut impl Neighbour) -> Result<(f64, f64)> {
    // A connection is looked at for 50 us after it last had something: half of that for either.
    let begun = Instant::now();
    for _ in 0..IDLE_TIMES {
        end.receive()?;
    }
    let received = Instant::now();
    for _ in 0..IDLE_TIMES {
        proxy.turn()?;
    }
    let each = |time: Duration| time.as_nanos() as f64 / f64::from(IDLE_TIMES);
    Ok((each(received.elapsed()), each(received - begun)))
}

/// Connects, with turns for the proxy while others have to say something first.
fn connect(address: SocketAddrV4, proxy: &mut impl Neighbour) -> Result<TcpStream> {
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: takes no memory.
    let number = unsafe { libc::socket(libc::AF_INET, kind, 0) };
    ensure!(number >= 0, "socket: {}", std::io::Error::last_os_error());
    // SAFETY: the descriptor was made just now, and nobody else knows it.
    let stream = TcpStream::from(unsafe { OwnedFd::from_raw_fd(number) });
    let to = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
        sin_zero: [0; 8],
    };
    // SAFETY: the address is readable for its length.
    let done = unsafe { libc::connect(stream.as_raw_fd(), (&raw const to).cast(), size_of_val(&to) as u32) };
    let error = std::io::Error::last_os_error();
    ensure!(done == 0 || error.raw_os_error() == Some(libc::EINPROGRESS), "connecting to {address}: {error}");
    let deadline = Instant::now() + CONNECT_LIMIT;
    while stream.peer_addr().is_err() {
        proxy.turn()?;
        if let Some(error) = stream.take_error().context("asking the socket")? {
            return Err(error).with_context(|| format!("connecting to {address}"));
        }
        ensure!(Instant::now() < deadline, "connecting to {address}: nobody answers");
    }
    Ok(stream)
}

/// A connection, by messages of one size.
struct Stream {
    stream: TcpStream,
    message: Vec<u8>,
    /// Bytes of the message that have come.
    come: usize,
}

impl Stream {
    fn new(stream: TcpStream, size_bytes: usize) -> Result<Self> {
        stream.set_nonblocking(true).context("a socket that does not block")?;
        stream.set_nodelay(true).context("TCP_NODELAY")?;
        Ok(Self { stream, message: vec![0; size_bytes], come: 0 })
    }

    /// One call; whether the message is whole by now. `None`: the other end has closed.
    fn receive(&mut self) -> Result<Option<bool>> {
        match self.stream.read(&mut self.message[self.come..]) {
            Ok(0) => Ok(None),
            Ok(bytes) => {
                self.come += bytes;
                let is_whole = self.come == self.message.len();
                self.come %= self.message.len();
                Ok(Some(is_whole))
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Some(false)),
            Err(error) => Err(error).context("receiving"),
        }
    }

    /// The whole message, in one call as a rule.
    fn send(&mut self, proxy: &mut impl Neighbour) -> Result<()> {
        let mut rest = &self.message[..];
        while !rest.is_empty() {
            match self.stream.write(rest) {
                Ok(bytes) => rest = &rest[bytes..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => _ = proxy.turn()?,
                Err(error) => return Err(error).context("sending"),
            }
        }
        Ok(())
    }

    /// Sends a message and waits until it has come back: how long that took. What came is what was sent.
    fn round_trip(&mut self, trip: u64, asks: Asks, proxy: &mut impl Neighbour) -> Result<Duration> {
        let mark = (trip.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8;
        self.message.fill(mark);
        let before = Instant::now();
        self.send(proxy)?;
        if asks == Asks::Next {
            // It hands the message to the server, and then sends the answer on.
            let sent_bytes = trip * self.message.len() as u64;
            carry(proxy, |(sent, _)| sent >= sent_bytes, || Ok(false))?;
        }
        while !self.receive()?.context("the server closed the connection")? {
            if asks == Asks::Both {
                proxy.turn()?;
            }
        }
        let took = before.elapsed();
        let is_same = self.message.iter().all(|byte| *byte == mark);
        ensure!(is_same, "round trip {trip} came back with other bytes than were sent");
        Ok(took)
    }
}
