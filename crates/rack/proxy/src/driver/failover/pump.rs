//! Moves frames between an engine and a TCP connection. The engine has a partition in this process's own memory.

use super::frame_decoder::{FrameDecoder, StreamError};
use crate::engine::PartitionLanes;
use fabric::heap::{self, HeapLink};
use fabric::{Link, train_both};
use lane::{Consumer, Layout, Producer};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Slots of the lanes between engine and pump: enough for the longest frame.
const SLOTS: u64 = 1024;
/// Bytes that are passed to the kernel at once.
const OUTBOX_BYTES: usize = 64 << 10;
/// Chunks that are received in one poll; then other engines are polled.
const CHUNKS_MAX: usize = 4;

pub(super) type HeapInbound = <HeapLink as Link>::Inbound;
pub(super) type HeapOutbound = <HeapLink as Link>::Outbound;

/// The other end of an engine's partition, and the TCP connection behind it.
pub(super) struct Pump {
    socket: Option<OwnedFd>,
    from: Consumer<HeapInbound, HeapOutbound>,
    to: Producer<HeapOutbound, HeapInbound>,
    outbox: Vec<u8>,
    sent_bytes: usize,
    decoder: FrameDecoder,
    is_readable: bool,
    is_writable: bool,
}

impl Pump {
    /// Creates a pump on an established connection, and the engine's partition.
    pub(super) fn new(socket: Option<OwnedFd>) -> (Self, PartitionLanes<HeapInbound, HeapOutbound>) {
        let layout = Layout::packed(SLOTS, 0);
        let (mut own, mut engines) = heap::pair(layout.window_bytes());
        assert!(train_both(&mut own, &mut engines), "two ends in one process train");
        // Only this process can access the memory.
        const SECRET: u64 = 0x5EC2_E7F0_0D5E_C2E7;
        let ends = |link: &HeapLink| {
            let (inbound, outbound) = (link.inbound(), link.outbound());
            let to = Producer::new(outbound.clone(), inbound.clone(), layout, SECRET);
            (to, Consumer::new(inbound, outbound, layout, SECRET))
        };
        let ((to, from), (engines_to, engines_from)) = (ends(&own), ends(&engines));
        let pump = Self {
            socket,
            from,
            to,
            outbox: Vec::new(),
            sent_bytes: 0,
            decoder: FrameDecoder::default(),
            is_readable: true,
            is_writable: true,
        };
        (pump, PartitionLanes::new(engines_to, engines_from))
    }

    /// The kernel reports that the socket is readable or writable.
    pub(super) fn socket_ready(&mut self) {
        (self.is_readable, self.is_writable) = (true, true);
    }

    /// Returns whether the connection has ended, and everything received was passed to the engine.
    pub(super) fn is_over(&self) -> bool {
        self.socket.is_none() && !self.decoder.has_pending()
    }

    /// Returns whether all frames of the engine were passed to the kernel.
    pub(super) fn is_flushed(&self) -> bool {
        self.sent_bytes == self.outbox.len() && !self.from.may_have_data()
    }

    /// Returns whether nothing can be done before the kernel reports an event.
    pub(super) fn may_sleep(&self) -> bool {
        self.socket.is_none() || (!self.is_readable && (!self.is_writable || self.is_flushed()))
    }

    /// Moves what can be moved. Returns whether there was anything.
    pub(super) fn poll(&mut self) -> Result<bool, StreamError> {
        let has_received = self.receive()?;
        Ok(self.send()? || has_received)
    }

    /// Closes the connection, which cannot be used any more.
    fn end(&mut self) {
        self.socket = None;
    }

    fn send(&mut self) -> Result<bool, StreamError> {
        let mut progressed = false;
        loop {
            if self.sent_bytes == self.outbox.len() {
                self.sent_bytes = 0;
                self.outbox.resize(OUTBOX_BYTES, 0);
                let taken = self.from.read(&mut self.outbox);
                self.outbox.truncate(*taken.as_ref().unwrap_or(&0));
                taken?;
            }
            let Some(socket) = self.socket_to_use(self.is_writable) else { return Ok(progressed) };
            let rest = &self.outbox[self.sent_bytes..];
            if rest.is_empty() {
                return Ok(progressed);
            }
            match rustix::net::send(socket, rest, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(bytes) => {
                    self.sent_bytes += bytes;
                    progressed = true;
                }
                Err(Errno::AGAIN) => self.is_writable = false,
                Err(Errno::INTR) => {}
                Err(_) => self.end(),
            }
        }
    }

    fn receive(&mut self) -> Result<bool, StreamError> {
        let mut progressed = self.decoder.decode(&mut self.to)?;
        for _ in 0..CHUNKS_MAX {
            if self.decoder.has_pending() {
                break;
            }
            let Some(socket) = self.socket.as_ref().filter(|_| self.is_readable) else { break };
            match self.decoder.fill(|room| rustix::net::recv(socket, room, RecvFlags::DONTWAIT).map(|(bytes, _)| bytes))
            {
                Ok(0) => self.end(),
                Ok(_) => progressed |= self.decoder.decode(&mut self.to)?,
                Err(Errno::AGAIN) => self.is_readable = false,
                Err(Errno::INTR) => {}
                Err(_) => self.end(),
            }
        }
        Ok(progressed)
    }

    fn socket_to_use(&self, is_ready: bool) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().filter(|_| is_ready).map(AsFd::as_fd)
    }
}
