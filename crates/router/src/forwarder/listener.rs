//! What a port without a kernel tells switches that look on (RFC 4541): which groups it listens to, so that neighbours
//! who ask for its addresses of IPv6 are heard (RFC 4861, section 7.2.1; RFC 4862, section 5.4.2).
//!
//! Nobody is waited for: a report goes out before an address is looked for, once more a second later, and then every
//! minute. Switches keep groups for some four minutes after the last one, so that queries, which no other part of the
//! router understands, need no answer.

use std::net::Ipv6Addr;
use std::time::Duration;

use packet::ethernet::{EtherType, MacAddress};
use packet::{ipv6, mld, ndisc};

use super::claims::{self, Claim};
use super::{Forwarder, Io};
use crate::{PortId, Time};

/// Unsolicited Report Interval of RFC 3810, section 9.11.
const AGAIN: Duration = Duration::from_secs(1);
/// Robustness Variable of RFC 3810, section 9.1: so often a report that says *joins* goes out.
const JOINS: u32 = 2;
/// Half of the Query Interval of RFC 3810, section 9.2: a report may be lost.
const REPEAT: Duration = Duration::from_secs(60);

/// Where a port's reports stand.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Report {
    /// When the next one is due.
    pub(super) due: Option<Time>,
    /// How often it was said that these groups are joined.
    joins: u32,
}

impl Report {
    /// Of a port that is told of these addresses.
    pub(super) fn of(former: Report, claims: &[Claim]) -> Report {
        if claims::heard_v6(claims).next().is_none() {
            return Report::default();
        }
        match claims::begin(claims) {
            Some(begins) => Report { due: Some(begins), joins: 0 },
            None => former,
        }
    }
}

impl Forwarder {
    /// Says what is due.
    pub(super) fn report_groups(&mut self, io: &mut Io<'_>) {
        for port in (0..self.ports.len()).map(|port| PortId(port as u8)) {
            let report = self.ports[usize::from(port.0)].report;
            if report.due.is_none_or(|due| due > io.now) {
                continue;
            }
            let is_up = self.mtus[usize::from(self.config.node.0)][usize::from(port.0)] > 0;
            let next = match report.joins + 1 {
                _ if !is_up => Report { due: Some(io.now + AGAIN), ..report },
                joins if joins < JOINS => Report { due: Some(io.now + AGAIN), joins },
                _ => Report { due: Some(io.now + REPEAT), joins: JOINS },
            };
            self.ports[usize::from(port.0)].report = next;
            if is_up {
                self.report_of(io, port, if report.joins < JOINS { mld::Why::Joins } else { mld::Why::Listens });
            }
        }
    }

    fn report_of(&mut self, io: &mut Io<'_>, port: PortId, why: mld::Why) {
        let mut groups: Vec<Ipv6Addr> =
            claims::heard_v6(&self.ports[usize::from(port.0)].claims).map(ndisc::solicited_node).collect();
        groups.sort_unstable();
        groups.dedup();
        // Who has no address of the link yet says so as nobody (RFC 3590).
        let own = self.addresses(port).iter().find_map(|network| match network.addr() {
            std::net::IpAddr::V6(address) if address.is_unicast_link_local() => Some(address),
            _ => None,
        });
        let source = own.unwrap_or(Ipv6Addr::UNSPECIFIED);
        let (Some(link), false) = (self.link(port), groups.is_empty()) else { return };
        let Some(mut packet) = io.pool.take() else { return };
        let payload_bytes = mld::payload_bytes(groups.len());
        io.pool.resize(&mut packet, ipv6::HEADER_BYTES + payload_bytes);
        let (header, payload) = io.pool.bytes_mut(&packet).split_at_mut(ipv6::HEADER_BYTES);
        mld::emit_report(payload, source, why, &groups);
        let repr = super::report::header_v6(source, mld::ALL_ROUTERS, ipv6::HOP_BY_HOP, payload_bytes);
        ipv6::Repr { hop_limit: mld::HOP_LIMIT, ..repr }.emit(header);
        let to = MacAddress::of_multicast_v6(mld::ALL_ROUTERS);
        self.emit_as(io, packet, &link.readiness(port, to), EtherType::IPV6);
    }
}
