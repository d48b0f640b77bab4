//! The engine as a trait object: it runs over a device's windows, or over windows that are slowed down to a model.

use super::tcp_endpoint::TcpEndpoint;
use crate::connection::OpenPayload;
use crate::counters::EngineCounters;
use crate::engine::{DetachedEngine, Engine, EngineEvent, LinkFault, PollOutcome, SuspendedConnection};
use crate::frame::ConnectionNumber;
use crate::table::ConnectionKey;
use fabric::{Inbound, Outbound};

/// An [`Engine`] over any kind of windows. Each method is the one of the same name.
pub(super) trait DynEngine: Send {
    fn poll(&mut self, now_ns: u64, is_oversubscribed: bool) -> Result<PollOutcome, LinkFault>;
    fn prepare_sleep(&mut self) -> Result<bool, LinkFault>;
    fn park_all(&mut self);
    fn end_sleep(&mut self);
    fn reclaim(&mut self);
    fn endpoint_ready(&mut self, key: ConnectionKey);
    fn next_event(&mut self) -> Option<EngineEvent<TcpEndpoint>>;
    fn answer(&mut self, key: ConnectionKey, answer: Result<TcpEndpoint, u32>);
    fn open(&mut self, payload: OpenPayload, make: &mut dyn FnMut(ConnectionKey) -> TcpEndpoint);
    fn resume_suspended(
        &mut self,
        number: ConnectionNumber,
        lost_ns: u64,
        make: &mut dyn FnMut(ConnectionKey) -> TcpEndpoint,
    ) -> Option<ConnectionKey>;
    fn suspend(&mut self, now_ns: u64) -> Vec<SuspendedConnection<TcpEndpoint>>;
    fn unresumed(&mut self) -> usize;
    fn reset_lost_before(&mut self, lost_ns: u64);
    fn take_down(&mut self);
    fn detach(self: Box<Self>) -> DetachedEngine<TcpEndpoint>;
    fn connections(&self) -> usize;
    fn counters(&self) -> EngineCounters;
}

impl<I: Inbound, O: Outbound> DynEngine for Engine<I, O, TcpEndpoint> {
    fn poll(&mut self, now_ns: u64, is_oversubscribed: bool) -> Result<PollOutcome, LinkFault> {
        self.set_oversubscribed(is_oversubscribed);
        Engine::poll(self, now_ns)
    }

    fn prepare_sleep(&mut self) -> Result<bool, LinkFault> {
        Engine::prepare_sleep(self)
    }

    fn park_all(&mut self) {
        Engine::park_all(self);
    }

    fn end_sleep(&mut self) {
        Engine::end_sleep(self);
    }

    fn reclaim(&mut self) {
        Engine::reclaim(self);
    }

    fn endpoint_ready(&mut self, key: ConnectionKey) {
        Engine::endpoint_ready(self, key);
    }

    fn next_event(&mut self) -> Option<EngineEvent<TcpEndpoint>> {
        Engine::next_event(self)
    }

    fn answer(&mut self, key: ConnectionKey, answer: Result<TcpEndpoint, u32>) {
        Engine::answer(self, key, answer);
    }

    fn open(&mut self, payload: OpenPayload, make: &mut dyn FnMut(ConnectionKey) -> TcpEndpoint) {
        Engine::open(self, payload, make);
    }

    fn resume_suspended(
        &mut self,
        number: ConnectionNumber,
        lost_ns: u64,
        make: &mut dyn FnMut(ConnectionKey) -> TcpEndpoint,
    ) -> Option<ConnectionKey> {
        Engine::resume_suspended(self, number, lost_ns, make)
    }

    fn suspend(&mut self, now_ns: u64) -> Vec<SuspendedConnection<TcpEndpoint>> {
        Engine::suspend(self, now_ns)
    }

    fn unresumed(&mut self) -> usize {
        Engine::unresumed(self)
    }

    fn reset_lost_before(&mut self, lost_ns: u64) {
        Engine::reset_lost_before(self, lost_ns);
    }

    fn take_down(&mut self) {
        Engine::take_down(self);
    }

    fn detach(self: Box<Self>) -> DetachedEngine<TcpEndpoint> {
        Engine::detach(*self)
    }

    fn connections(&self) -> usize {
        Engine::connections(self)
    }

    fn counters(&self) -> EngineCounters {
        *Engine::counters(self)
    }
}
