//! Copies between payloads and the scatter/gather lists of local memory.

use super::engine::Nic;
use super::memory::HostMemory;
use super::request_error::PlacementError;
use super::segmentation::sge_parts;
use crate::verbs::{AccessFlags, CompletionStatus, ProtectionDomain, SGES_MAX, Sge};

impl<M: HostMemory> Nic<M> {
    /// Copies a part of a message from a payload to local memory.
    pub(super) fn scatter(
        &mut self,
        i: usize,
        pieces: &[Sge; SGES_MAX],
        offset: u32,
        bytes: u32,
        payload: &M::Payload,
    ) -> Result<(), PlacementError> {
        let room: u64 = pieces.iter().map(|piece| u64::from(piece.bytes)).sum();
        if u64::from(offset) + u64::from(bytes) > room {
            return Err(PlacementError::Length);
        }
        let domain = self.contexts[i].domain;
        let mut done = 0;
        for part in sge_parts(pieces, offset, bytes) {
            let host = self.table.check_local(domain, &part, AccessFlags::LOCAL_WRITE);
            let address = host.map_err(|_| PlacementError::Protection)?;
            self.memory.place(address, part.bytes, payload, done).map_err(|_| PlacementError::Protection)?;
            done += part.bytes;
        }
        Ok(())
    }

    /// Copies a part of a message from local memory to a payload.
    pub(super) fn gather(
        &mut self,
        domain: ProtectionDomain,
        pieces: &[Sge; SGES_MAX],
        offset: u32,
        bytes: u32,
        payload: &mut M::Payload,
    ) -> Result<(), CompletionStatus> {
        let mut done = 0;
        for part in sge_parts(pieces, offset, bytes) {
            let host = self.table.check_local(domain, &part, AccessFlags::empty());
            let address = host.map_err(|_| CompletionStatus::LocalProtection)?;
            self.memory.gather(address, part.bytes, payload, done).map_err(|_| CompletionStatus::LocalProtection)?;
            done += part.bytes;
        }
        Ok(())
    }
}
