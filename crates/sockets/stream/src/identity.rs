//! Who this process is to those that it may meet.

use crate::kernel::Tcp;
use crate::remote;
use meeting::{Key, Policy, Reason, Role};
use socket::process::clock::{TICKS_PER_MILLISECOND, ticks};
use socket::process::locked::Locked;
use socket::process::settings::settings;
use socket::rack::key::RackKey;
use socket::rack::location;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};

/// The key of the rack, once it was read.
static KEY: Locked<Option<Key>> = Locked::new(None);

/// Returns the key under which the processes of this user's rack meet.
///
/// # Errors
/// Why there is none: [`Reason::Off`] while lanes are switched off in the rack, [`Reason::RackUser`], [`Reason::Rack`].
pub fn key() -> Result<Key, Reason> {
    if is_switched_off() {
        return Err(Reason::Off);
    }
    if let Some(known) = KEY.with(|key| *key) {
        return Ok(known);
    }
    let uid = rustix::process::geteuid().as_raw();
    let directory = location::ensure_rack_dir(uid);
    let of_rack = RackKey::of_rack(&directory).map_err(|_| match rustix::fs::stat(&directory) {
        Ok(found) if found.st_uid != uid => Reason::RackUser,
        _ => Reason::Rack,
    })?;
    let key = Key::from(of_rack.to_bytes());
    KEY.with(|known| *known = Some(key));
    Ok(key)
}

/// Continues in the child of a fork: another thread of the parent may have held the lock of the key.
pub fn after_fork_in_child() {
    KEY.lock().reset();
}

/// Time for which the library remembers that lanes are not switched off.
const ON_TICKS: u64 = TICKS_PER_MILLISECOND;
/// When they last were not, by the processor's clock; before the machine was started at first.
static ON_SINCE: AtomicU64 = AtomicU64::new(1 << 63);

/// Returns whether lanes are switched off in the rack (`crosslane lanes off`), or were a millisecond ago, in two system
/// calls at most.
pub fn is_switched_off() -> bool {
    let now = ticks();
    if now.wrapping_sub(ON_SINCE.load(Ordering::Relaxed)) < ON_TICKS {
        return false;
    }
    let rack = location::rack_dir(rustix::process::geteuid().as_raw());
    let is_off = rustix::fs::stat(rack.join(stats_page::OFF_FILE)).is_ok();
    if !is_off {
        ON_SINCE.store(now, Ordering::Relaxed);
    }
    is_off
}

/// Returns whether the settings keep a connection on TCP: by its server port, or because packet filters are to see it.
/// Both ends of a connection that meet are on this machine.
pub fn is_excluded(fd: RawFd, role: Role) -> bool {
    let settings = settings();
    if settings.only.is_none() && settings.except.is_none() {
        return settings.honours_filters;
    }
    let address = match role {
        Role::Accepted => rustix::net::getsockname(Tcp(fd).borrow()).ok(),
        Role::Connected => rustix::net::getpeername(Tcp(fd).borrow()).ok().flatten(),
    };
    let kernels = address.and_then(|address| SocketAddr::try_from(address).ok());
    let shown = if role == Role::Connected { remote::peer_address(fd) } else { None };
    let port = shown.or(kernels).map(|address| address.port());
    settings.honours_filters || port.is_some_and(|port| !settings.applies_to(port))
}

/// Returns whom this process may meet: processes of the same user.
pub fn policy() -> Policy {
    Policy { allowed_uid: rustix::process::geteuid().as_raw(), looks_up: true }
}
