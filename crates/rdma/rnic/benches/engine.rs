//! Measures the packets per second through two engines without a network: `cargo bench -p rnic --bench engine`.
//!
//! A packet simulator has several events for each packet; this is the engine's part of them.

use std::time::Instant;

use rnic::nic::{CqNumber, Nic, NicProfile, NoMemory, QpInit, TransportPolicy};
use rnic::verbs::{
    AccessFlags, Completion, Mtu, NicAddress, RcConnection, RegionKeys, Registration, RemoteBuffer, SGES_MAX, SendKind,
    SendRequest, Sge,
};
use rnic::wire::{Psn, QpNumber, Service};
use sim::{Span, Time};

const MEMORY_BYTES: u64 = 1 << 40;
const MESSAGE_BYTES: u32 = 65_536;
const PACKETS: u64 = 3_000_000;
/// Time of a packet of 1024 bytes at 100 Gb/s.
const PACKET: Span = Span::from_ps(88_000);
const DEPTH: u64 = 4;

struct Host {
    nic: Nic<NoMemory>,
    cq: CqNumber,
    keys: RegionKeys,
}

fn host(policy: TransportPolicy, qps: u32) -> (Host, Vec<QpNumber>) {
    let mut nic = Nic::new(NicProfile::modelled(policy), NoMemory, 1).expect("a valid profile");
    let cq = nic.create_cq(1 << 20).expect("a queue");
    let domain = nic.allocate_domain().expect("a domain");
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
    let registration = Registration { domain, host_address: 0, address: 0, bytes: MEMORY_BYTES, access };
    let keys = nic.register(&registration).expect("a region");
    let init = QpInit {
        service: Service::Rc,
        domain,
        send_cq: cq,
        receive_cq: cq,
        srq: None,
        sends_max: 64,
        receives_max: 0,
        signals_all: false,
    };
    let qps = (0..qps).map(|_| nic.create_qp(&init).expect("a queue pair")).collect();
    (Host { nic, cq, keys }, qps)
}

fn bring_up(host: &mut Host, qp: QpNumber, peer: u32) {
    let connection = RcConnection {
        peer: NicAddress(peer),
        destination: qp,
        receive_psn: Psn::new(0),
        send_psn: Psn::new(0),
        mtu: Mtu::B1024,
        access: AccessFlags::REMOTE_WRITE,
        ack_timer_code: 14,
        rnr_timer_code: 1,
    };
    for (state, step) in connection.transitions() {
        host.nic.modify_qp(Time::ZERO, qp, state, &step).expect("a transition that every queue pair has");
    }
}

fn request(host: &Host, peer: &Host) -> SendRequest {
    let mut local = [Sge::default(); SGES_MAX];
    local[0] = Sge { address: 0, bytes: MESSAGE_BYTES, key: host.keys.local };
    let kind = SendKind::Write(RemoteBuffer { address: 0, key: peer.keys.remote }, None);
    SendRequest { id: 0, kind, local, signalled: true, fence: false, solicited: false, datagram: None }
}

fn run(policy: TransportPolicy, qps: u32) {
    let (mut sender, numbers) = host(policy, qps);
    let (mut receiver, _) = host(policy, qps);
    let request = request(&sender, &receiver);
    for qp in &numbers {
        bring_up(&mut sender, *qp, 1);
        bring_up(&mut receiver, *qp, 0);
        (0..DEPTH).for_each(|_| sender.nic.post_send(Time::ZERO, *qp, &request).expect("there is room"));
    }
    let begun = Instant::now();
    let (mut now, mut moved, mut calls) = (Time::ZERO, 0_u64, 0_u64);
    let mut room = [Completion::default(); 16];
    while moved < PACKETS {
        now += PACKET;
        for side in 0..2 {
            let (from, to) = if side == 0 { (&mut sender, &mut receiver) } else { (&mut receiver, &mut sender) };
            if from.nic.deadline().is_some_and(|at| at <= now) {
                from.nic.advance(now);
                calls += 1;
            }
            if let Some(packet) = from.nic.transmit(now, &mut ()) {
                to.nic.receive(now, NicAddress(side), &packet.header, false, &());
                moved += 1;
            }
        }
        if !sender.nic.cq_is_empty(sender.cq) {
            let count = sender.nic.poll_cq(sender.cq, &mut room).expect("a large enough queue");
            for completion in &room[..count] {
                sender.nic.post_send(now, completion.qp, &request).expect("there is room");
            }
        }
    }
    let s = begun.elapsed().as_secs_f64();
    println!(
        "{policy:?}, {qps} queue pairs: {:.2} M packets/s, {:.0} ns a packet, {:.2} calls of advance a packet",
        moved as f64 / s / 1e6,
        s * 1e9 / moved as f64,
        calls as f64 / moved as f64
    );
}

fn main() {
    for qps in [1, 1000] {
        for policy in
            [TransportPolicy::Srnic, TransportPolicy::Irn, TransportPolicy::GoBackN, TransportPolicy::ConnectionCache]
        {
            run(policy, qps);
        }
    }
}
