//! Who this process is to those that it may meet, and where it meets them.
//!
//! By default, programs of one user meet at names under a key that only they have. In a shared rack, programs of
//! several users meet in directories, as far as its rules allow.

use crate::kernel::Tcp;
use crate::remote;
use meeting::diag::{self, LookUp};
use meeting::place::{Directories, UserDirectory};
use meeting::{Endpoint, Evidence, Key, PeerUser, Policy, Reason, Rendezvous, Role, UserKey, UserKeys};
use rustix::io::Errno;
use socket::process::clock::{TICKS_PER_MILLISECOND, now_ns, ticks};
use socket::process::locked::Locked;
use socket::process::settings::settings;
use socket::process::syslog;
use socket::rack::key::RackKey;
use socket::rack::location;
use socket::rack::rules::{OVERFLOW_UID, Rules};
use socket::rack::shared::{RulesStamp, SharedRack, SharedRackError};
use socket::rack::users::{self, UserMap};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The key of the rack, once it was read.
static KEY: Locked<Option<Key>> = Locked::new(None);
/// The rules of the shared rack that were last read.
static RULES: Locked<Option<(RulesStamp, Arc<Rules>)>> = Locked::new(None);

/// Returns where a connection's end meets the other one, and whom. `avoided` are users, by their numbers on the
/// machine, whose programs have turned out not to be the other end; they are tried last, in their order.
///
/// # Errors
/// Why it meets nobody: [`Reason::Off`] while lanes are switched off in the rack, [`Reason::RackUser`],
/// [`Reason::Rack`]; in a shared rack also [`Reason::Rules`], [`Reason::NoRule`], [`Reason::OtherTuple`] and
/// [`Reason::Unmapped`].
pub fn meeting_place(endpoint: &Endpoint, avoided: &[u32]) -> Result<(Rendezvous, Policy), Reason> {
    if is_switched_off() {
        return Err(Reason::Off);
    }
    match location::shared() {
        Ok(Some(rack)) => {
            let own = Own::read(rack)?;
            let keys = Some(UserKeys { own: own.uid, key: key_in_shared_rack, admits: admits_number_in_shared_rack });
            let policy = Policy { admits: admits_in_shared_rack, evidence: Evidence::Proof, keys };
            Ok((place_in_shared_rack(rack, &own, endpoint, avoided)?, policy))
        }
        Ok(None) => Ok((Rendezvous::Names(private_key()?), private_policy())),
        Err(error) => Err(reason_of(&error)),
    }
}

/// Returns the key under which the processes of this user's rack meet.
fn private_key() -> Result<Key, Reason> {
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

/// Returns whom this process may meet in a rack that is its user's alone: processes of the same user.
pub fn private_policy() -> Policy {
    let admits = |uid, _: &Endpoint| match uid == rustix::process::geteuid().as_raw() {
        true => Ok(PeerUser::Known(uid)),
        false => Err(Reason::User),
    };
    Policy { admits, evidence: Evidence::LookUp, keys: None }
}

fn reason_of(error: &SharedRackError) -> Reason {
    match error {
        SharedRackError::Unmapped(_) => Reason::Unmapped,
        SharedRackError::RulesFile(_) | SharedRackError::Rules(_) => Reason::Rules,
        SharedRackError::UserDirectory(_) => Reason::RackUser,
        _ => Reason::Rack,
    }
}

/// The rules of the shared rack, for this process.
struct Own {
    rules: Arc<Rules>,
    map: UserMap,
    /// This process's user, by its number on the machine.
    uid: u32,
}

impl Own {
    fn read(rack: &SharedRack) -> Result<Self, Reason> {
        let map = users::of_this_process().map_err(|_| Reason::Unmapped)?;
        let uid = map.on_machine(rustix::process::geteuid().as_raw()).ok_or(Reason::Unmapped)?;
        let rules = rules(rack).map_err(|error| reason_of(&error))?;
        Ok(Self { rules, map, uid })
    }

    /// Returns whether this process may meet programs of another user, by its number in this user namespace. A user
    /// without one has to show the key first.
    fn admits(&self, uid: u32, endpoint: &Endpoint) -> Result<PeerUser, Reason> {
        if self.hides(uid) {
            return Ok(PeerUser::Hidden);
        }
        let peer = self.map.on_machine(uid).ok_or(Reason::Unmapped)?;
        self.check_rules(peer, endpoint).map(|()| PeerUser::Known(uid))
    }

    /// Returns whether a number stands for all users without one in this user namespace.
    fn hides(&self, uid: u32) -> bool {
        uid == OVERFLOW_UID && self.map.hides_users()
    }

    /// Checks that the rules let this process meet programs of another user, by its number on the machine.
    fn check_rules(&self, peer: u32, endpoint: &Endpoint) -> Result<(), Reason> {
        let (from, to) = match endpoint.role {
            Role::Connected => (self.uid, peer),
            Role::Accepted => (peer, self.uid),
        };
        let port = server_port(endpoint);
        if self.rules.allow(from, to, port) {
            return Ok(());
        }
        log_refusal(Refusal { from, to, port });
        Err(Reason::NoRule)
    }
}

/// Clients of a user that no rule lets reach servers of another one.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Refusal {
    from: u32,
    to: u32,
    port: u16,
}

