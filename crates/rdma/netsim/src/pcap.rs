//! Writes packets to a pcap file for Wireshark: Ethernet, IPv4, UDP to port 4791, and RoCEv2 with its checksum.
//!
//! Host n has the address 10.a.b.c, where a.b.c are the low three bytes of n. The payload is zeros, because the
//! simulator has no message contents. Timestamps are virtual time.

use std::cell::RefCell;
use std::io::Write;
use std::net::Ipv4Addr;
use std::rc::Rc;
use std::time::Duration;

use pcap_file::pcap::{PcapHeader, PcapPacket, PcapWriter};
use pcap_file::{DataLink, TsResolution};
use rnic::wire::{Encapsulation, Header, IpAddresses, UDP_PORT};

use crate::network::{PacketTap, TapDirection, TappedPacket};
use crate::topology::HostId;

const ETHERNET_BYTES: usize = 14;
const IPV4_BYTES: usize = 20;
const UDP_BYTES: usize = 8;
const OUTER_HEADER_BYTES: usize = ETHERNET_BYTES + IPV4_BYTES + UDP_BYTES;
const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
/// Version 4, header of five words.
const IPV4_VERSION: u8 = 0x45;
const IPV4_DONT_FRAGMENT: u8 = 0x40;
const IPV4_PROTOCOL_UDP: u8 = 17;
const TIME_TO_LIVE: u8 = 64;
/// ECN codepoint ECT(0) (RFC 3168).
const ECN_CAPABLE: u8 = 2;
/// ECN codepoint CE, congestion experienced (RFC 3168).
const ECN_CONGESTION: u8 = 3;
/// Source ports come from the dynamic range, as RoCEv2 requires.
const SOURCE_PORT_FIRST: u16 = 0xc000;
const SOURCE_PORT_MASK: u32 = 0x3fff;
const SNAP_BYTES: u32 = 65_535;

/// A tap that writes the packets sent by all hosts, or those sent and received by one host, to a pcap file.
pub struct PcapTap<W: Write> {
    writer: PcapWriter<W>,
    host: Option<HostId>,
    frame: Vec<u8>,
    error: PcapErrorHandle,
}

/// Holds the first write error of a [`PcapTap`], to be read after the run.
#[derive(Clone, Debug, Default)]
pub struct PcapErrorHandle(Rc<RefCell<Option<String>>>);

impl PcapErrorHandle {
    /// Returns the text of the first write error; `None` if the file is complete.
    pub fn get(&self) -> Option<String> {
        self.0.borrow().clone()
    }
}

impl<W: Write> PcapTap<W> {
    /// Creates a tap and the handle for its write error. With `host` it writes the packets that this host sends or
    /// receives, otherwise every packet when it is sent. The tap is `None` if the file header cannot be written.
    pub fn new(writer: W, host: Option<HostId>) -> (Option<Self>, PcapErrorHandle) {
        let header = PcapHeader {
            datalink: DataLink::ETHERNET,
            ts_resolution: TsResolution::NanoSecond,
            snaplen: SNAP_BYTES,
            ..PcapHeader::default()
        };
        let handle = PcapErrorHandle::default();
        match PcapWriter::with_header(writer, header) {
            Ok(writer) => (Some(Self { writer, host, frame: Vec::new(), error: handle.clone() }), handle),
            Err(error) => {
                *handle.0.borrow_mut() = Some(error.to_string());
                (None, handle)
            }
        }
    }

    fn is_selected(&self, packet: &TappedPacket<'_, Header>) -> bool {
        match (self.host, packet.direction) {
            (None, direction) => direction == TapDirection::Sent,
            (Some(host), TapDirection::Sent) => packet.from == host,
            (Some(host), TapDirection::Received) => packet.to == host,
        }
    }
}

impl<W: Write> PacketTap<Header> for PcapTap<W> {
    fn observe(&mut self, packet: &TappedPacket<'_, Header>) {
        if !self.is_selected(packet) || self.error.get().is_some() {
            return;
        }
        let written = write_frame(&mut self.frame, packet);
        let at = Duration::from_nanos(packet.at.ps() / 1000);
        let packet = PcapPacket::new(at, self.frame.len() as u32, &self.frame);
        let stored = written.and_then(|()| self.writer.write_packet(&packet).map_err(|error| error.to_string()));
        if let Err(error) = stored {
            *self.error.0.borrow_mut() = Some(error);
        }
    }
}

fn address(host: HostId) -> Ipv4Addr {
    let [_, a, b, c] = host.0.to_be_bytes();
    Ipv4Addr::new(10, a, b, c)
}

/// Fills `frame` with the packet's bytes on the wire, without Ethernet preamble, frame check sequence and gap.
fn write_frame(frame: &mut Vec<u8>, packet: &TappedPacket<'_, Header>) -> Result<(), String> {
    let TappedPacket { from, to, label, is_marked, header, .. } = *packet;
    let packet_bytes = header.packet_bytes();
    frame.clear();
    frame.resize(OUTER_HEADER_BYTES + packet_bytes, 0);
    let (outer, packet) = frame.split_at_mut(OUTER_HEADER_BYTES);
    let source_port = SOURCE_PORT_FIRST | (label & SOURCE_PORT_MASK) as u16;
    let addresses =
        IpAddresses::V4 { source: address(from), destination: address(to), identification: 0, dont_fragment: true };
    let datagram = Encapsulation { addresses, source_port, destination_port: UDP_PORT };
    header.emit(packet).map_err(|error| error.to_string())?;
    header.seal(packet, Some(&datagram));
    let (ethernet, rest) = outer.split_at_mut(ETHERNET_BYTES);
    let (ip, udp) = rest.split_at_mut(IPV4_BYTES);
    for (host, mac) in [(to, 0), (from, 6)] {
        ethernet[mac] = 2; // locally administered
        ethernet[mac + 2..mac + 6].copy_from_slice(&host.0.to_be_bytes());
    }
    ethernet[12..].copy_from_slice(&ETHERTYPE_IPV4);
    write_ip(ip, (from, to), packet_bytes, is_marked);
    udp[..2].copy_from_slice(&source_port.to_be_bytes());
    udp[2..4].copy_from_slice(&UDP_PORT.to_be_bytes());
    udp[4..6].copy_from_slice(&((UDP_BYTES + packet_bytes) as u16).to_be_bytes());
    Ok(()) // the UDP checksum stays 0, meaning none: RoCEv2 has its own checksum
}

fn write_ip(ip: &mut [u8], (from, to): (HostId, HostId), packet_bytes: usize, is_marked: bool) {
    ip[0] = IPV4_VERSION;
    ip[1] = if is_marked { ECN_CONGESTION } else { ECN_CAPABLE };
    ip[2..4].copy_from_slice(&((IPV4_BYTES + UDP_BYTES + packet_bytes) as u16).to_be_bytes());
    ip[6] = IPV4_DONT_FRAGMENT;
    ip[8] = TIME_TO_LIVE;
    ip[9] = IPV4_PROTOCOL_UDP;
    ip[12..16].copy_from_slice(&address(from).octets());
    ip[16..20].copy_from_slice(&address(to).octets());
    let words = ip.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = (folded & 0xffff) + (folded >> 16);
    ip[10..12].copy_from_slice(&(!(folded as u16)).to_be_bytes());
}

#[cfg(test)]
mod tests;
