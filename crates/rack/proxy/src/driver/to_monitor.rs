//! The way to the monitor, which is another one after the first has died.

use control::proxy::FromProxy;
use control::{Channel, ChannelError};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, PoisonError, RwLock};

/// The channel to this proxy's monitor, as all threads have it.
#[derive(Debug)]
pub(super) struct ToMonitor(RwLock<Arc<Channel>>);

impl ToMonitor {
    pub(super) fn new(channel: Channel) -> Self {
        Self(RwLock::new(Arc::new(channel)))
    }

    /// The one that is used now.
    pub(super) fn channel(&self) -> Arc<Channel> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// As [`Channel::send`].
    pub(super) fn send(&self, message: &FromProxy, descriptors: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
        self.channel().send(message, descriptors)
    }

    /// Another monitor has come.
    pub(super) fn replace(&self, channel: Channel) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(channel);
    }
}
