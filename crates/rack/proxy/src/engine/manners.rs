//! Giving way, where processors are few.
//!
//! A short message is handed over from program to proxy to proxy to program. Where they share processors, each
//! hand-over waits until whoever runs lets go: streams copy for as long as there is room, and a proxy that serves them
//! finds something to do in every turn. So whoever has handed a short message on lets others run, and for some time
//! after one streams let others run between pieces: proxies ([`super::Turn::gives_way`]) and programs
//! ([`Local::give_way`]) alike. Streams that have no such company are spared that, and each party finds out for itself
//! whether there is anybody whom it keeps from running ([`wait::Yielder`]).

use super::Engine;
use crate::connection::Connection;
use crate::{Class, Local};
use fabric::{Inbound, Outbound};

/// For how long after a short message streams give way to the next one.
const COMPANY_NS: u64 = 10_000_000;
/// For how long an engine carries streams in company before others may run, to the end of a turn. Time, and not bytes:
/// what a ping-pong waits for is the former, and memory is four times as fast here as there.
const CARRIES_NS_MAX: u64 = 5_000;

/// What an engine knows of its company.
#[derive(Debug, Default)]
pub(super) struct Manners {
    /// Bytes of the latency class went on in this turn.
    has_handed_on: bool,
    /// When they last did.
    handed_on_ns: Option<u64>,
    /// Bytes carried until the last turn.
    carried_bytes: u64,
    /// Since when each turn has carried some, and others were not let run.
    carries_since_ns: Option<u64>,
}

impl<I: Inbound, O: Outbound, L: Local> Engine<I, O, L> {
    /// Bytes went on through a partition. Only where streams have one of their own are those of the other short.
    pub(super) fn note_handed_on(&mut self, port: usize) {
        self.manners.has_handed_on |= self.ports.len() > 1 && port == Class::Latency as usize;
    }

    /// Whether others should run now, at the end of a turn, if there are any.
    pub(super) fn gives_way(&mut self) -> bool {
        let has_handed_on = std::mem::take(&mut self.manners.has_handed_on);
        if has_handed_on {
            self.manners.handed_on_ns = Some(self.now_ns);
        }
        let has_carried_long = self.has_carried_long();
        let gives_way = has_handed_on || (has_carried_long && self.has_company());
        if gives_way {
            self.manners.carries_since_ns = None;
        }
        gives_way
    }

    /// A turn in which nothing was carried.
    pub(super) fn note_idle(&mut self) {
        self.manners.carries_since_ns = None;
    }

    /// Whether turns have carried something for so long, this one among them.
    fn has_carried_long(&mut self) -> bool {
        let carried_bytes = self.counters.bytes_sent + self.counters.bytes_received;
        if std::mem::replace(&mut self.manners.carried_bytes, carried_bytes) == carried_bytes {
            self.manners.carries_since_ns = None;
            return false;
        }
        let since_ns = *self.manners.carries_since_ns.get_or_insert(self.now_ns);
        self.now_ns - since_ns >= CARRIES_NS_MAX
    }

    /// Whether short messages go through this engine, beside whatever else does.
    pub(super) fn has_company(&self) -> bool {
        self.manners.handed_on_ns.is_some_and(|then_ns| self.now_ns.saturating_sub(then_ns) < COMPANY_NS)
    }
}

impl<L: Local> Connection<L> {
    /// Tells a program of a stream whether it has company, if it does not know.
    pub(super) fn tell_manners(&mut self, has_company: bool) {
        let gives_way = has_company && [self.class, self.in_class].contains(&Class::Bulk);
        if self.gives_way != gives_way
            && let Some(local) = &mut self.local
        {
            local.give_way(gives_way);
            self.gives_way = gives_way;
        }
    }
}
