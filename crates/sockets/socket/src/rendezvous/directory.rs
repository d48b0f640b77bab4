//! The rack directory: where listeners leave the names by which connecting ends find them.
//!
//! ```text
//!   RACK/v4/net-<inode of the network namespace>/127.0.0.1:6379/lane   one AF_UNIX stream socket per lane listener
//!                                                [::]:80/lane          takes IPv4 too
//!                                                [::]:443/lane!6       IPv6 only
//!                                                0.0.0.0:80/lane#3     one of several at this address (SO_REUSEPORT)
//!                                                127.77.0.2:80/lane!far   another node's; this node's proxy listens
//!                                                sweep                 where the next sweep begins
//!   RACK/v4/key                                                        the key of the names of lifelines ([`NameKey`])
//!   RACK/lanes-off                                                     there while no new lanes are to be made
//!   RACK/monitor.sock                                                  this node's monitor, where there are other ones
//!   RACK/v1/stat/<pid>                                                 the ledger pages
//! ```
//!
//! Each directory must be a real one, owned by the effective user, with no rights for anybody else. The owner of a name
//! may have been killed, and the name is then stale: no socket stands behind it. That is found out by connecting with
//! the wrong socket type, which a live socket answers with `EPROTOTYPE`, unharmed, and a stale name with
//! `ECONNREFUSED`.
//!
//! Each address has a directory, so `listen` and `connect` read only those of the addresses that they are about: what
//! they cost does not depend on other listeners, alive or dead. Names are made and removed under the lock of that
//! directory, so that nobody removes a name that has just been made anew. The holder of the lock removes the directory
//! too if it is empty; whoever has opened it meanwhile finds that out once it has the lock, and begins again. Stale
//! names at addresses that nobody uses any more are removed by sweeps: each `listen` checks the next few addresses of
//! the rack, so the number of stale names stays in proportion to that of live ones.

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
pub use rack::{Rack, is_in_any_rack};
