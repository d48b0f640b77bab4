//! Notifies epoll sets that a listener closes, without depending on them.

use super::Listener;
use crate::process::callback::Callback;
use std::os::fd::RawFd;

type OnClosing = fn(RawFd, &'static Listener);

static ON_CLOSING: Callback<OnClosing> = Callback::new();

/// Sets the function that is called before each close of a descriptor of a listener.
pub(crate) fn observe_closing(on_closing: OnClosing) {
    ON_CLOSING.set(on_closing);
}

pub(super) fn notify_closing(fd: RawFd, listener: &'static Listener) {
    if let Some(on_closing) = ON_CLOSING.get() {
        on_closing(fd, listener);
    }
}
