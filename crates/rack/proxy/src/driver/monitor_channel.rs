//! The channel to the monitor, which is replaced when another monitor adopts this proxy.

use control::proxy::FromProxy;
use control::{Channel, ChannelError};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, PoisonError, RwLock};

/// The channel to this proxy's monitor, shared by all threads.
#[derive(Debug)]
pub(super) struct MonitorChannel(RwLock<Arc<Channel>>);

impl MonitorChannel {
    pub(super) fn new(channel: Channel) -> Self {
        Self(RwLock::new(Arc::new(channel)))
    }

    /// Returns the current channel.
    pub(super) fn channel(&self) -> Arc<Channel> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// As [`Channel::send`].
    pub(super) fn send(&self, message: &FromProxy, descriptors: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
        self.channel().send(message, descriptors)
    }

    /// Replaces the channel by that of another monitor.
    pub(super) fn replace(&self, channel: Channel) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(channel);
    }
}
