//! Notifies epoll sets that a connection must be polled again, without depending on them.

use super::Connection;
use crate::process::callback::Callback;

type OnChange = fn(&'static Connection);

static ON_CHANGE: Callback<OnChange> = Callback::new();

/// Sets the function that is called when the sets that hold a connection must poll it.
pub(crate) fn observe_changes(on_change: OnChange) {
    ON_CHANGE.set(on_change);
}

/// Notifies the epoll sets that hold `connection`.
pub(super) fn notify_change(connection: &'static Connection) {
    if let Some(on_change) = ON_CHANGE.get() {
        on_change(connection);
    }
}
