//! The rack directory: where listeners publish the names by which connecting endpoints find them.
//!
//! ```text
//!   RACK/v4/net-<inode of the network namespace>/127.0.0.1:6379/lane   one AF_UNIX stream socket per lane listener
//!                                                [::]:80/lane          accepts IPv4 too
//!                                                [::]:443/lane!6       IPv6 only
//!                                                0.0.0.0:80/lane#3     one of several at this address (SO_REUSEPORT)
//!                                                127.77.0.2:80/lane!far   of another node; the proxy listens
//!                                                sweep                 the position at which the next sweep begins
//!   RACK/v4/key                                                        the key of the names of lifelines (`NameKey`)
//!   RACK/lanes-off                                                     present while new lanes are switched off
//!   RACK/monitor.sock                                                  the socket of this node's monitor
//!   RACK/v1/stat/<pid>                                                 the stats pages
//! ```
//!
//! Each directory must be a real one, owned by the effective user, and closed to all other users. If the owner of a
//! name was killed, the name is stale: no socket is behind it. A probe tells by connecting with the wrong socket type:
//! a live socket answers `EPROTOTYPE` and does not notice, a stale name answers `ECONNREFUSED`.
//!
//! Each address has a directory, so `listen` and `connect` read only the directories of the addresses that concern
//! them: their cost does not depend on other listeners, live or dead. Names are created and removed under the lock of
//! that directory, so that a name which has just been created again is never removed. The holder of the lock also
//! removes the directory if it is empty; a process that has opened the directory meanwhile notices this when it holds
//! the lock, and starts again. Stale names at addresses that are no longer used are removed by sweeps: each `listen`
//! checks the next few addresses of the rack, so the number of stale names stays in proportion to that of live ones.

mod known_addresses;
mod listener_name;
mod location;
mod lock;
mod private;
mod rack;
mod sweep;
#[cfg(test)]
pub(crate) mod tests;

pub use listener_name::{ListenerName, MEMBERS_MAX};
pub use location::{
    ensure_rack_dir, is_owned_by_other_user, missing_configured_directory, rack_dir, remember_environment,
};
pub use lock::RackLock;
pub(crate) use rack::netns_cookie;
pub use rack::{Rack, VERSION, has_other_version_at, is_in_any_rack};