/// The refusals that were logged, each with the time.
static LOGGED: Locked<Vec<(Refusal, u64)>> = Locked::new(Vec::new());
/// Maximum number of refusals that are remembered.
const LOGGED_MAX: usize = 64;
/// Nanoseconds after which a refusal is logged again.
const LOG_AGAIN_NS: u64 = 60_000_000_000;

/// Writes a refusal to the system's log, each at most once in a minute.
#[cold]
fn log_refusal(refusal: Refusal) {
    let now = now_ns();
    let is_new = LOGGED.with(|logged| {
        logged.retain(|(_, at)| now.saturating_sub(*at) < LOG_AGAIN_NS);
        let is_new = logged.len() < LOGGED_MAX && logged.iter().all(|(known, _)| *known != refusal);
        if is_new {
            logged.push((refusal, now));
        }
        is_new
    });
    if is_new && let Ok(Some(rack)) = location::shared() {
        let (Refusal { from, to, port }, shown) = (refusal, rack.path().display());
        syslog::log(&format_args!(
            "rack {shown}: no lane: no rule lets clients of user {from} reach servers of user {to} at port {port}"
        ));
    }
}

fn server_port(endpoint: &Endpoint) -> u16 {
    match endpoint.role {
        Role::Connected => endpoint.tuple.peer.port(),
        Role::Accepted => endpoint.tuple.local.port(),
    }
}

fn rules(rack: &SharedRack) -> Result<Arc<Rules>, SharedRackError> {
    let stamp = rack.rules_stamp()?;
    let known = RULES.with(|rules| rules.as_ref().filter(|(of, _)| *of == stamp).map(|(_, rules)| rules.clone()));
    if let Some(known) = known {
        return Ok(known);
    }
    let read = Arc::new(rack.read_rules()?);
    RULES.with(|rules| *rules = Some((stamp, read.clone())));
    Ok(read)
}

fn shared_rack() -> Result<&'static SharedRack, Reason> {
    location::shared().map_err(|error| reason_of(&error))?.ok_or(Reason::Rack)
}

fn admits_in_shared_rack(uid: u32, endpoint: &Endpoint) -> Result<PeerUser, Reason> {
    Own::read(shared_rack()?)?.admits(uid, endpoint)
}

fn admits_number_in_shared_rack(user: u32, endpoint: &Endpoint) -> Result<(), Reason> {
    Own::read(shared_rack()?)?.check_rules(user, endpoint)
}

