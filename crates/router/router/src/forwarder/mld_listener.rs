//! The MLD listener of ports without a kernel: reports the solicited-node groups of the router's IPv6 addresses, so
//! that switches with MLD snooping (RFC 4541) forward neighbour solicitations to it (RFC 4861, section 7.2.1; RFC 4862,
//! section 5.4.2).
//!
//! Reports do not depend on queries: one is sent before an address is probed for, another one a second later, and then
//! one every minute, because without a querier switches forget a group some four minutes after the last report. Queries
//! are answered within their maximum response delay (RFC 3810, section 6), in version 1 while a querier of that version
//! is present (section 8.2).

use std::net::Ipv6Addr;

use packet::ethernet::{EtherType, MacAddress};
use packet::ipv6;
use packet::mld::{self, Query, RecordType};

use super::mld_state::{
    OLDER_VERSION_QUERIER_TIMEOUT, REPORT_INTERVAL, ROBUSTNESS, UNSOLICITED_REPORT_INTERVAL, groups,
};
use super::{Context, Forwarder, Origin};
use crate::counters::DropReason;
use crate::{Packet, PortId};

impl Forwarder {
    /// Processes a query.
    pub(super) fn receive_query(&mut self, ctx: &mut Context<'_>, packet: Packet, port: PortId) {
        let query = ipv6::Packet::new_checked(ctx.pool.bytes(&packet)).ok().and_then(|packet| Query::parse(&packet));
        self.discard(ctx, packet, Origin::Port(port), DropReason::Consumed);
        // On a port with a kernel, the kernel answers.
        let is_listener = self.port_config(port).is_some_and(|config| config.probes && !config.has_kernel);
        let (Some(Query { is_v1, response_max, group }), true) = (query, is_listener) else { return };
        let at = ctx.now + response_max.mul_f64(self.random.unit());
        let state = &mut self.ports[usize::from(port.0)];
        if is_v1 {
            state.listener.v1_until = Some(ctx.now + OLDER_VERSION_QUERIER_TIMEOUT);
        }
        let own = groups(&state.claims);
        if group.map_or(!own.is_empty(), |group| own.contains(&group)) {
            state.listener.schedule_response(group, at);
            self.set_claims_due();
        }
    }

    /// Sends the reports that are due.
    pub(super) fn send_due_reports(&mut self, ctx: &mut Context<'_>) {
        for port in (0..self.ports.len()).map(|port| PortId(port as u8)) {
            let is_up = self.is_port_up(port);
            let state = &mut self.ports[usize::from(port.0)];
            if state.listener.due().is_none_or(|due| due > ctx.now) {
                continue;
            }
            let all = groups(&state.claims);
            let due_groups = state.listener.take_due_groups(ctx.now, all.clone());
            if is_up && !due_groups.is_empty() && self.replies.take(ctx.now) {
                self.send_reports(ctx, port, RecordType::ModeIsExclude, &due_groups);
            }
            self.send_unsolicited_report(ctx, port, is_up, &all);
        }
    }

    fn send_unsolicited_report(&mut self, ctx: &mut Context<'_>, port: PortId, is_up: bool, all: &[Ipv6Addr]) {
        let listener = &mut self.ports[usize::from(port.0)].listener;
        if listener.due.is_none_or(|due| due > ctx.now) {
            return;
        }
        if !is_up {
            listener.due = Some(ctx.now + UNSOLICITED_REPORT_INTERVAL);
            return;
        }
        let record_type =
            if listener.joins_sent < ROBUSTNESS { RecordType::ChangeToExclude } else { RecordType::ModeIsExclude };
        listener.joins_sent = (listener.joins_sent + 1).min(ROBUSTNESS);
        listener.due = Some(
            ctx.now + if listener.joins_sent < ROBUSTNESS { UNSOLICITED_REPORT_INTERVAL } else { REPORT_INTERVAL },
        );
        self.send_reports(ctx, port, record_type, all);
    }

    /// Sends one report on all groups, or one per group if a querier of version 1 is present.
    fn send_reports(&mut self, ctx: &mut Context<'_>, port: PortId, record_type: RecordType, groups: &[Ipv6Addr]) {
        // Without a link-local address in use, reports come from the unspecified address (RFC 3590).
        let source = self.link_local_address(port).unwrap_or(Ipv6Addr::UNSPECIFIED);
        if self.ports[usize::from(port.0)].listener.v1_until.is_some_and(|until| ctx.now < until) {
            for group in groups {
                let emit = |payload: &mut [u8]| mld::emit_report_v1(payload, source, *group);
                self.send_report(ctx, port, (source, *group), mld::PAYLOAD_BYTES_V1, emit);
            }
            return;
        }
        for groups in groups.chunks(mld::GROUPS_MAX) {
            let emit = |payload: &mut [u8]| _ = mld::emit_report(payload, source, record_type, groups);
            self.send_report(ctx, port, (source, mld::ALL_ROUTERS), mld::payload_bytes(groups.len()), emit);
        }
    }

    fn send_report(
        &mut self,
        ctx: &mut Context<'_>,
        port: PortId,
        (source, destination): (Ipv6Addr, Ipv6Addr),
        payload_bytes: usize,
        emit: impl FnOnce(&mut [u8]),
    ) {
        let Some(l2) = self.l2(port) else { return };
        let Some(mut packet) = ctx.pool.alloc() else { return };
        ctx.pool.resize(&mut packet, ipv6::HEADER_BYTES + payload_bytes);
        let (header, payload) = ctx.pool.bytes_mut(&packet).split_at_mut(ipv6::HEADER_BYTES);
        emit(payload);
        let repr = super::icmp_error::header_v6(source, destination, ipv6::HOP_BY_HOP, payload_bytes);
        ipv6::Repr { hop_limit: mld::HOP_LIMIT, ..repr }.emit(header);
        let to = MacAddress::from_multicast_v6(destination);
        self.transmit_as(ctx, packet, &l2.adjacency(port, to), EtherType::IPV6);
    }
}
