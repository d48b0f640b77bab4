//! Address Translation Services (PCI Express Base Specification, chapter 10): the device keeps translations in a TLB of
//! its own, requests those that it lacks, and marks its requests as translated, so that they pass the IOMMU unchanged.
//!
//! The device translates the addresses of its next few transfers while earlier ones are under way; transfers begin in
//! order.

use std::collections::VecDeque;

use sim::{Random, Time};

use super::parameters::{DeviceParameters, Replacement};
use super::tlb::Tlb;

/// Bytes of a translation, the payload of the completion that carries one.
pub const TRANSLATION_BYTES: u32 = 8;

/// The TLB of a device, and the transfers whose addresses are translated ahead.
#[derive(Clone, Debug)]
pub struct DeviceTlb {
    tlb: Tlb,
    page_shift: u32,
    transfers_ahead: usize,
    /// Addresses of the next transfers, with the times from which their translations are known.
    ahead: VecDeque<(u64, Time)>,
}

impl DeviceTlb {
    /// Returns the empty TLB of a device for a window in pages of `1 << page_shift` bytes; `None` if the device has
    /// none.
    pub fn new(device: &DeviceParameters, page_shift: u32, window_bytes: u64, random: Random) -> Option<Self> {
        let pages = (window_bytes >> page_shift) as usize + 1;
        (device.tlb_entries > 0).then(|| Self {
            tlb: Tlb::new(device.tlb_entries, 0, Replacement::Lru, pages, random),
            page_shift,
            transfers_ahead: device.tlb_transfers_ahead as usize,
            ahead: VecDeque::new(),
        })
    }

    /// Returns the time from which the translation of `address` is known; `None` if it must be requested.
    pub fn lookup(&mut self, address: u64) -> Option<Time> {
        self.tlb.lookup((address >> self.page_shift) as u32)
    }

    /// Enters the translation of `address`, which arrives at `known`.
    pub fn insert(&mut self, address: u64, known: Time) {
        self.tlb.insert((address >> self.page_shift) as u32, known);
    }

    /// Returns whether the device can translate the address of one more transfer ahead.
    pub fn has_room_ahead(&self) -> bool {
        self.ahead.len() < self.transfers_ahead
    }

    /// Appends a transfer whose translation is known from `known` on.
    pub fn push_ahead(&mut self, address: u64, known: Time) {
        self.ahead.push_back((address, known));
    }

    /// Returns the next transfer and the time from which its translation is known.
    pub fn pop_ahead(&mut self) -> Option<(u64, Time)> {
        self.ahead.pop_front()
    }
}