fn key_in_shared_rack(user: u32) -> Result<UserKey, Reason> {
    let map = users::of_this_process().map_err(|_| Reason::Unmapped)?;
    match shared_rack()?.user_key(user, &map) {
        Ok(key) => Ok(key.to_bytes()),
        // Without a rule, or a key of it.
        Err(SharedRackError::System(Errno::NOENT)) => Err(Reason::Unmapped),
        Err(SharedRackError::System(errno)) => Err(Reason::of_errno(errno)),
        Err(error) => Err(reason_of(&error)),
    }
}

/// Returns where an end of a connection meets the other one in a shared rack.
fn place_in_shared_rack(
    rack: &SharedRack,
    own: &Own,
    endpoint: &Endpoint,
    avoided: &[u32],
) -> Result<Rendezvous, Reason> {
    let peer = known_peer(endpoint)?.filter(|uid| !own.hides(*uid));
    if let Some(uid) = peer {
        own.admits(uid, endpoint)?;
    }
    if endpoint.role == Role::Accepted {
        let directory = rack.ensure_user_directory(&own.map).map_err(|error| reason_of(&error))?;
        let of_users = vec![UserDirectory { user: own.uid, path: directory }];
        let directories = Directories { base: rack.base(), of_users };
        sweep_once(&directories);
        return Ok(Rendezvous::Directories(directories));
    }
    let mut servers = own.rules.servers(own.uid, server_port(endpoint));
    // Nobody else can prove to be the other end, but could keep this one waiting.
    let known = peer.and_then(|uid| own.map.on_machine(uid));
    servers.retain(|uid| known.is_none_or(|known| known == *uid));
    // The directory of a user whose programs have never met any is missing.
    servers.retain(|uid| rack.check_user_directory(*uid, &own.map).is_ok());
    // Whose a directory is that the kernel does not tell about, the key says, which root has made for its owner.
    servers.retain(|uid| own.map.here(*uid).is_some() || rack.user_key(*uid, &own.map).is_ok());
    let (mut servers, last): (Vec<u32>, Vec<u32>) = servers.into_iter().partition(|uid| !avoided.contains(uid));
    servers.extend(avoided.iter().filter(|uid| last.contains(uid)));
    let path = |uid: u32| rack.below(&uid.to_string());
    let of_users = servers.into_iter().map(|user| UserDirectory { user, path: path(user) }).collect();
    Ok(Rendezvous::Directories(Directories { base: rack.base(), of_users }))
}

/// Returns the user who has made the other end of a connection, if that is in this network namespace. Nothing is known
/// of a socket of root's: its process may have changed its user.
///
/// # Errors
/// [`Reason::OtherTuple`] if the other end must be in this network namespace and is not.
fn known_peer(endpoint: &Endpoint) -> Result<Option<u32>, Reason> {
    match diag::look_up_peer(endpoint) {
        LookUp::Found(entry) if entry.is_connected() => Ok((entry.uid != 0).then_some(entry.uid)),
        LookUp::Nothing if endpoint.tuple.peer.ip().is_loopback() => Err(Reason::OtherTuple),
        LookUp::Found(_) | LookUp::Nothing | LookUp::Unavailable => Ok(None),
    }
}

/// Removes once what killed programs have left in the directory of this user.
fn sweep_once(directories: &Directories) {
    static HAS_SWEPT: AtomicBool = AtomicBool::new(false);
    if !HAS_SWEPT.swap(true, Ordering::Relaxed) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        meeting::place::sweep(directories, now.tv_sec as i64);
    }
}

/// Continues in the child of a fork: another thread of the parent may have held a lock.
pub fn after_fork_in_child() {
    KEY.lock().reset();
    RULES.lock().reset();
    LOGGED.lock().reset();
    users::after_fork_in_child();
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
    let is_off = match location::shared() {
        Ok(Some(rack)) => rack.is_switched_off(),
        _ => {
            let rack = location::rack_dir(rustix::process::geteuid().as_raw());
            rustix::fs::stat(rack.join(stats_page::OFF_FILE)).is_ok()
        }
    };
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
