//! Who this process is to those that it may meet.

use meeting::{Key, Policy};
use socket::process::locked::Locked;
use socket::rendezvous::directory::Rack;

/// The key of the rack, once it was read.
static KEY: Locked<Option<Key>> = Locked::new(None);

/// Returns the key under which the processes of this user's rack meet; `None` if there is none.
pub fn key() -> Option<Key> {
    if let Some(known) = KEY.with(|key| *key) {
        return Some(known);
    }
    let key = Key::from(Rack::current().ok()?.key().to_bytes());
    KEY.with(|known| *known = Some(key));
    Some(key)
}

/// Returns whom this process may meet: processes of the same user.
pub fn policy() -> Policy {
    Policy { allowed_uid: rustix::process::geteuid().as_raw(), looks_up: true }
}
