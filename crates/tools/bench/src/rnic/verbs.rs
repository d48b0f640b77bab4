//! Round trips of SENDs and streams of WRITEs between two live NICs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use rnic::nic::{NicProfile, TransportPolicy};
use rnic::verbs::{Mtu, RemoteBuffer, SendKind};
use rnic_live::PacketIo;
use stats::Latencies;

use super::ends::{End, connected, lanes, udp};

/// Round trips before the first that is counted.
pub const WARM_UP: u32 = 200;
/// Address of received messages.
const INBOX: u64 = 65_536;
/// Outstanding WRITEs.
const WRITES: u64 = 16;
/// Path MTU of the WRITEs; neither the loopback device nor lanes fragment packets of this size.
pub const STREAM_MTU: Mtu = Mtu::B4096;
/// Outstanding packets: as many as the default socket buffer holds.
const WINDOW_PACKETS: u32 = 32;
/// How long the target serves requests before it checks whether the run has ended.
const SERVE: Duration = Duration::from_millis(2);
/// How long the end that answers stays for the last acknowledgement to arrive.
const LINGER: Duration = Duration::from_millis(20);

/// How the two NICs are set up.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Their loss recovery.
    pub policy: TransportPolicy,
    /// Over lanes instead of UDP.
    pub by_lanes: bool,
    /// Acknowledgements follow the answer.
    pub delays_acks: bool,
}

impl Setup {
    /// Returns the time of each round trip of a SEND.
    pub fn round_trips(self, bytes: u32, trips: u32) -> Result<Latencies> {
        if self.by_lanes {
            self.round_trips_over(lanes()?, bytes, trips)
        } else {
            self.round_trips_over(udp()?, bytes, trips)
        }
    }

    /// Returns the rate of a stream of WRITEs in bytes per second.
    pub fn write(self, bytes: u32, stream_bytes: u64) -> Result<f64> {
        if self.by_lanes {
            self.write_over(lanes()?, bytes, stream_bytes)
        } else {
            self.write_over(udp()?, bytes, stream_bytes)
        }
    }

    fn round_trips_over<W: PacketIo + Send>(self, ios: [W; 2], bytes: u32, trips: u32) -> Result<Latencies> {
        let [mut ping, mut pong] = connected(NicProfile::new(self.policy), ios, Mtu::B1024)?;
        for end in [&mut ping, &mut pong] {
            end.live.set_delayed_acks(self.delays_acks);
            end.post_receive(0, INBOX, bytes)?;
        }
        let trips = u64::from(trips + WARM_UP);
        std::thread::scope(|scope| {
            let answering = scope.spawn(move || answer(pong, bytes, trips));
            let latencies = call(&mut ping, bytes, trips);
            // If this end has failed, the other one gives up soon: it is told by nobody.
            let answered = answering.join().map_err(|_| anyhow!("the end that answers has panicked"))?;
            latencies.and_then(|latencies| answered.map(|()| latencies))
        })
    }

    fn write_over<W: PacketIo + Send>(self, ios: [W; 2], bytes: u32, stream_bytes: u64) -> Result<f64> {
        let profile = NicProfile {
            mtu_bytes: STREAM_MTU.bytes(),
            window_packets: WINDOW_PACKETS,
            ..NicProfile::new(self.policy)
        };
        let [mut writer, mut target] = connected(profile, ios, STREAM_MTU)?;
        let remote = RemoteBuffer { address: 0, key: target.keys.remote };
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| -> Result<()> {
                while !is_done.load(Ordering::Relaxed) {
                    target.serve_for(SERVE)?;
                }
                Ok(())
            });
            let written = write_all(&mut writer, remote, bytes, stream_bytes);
            is_done.store(true, Ordering::Relaxed);
            serving.join().map_err(|_| anyhow!("the end that is written to has panicked"))??;
            written
        })
    }
}

fn call<W: PacketIo>(ping: &mut End<W>, bytes: u32, trips: u64) -> Result<Latencies> {
    let mut latencies = Latencies::new();
    for id in 1..=trips {
        let started = Instant::now();
        ping.post_send(id, SendKind::Send(None), 0, bytes)?;
        while !ping.wait()?.1 {}
        if id > u64::from(WARM_UP) {
            latencies.add(started.elapsed().as_nanos() as f64, 1);
        }
        ping.post_receive(id, INBOX, bytes)?;
    }
    Ok(latencies)
}

fn answer<W: PacketIo>(mut pong: End<W>, bytes: u32, trips: u64) -> Result<()> {
    for id in 1..=trips {
        while !pong.wait()?.1 {}
        pong.post_receive(id, INBOX, bytes)?;
        pong.post_send(id, SendKind::Send(None), INBOX, bytes)?;
    }
    pong.serve_for(LINGER)
}

fn write_all<W: PacketIo>(writer: &mut End<W>, remote: RemoteBuffer, bytes: u32, stream_bytes: u64) -> Result<f64> {
    let messages = stream_bytes.div_ceil(u64::from(bytes));
    let started = Instant::now();
    let (mut posted, mut done) = (0, 0);
    while done < messages {
        while posted < messages && posted < done + WRITES {
            writer.post_send(posted, SendKind::Write(remote, None), 0, bytes)?;
            posted += 1;
        }
        done += writer.wait()?.0;
    }
    Ok((messages * u64::from(bytes)) as f64 / started.elapsed().as_secs_f64())
}
