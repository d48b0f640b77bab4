//! Tells epoll sets that a connection must be polled again, without knowing them.

use super::Connection;
use crate::process::callback::Callback;

type OnChange = fn(&'static Connection);

static ON_CHANGE: Callback<OnChange> = Callback::new();

/// Has `on_change` called when the sets that hold a connection must poll it.
pub(crate) fn observe_changes(on_change: OnChange) {
    ON_CHANGE.set(on_change);
}

/// Tells the epoll sets that hold `connection` to poll it.
pub(super) fn tell_change(connection: &'static Connection) {
    if let Some(on_change) = ON_CHANGE.get() {
        on_change(connection);
    }
}
