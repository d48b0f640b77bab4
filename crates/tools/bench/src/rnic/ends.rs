//! Two live NICs of this process with a reliable connection between them.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Result, bail};
use fabric::shm;
use rnic::nic::{ByteMemory, CqNumber, NicProfile, QpInit};
use rnic::verbs::{
    AccessFlags, Completion, CompletionKind, CompletionStatus, Mtu, NicAddress, RcConnection, ReceiveRequest,
    RegionKeys, Registration, SGES_MAX, SendKind, SendRequest, Sge,
};
use rnic::wire::{Psn, QpNumber, Service};
use rnic_live::{ACK_TIMER_CODE, LaneIo, LiveNic, PacketIo, RNR_TIMER_CODE, UdpIo, WINDOW_BYTES};

/// Bytes of memory of each end.
pub const MEMORY_BYTES: usize = 256 << 10;
/// Requests that a queue of the queue pair holds.
const DEPTH: u32 = 64;
/// Time after which an end that gets no completion gives up.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The secret of the lanes, by which each end knows the other's packets.
const SECRET: u64 = 0x5ec2_e700_1234_5678;

/// A live NIC with its memory and one queue pair.
pub struct End<W> {
    pub live: LiveNic<W, ByteMemory>,
    pub keys: RegionKeys,
    cq: CqNumber,
    qp: QpNumber,
}

impl<W: PacketIo> End<W> {
    fn new(profile: NicProfile, io: W, seed: u64) -> Result<Self> {
        let mut live = LiveNic::new(profile, ByteMemory::new(MEMORY_BYTES), io, seed)?;
        let nic = live.nic_mut();
        let domain = nic.allocate_domain()?;
        let (access, bytes) = (AccessFlags::all(), MEMORY_BYTES as u64);
        let keys = nic.register(&Registration { domain, host_address: 0, address: 0, bytes, access })?;
        let cq = nic.create_cq(2 * DEPTH as usize)?;
        let init = QpInit {
            service: Service::Rc,
            domain,
            send_cq: cq,
            receive_cq: cq,
            srq: None,
            sends_max: DEPTH,
            receives_max: DEPTH,
            signals_all: true,
        };
        let qp = nic.create_qp(&init)?;
        Ok(Self { live, keys, cq, qp })
    }

    fn connect(&mut self, destination: QpNumber, mtu: Mtu) -> Result<()> {
        let connection = RcConnection {
            peer: NicAddress(0),
            destination,
            receive_psn: Psn::new(0),
            send_psn: Psn::new(0),
            mtu,
            access: AccessFlags::REMOTE_WRITE,
            ack_timer_code: ACK_TIMER_CODE,
            rnr_timer_code: RNR_TIMER_CODE,
        };
        Ok(self.live.connect(self.qp, &connection)?)
    }

    fn local(&self, address: u64, bytes: u32) -> [Sge; SGES_MAX] {
        let mut local = [Sge::default(); SGES_MAX];
        local[0] = Sge { address, bytes, key: self.keys.local };
        local
    }

    /// Posts a request to send these bytes of the memory.
    pub fn post_send(&mut self, id: u64, kind: SendKind, address: u64, bytes: u32) -> Result<()> {
        let local = self.local(address, bytes);
        let request = SendRequest { id, kind, local, signalled: true, fence: false, solicited: false, datagram: None };
        let now = self.live.now();
        Ok(self.live.nic_mut().post_send(now, self.qp, &request)?)
    }

    /// Posts a request to receive into these bytes of the memory.
    pub fn post_receive(&mut self, id: u64, address: u64, bytes: u32) -> Result<()> {
        let (now, local) = (self.live.now(), self.local(address, bytes));
        Ok(self.live.nic_mut().post_recv(now, self.qp, &ReceiveRequest { id, local })?)
    }

    /// Waits for completions, all of which must be successes. Returns how many there are, and whether one of them is
    /// that of a received message.
    pub fn wait(&mut self) -> Result<(u64, bool)> {
        let mut done = [Completion::default(); 4];
        let count = self.live.wait_completions(self.cq, &mut done, Some(TIMEOUT))?;
        if count == 0 {
            bail!("no completion within {} s; run it again, alone on the machine", TIMEOUT.as_secs());
        }
        let done = &done[..count];
        if let Some(failed) = done.iter().find(|completion| completion.status != CompletionStatus::Success) {
            bail!("a request has failed with {:?}; run it again, alone on the machine", failed.status);
        }
        Ok((count as u64, done.iter().any(|completion| completion.kind == CompletionKind::Receive)))
    }

    /// Serves the peer's requests for this long.
    pub fn serve_for(&mut self, time: Duration) -> Result<()> {
        self.live.run_until(Some(time), |_| Ok(None::<()>))?;
        Ok(())
    }
}

/// Returns two ends that are connected.
pub fn connected<W: PacketIo>(profile: NicProfile, [a, b]: [W; 2], mtu: Mtu) -> Result<[End<W>; 2]> {
    let (mut a, mut b) = (End::new(profile, a, 1)?, End::new(profile, b, 2)?);
    a.connect(b.qp, mtu)?;
    b.connect(a.qp, mtu)?;
    Ok([a, b])
}

/// Returns packet I/O over two sockets of this machine.
pub fn udp() -> Result<[UdpIo; 2]> {
    let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let (mut a, mut b) = (UdpIo::bind(here)?, UdpIo::bind(here)?);
    a.add_peer(b.local())?;
    b.add_peer(a.local())?;
    Ok([a, b])
}

/// Returns packet I/O over a pair of lanes.
pub fn lanes() -> Result<[LaneIo; 2]> {
    let (here, parts) = shm::create_link(WINDOW_BYTES)?;
    let there = shm::open_link(parts, WINDOW_BYTES)?;
    let mut ios = [LaneIo::new(), LaneIo::new()];
    for (io, link) in ios.iter_mut().zip([here, there]) {
        io.add_peer(&link, SECRET)?;
    }
    Ok(ios)
}
