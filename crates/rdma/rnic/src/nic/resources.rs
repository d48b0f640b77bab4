//! Verbs for protection domains, memory regions and windows, completion queues and shared receive queues.

use super::context::Context;
use super::engine::Nic;
use super::error::NicError;
use super::event::{CqNumber, SrqNumber};
use super::host_qp::HostQp;
use super::memory::HostMemory;
use crate::verbs::{
    BindInfo, Completion, CompletionQueue, CqNotify, LKey, ProtectionContext, ProtectionDomain, RegionKeys,
    Registration, SharedReceiveQueue, WindowKind,
};
use crate::wire::{QpNumber, RKey};

impl<M: HostMemory> Nic<M> {
    /// Allocates a protection domain.
    ///
    /// # Errors
    /// If all numbers have been used.
    pub fn allocate_domain(&mut self) -> Result<ProtectionDomain, NicError> {
        Ok(self.table.allocate_domain()?)
    }

    /// Frees a protection domain.
    ///
    /// # Errors
    /// If it does not exist or is in use.
    pub fn free_domain(&mut self, domain: ProtectionDomain) -> Result<(), NicError> {
        Ok(self.table.free_domain(domain)?)
    }

    /// Registers a memory region.
    ///
    /// # Errors
    /// See [`crate::verbs::MemoryTable::register`].
    pub fn register(&mut self, registration: &Registration) -> Result<RegionKeys, NicError> {
        Ok(self.table.register(registration)?)
    }

    /// Deregisters a memory region.
    ///
    /// # Errors
    /// See [`crate::verbs::MemoryTable::deregister`].
    pub fn deregister(&mut self, key: LKey) -> Result<(), NicError> {
        Ok(self.table.deregister(key)?)
    }

    /// Allocates a memory window.
    ///
    /// # Errors
    /// See [`crate::verbs::MemoryTable::allocate_window`].
    pub fn allocate_window(&mut self, domain: ProtectionDomain, kind: WindowKind) -> Result<RKey, NicError> {
        Ok(self.table.allocate_window(domain, kind)?)
    }

    /// Frees a memory window.
    ///
    /// # Errors
    /// See [`crate::verbs::MemoryTable::free_window`].
    pub fn free_window(&mut self, window: RKey) -> Result<(), NicError> {
        Ok(self.table.free_window(window)?)
    }

    /// Binds a memory window for a queue pair and returns its key: for type 1 a key that the NIC chooses, for type 2
    /// `chosen`.
    ///
    /// # Errors
    /// See [`crate::verbs::MemoryTable::bind_type_1`] and [`crate::verbs::MemoryTable::bind_type_2`].
    pub fn bind_window(
        &mut self,
        qp: QpNumber,
        window: RKey,
        chosen: Option<RKey>,
        bind: &BindInfo,
    ) -> Result<RKey, NicError> {
        let i = self.find(qp)?;
        let accessor = ProtectionContext { domain: self.contexts.as_driver(i).domain, qp };
        match chosen {
            None => Ok(self.table.bind_type_1(accessor, window, bind)?),
            Some(chosen) => {
                self.table.bind_type_2(accessor, window, chosen, bind)?;
                Ok(chosen)
            }
        }
    }

    /// Creates a completion queue with a capacity of `entries`.
    ///
    /// # Errors
    /// If the size is out of range.
    pub fn create_cq(&mut self, entries: usize) -> Result<CqNumber, NicError> {
        Ok(CqNumber(insert(&mut self.cqs, CompletionQueue::new(entries)?)))
    }

    /// Destroys a completion queue.
    ///
    /// # Errors
    /// If it does not exist, or queue pairs use it.
    pub fn destroy_cq(&mut self, cq: CqNumber) -> Result<(), NicError> {
        self.cq(cq)?;
        let uses = |context: &&Context| context.exists && (context.send_cq == cq || context.receive_cq == cq);
        let users = self.contexts.iter().filter(uses).count() as u32;
        if users > 0 {
            return Err(NicError::Busy { what: "completion queue", number: cq.0, users });
        }
        self.pending_completions.retain(|(_, other, _)| *other != cq);
        self.cqs[cq.0 as usize] = None;
        Ok(())
    }

    pub(super) fn cq(&mut self, cq: CqNumber) -> Result<&mut CompletionQueue, NicError> {
        let unknown = NicError::Unknown { what: "completion queue", number: cq.0 };
        self.cqs.get_mut(cq.0 as usize).and_then(Option::as_mut).ok_or(unknown)
    }

    /// Returns whether a completion queue is empty; also true if it does not exist.
    pub fn cq_is_empty(&self, cq: CqNumber) -> bool {
        self.cqs.get(cq.0 as usize).and_then(Option::as_ref).is_none_or(CompletionQueue::is_empty)
    }

    /// Takes the oldest completions, as many as there are and fit, and returns their number.
    ///
    /// # Errors
    /// If the queue does not exist or has overflowed.
    pub fn poll_cq(&mut self, cq: CqNumber, into: &mut [Completion]) -> Result<usize, NicError> {
        Ok(self.cq(cq)?.poll(into)?)
    }

    /// Requests an [`NicEvent::Completion`](super::NicEvent::Completion).
    ///
    /// # Errors
    /// If the queue does not exist.
    pub fn arm_cq(&mut self, cq: CqNumber, notify: CqNotify) -> Result<(), NicError> {
        self.cq(cq)?.arm(notify);
        Ok(())
    }

    /// Creates a shared receive queue with a capacity of `requests`.
    ///
    /// # Errors
    /// If the size is out of range.
    pub fn create_srq(&mut self, requests: usize) -> Result<SrqNumber, NicError> {
        Ok(SrqNumber(insert(&mut self.srqs, SharedReceiveQueue::new(requests)?)))
    }

    /// Destroys a shared receive queue.
    ///
    /// # Errors
    /// If it does not exist, or queue pairs use it.
    pub fn destroy_srq(&mut self, srq: SrqNumber) -> Result<(), NicError> {
        self.srq(srq)?;
        let uses = |(context, host): &(&Context, &HostQp)| context.exists && host.srq == Some(srq);
        let users = self.contexts.iter().zip(&self.host_qps).filter(uses).count() as u32;
        if users > 0 {
            return Err(NicError::Busy { what: "shared receive queue", number: srq.0, users });
        }
        self.srqs[srq.0 as usize] = None;
        Ok(())
    }

    pub(super) fn srq(&mut self, srq: SrqNumber) -> Result<&mut SharedReceiveQueue, NicError> {
        let unknown = NicError::Unknown { what: "shared receive queue", number: srq.0 };
        self.srqs.get_mut(srq.0 as usize).and_then(Option::as_mut).ok_or(unknown)
    }

    /// Requests an [`NicEvent::SharedReceiveLimit`](super::NicEvent::SharedReceiveLimit).
    ///
    /// # Errors
    /// If the queue does not exist, or the limit exceeds its capacity.
    pub fn arm_srq(&mut self, srq: SrqNumber, limit: usize) -> Result<(), NicError> {
        Ok(self.srq(srq)?.arm(limit)?)
    }
}

/// Inserts a value into the first free slot and returns its index.
fn insert<T>(slots: &mut Vec<Option<T>>, value: T) -> u32 {
    let at = slots.iter().position(Option::is_none).unwrap_or(slots.len());
    if at == slots.len() {
        slots.push(Some(value));
    } else {
        slots[at] = Some(value);
    }
    at as u32
}
