//! `crosslane rack-dir allow`: adds a rule to a shared rack, and makes the directories of its two users.
//!
//! The rules are replaced by renaming a new file, so that programs always read a complete one. A lock on the directory
//! keeps concurrent commands from losing each other's rules.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use socket::process::settings::PortList;
use socket::rack::rules::{Rule, Rules};
use socket::rack::shared::{RULES_FILE, SharedRack, SharedRackError, USER_MODE};
use socket::rack::users::{self, UserMap};

use super::access;
use super::accounts::{Group, User};
use super::create::open_parent;
use super::keys;
use super::{RULES_HEADER, RULES_MODE, absolute, is_directory, require_root};
use crate::processes::program::user_name;
use crate::wrong_use::WrongUse;
use crate::{output, rack_dir};

/// Options of `crosslane rack-dir allow`.
#[derive(clap::Args)]
pub struct Options {
    /// The shared rack
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The user of the clients, which connect, by name or number
    #[arg(long, value_name = "USER")]
    from: String,
    /// The user of the servers, which accept
    #[arg(long, value_name = "USER")]
    to: String,
    /// The ports of the servers, such as 80,443,6000-6100 [default: all]
    #[arg(long, value_name = "LIST")]
    ports: Option<String>,
}

/// Number of attempts to lock a directory, and the time between them: a member may hold the lock.
const LOCK_ATTEMPTS_MAX: u32 = 200;
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// A rule to be added.
struct NewRule<'a> {
    rule: Rule,
    ports: Option<String>,
    from: &'a User,
    to: &'a User,
}

/// Adds the rule, and prints what it allows.
pub fn main(options: &Options) -> Result<()> {
    require_root("allow")?;
    let map = users::of_this_process().context("/proc/self/uid_map cannot be read; mount /proc")?;
    let from = User::find("--from", &options.from, &map)?;
    let to = User::find("--to", &options.to, &map)?;
    let new = NewRule::new(&from, &to, options.ports.as_deref())?;
    let path = absolute(&options.directory)?;
    let shown = path.display();
    let missing =
        || WrongUse::of(format!("'{shown}' is no shared rack; crosslane rack-dir create {shown} --group GROUP"));
    let rack = rack_dir::shared(&path)?.ok_or_else(missing)?;
    // Nobody else may replace the directory while it is changed.
    path.parent().map(open_parent).transpose()?;
    let directory = lock(&path)?;
    let group = Group::of(rustix::fs::fstat(&directory)?.st_gid);
    let rules = read(&rack)?;
    for user in [&from, &to] {
        make_user_directory(&rack, &directory, user, &group, &map)?;
    }
    let is_known = Rules::parse(&rules).is_ok_and(|rules| rules.all().contains(&new.rule));
    if !is_known {
        write(&rack, &new.append_to(rules)?, &group)?;
    }
    let all = rack.read_rules().map_err(|error| rack_dir::unusable(&path, &error))?;
    let has_access = access::grant(&directory, &all, &map).is_ok();
    keys::ensure(&directory, &path, &all, &map);
    let ports = new.ports.map_or_else(|| "all ports".to_owned(), |ports| format!("ports {ports}"));
    let already = if is_known { " already" } else { "" };
    output::print(&format!("Clients of {from} may{already} reach servers of {to} in {shown}: {ports}.\n"))?;
    let both = [&from, &to].into_iter().take(if from.uid == to.uid { 1 } else { 2 });
    // On a file system without access control lists, only members of the group may enter it.
    for user in both.filter(|user| !has_access && user.is_no_member(group.gid)) {
        let (name, of) = (user.name(), group.name.clone().unwrap_or_else(|| group.gid.to_string()));
        let remedy = format!("usermod -aG {of} {name}, then restart its programs");
        eprintln!("crosslane: user {user} is no member of group {group}, so that it has no lanes in {shown}; {remedy}");
    }
    Ok(())
}

impl<'a> NewRule<'a> {
    fn new(from: &'a User, to: &'a User, ports: Option<&str>) -> Result<Self> {
        let parse = |text: &str| PortList::parse(text).map_err(|error| WrongUse::of(format!("--ports: {error}")));
        let parsed = ports.map(parse).transpose()?;
        let rule = Rule { from: from.on_machine, to: to.on_machine, ports: parsed };
        // The list may have blanks, and thereby the ends of lines, only between its words.
        let ports = ports.map(|text| text.split_whitespace().collect());
        Ok(Self { rule, ports, from, to })
    }

    fn line(&self) -> String {
        let Rule { from, to, .. } = self.rule;
        let ports = self.ports.as_ref().map_or_else(String::new, |ports| format!(" ports {ports}"));
        // A name is only a comment, but must not end the line.
        let names = format!("{} to {}", self.from.name(), self.to.name()).replace(char::is_control, "?");
        format!("allow from {from} to {to}{ports}  # {names}\n")
    }

    /// Returns the rules with this one, checked as programs read them.
    fn append_to(&self, mut rules: Vec<u8>) -> Result<Vec<u8>> {
        if rules.last().is_some_and(|last| *last != b'\n') {
            rules.push(b'\n');
        }
        rules.extend_from_slice(self.line().as_bytes());
        let parsed = Rules::parse(&rules).map_err(|error| WrongUse::of(format!("the rules with this one: {error}")))?;
        assert_eq!(parsed.all().last(), Some(&self.rule), "the rule is read as it was written");
        Ok(rules)
    }
}

/// Locks the directory for the life of the descriptor.
fn lock(path: &Path) -> Result<OwnedFd> {
    let shown = path.display();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::open(path, flags, Mode::empty())
        .map_err(|error| WrongUse::of(format!("rack '{shown}': {error}; name the directory itself, without a link")))?;
    for _ in 0..LOCK_ATTEMPTS_MAX {
        match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(directory),
            Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(LOCK_PAUSE),
            Err(error) => return Err(error).with_context(|| format!("rack '{shown}' cannot be locked; move it")),
        }
    }
    bail!("rack '{shown}' is locked by another process; end that, which 'fuser {shown}' shows")
}

/// Returns the text of the rules, which is valid; that of a new file if there is none.
fn read(rack: &SharedRack) -> Result<Vec<u8>> {
    let path = rack.path().join(RULES_FILE);
    if std::fs::symlink_metadata(&path).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound) {
        return Ok(RULES_HEADER.as_bytes().to_vec());
    }
    rack.read_rules().map_err(|error| rack_dir::unusable(rack.path(), &error))?;
    std::fs::read(&path).with_context(|| format!("reading '{}'; check it", path.display()))
}

/// Replaces the rules file.
fn write(rack: &SharedRack, rules: &[u8], group: &Group) -> Result<()> {
    let replace = || -> std::io::Result<()> {
        let mut file = tempfile::Builder::new().prefix(".rules-").tempfile_in(rack.path())?;
        file.write_all(rules)?;
        fchown(file.as_file(), Some(0), Some(group.gid))?;
        file.as_file().set_permissions(std::fs::Permissions::from_mode(RULES_MODE))?;
        file.as_file().sync_all()?;
        file.persist(rack.path().join(RULES_FILE))?;
        Ok(())
    };
    let shown = rack.path().display();
    replace().with_context(|| format!("writing '{shown}/{RULES_FILE}'; free space there, and repeat this"))
}

/// Makes the directory of a user, or sets its group and mode right.
fn make_user_directory(
    rack: &SharedRack,
    directory: &OwnedFd,
    user: &User,
    group: &Group,
    map: &UserMap,
) -> Result<()> {
    let name = user.on_machine.to_string();
    let path = rack.user_directory(user.on_machine);
    let shown = path.display();
    let is_new = match rustix::fs::mkdirat(directory, &name, Mode::RWXU) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(error) => return Err(error).with_context(|| format!("directory '{shown}' cannot be made; mkdir it")),
    };
    if !is_new {
        check_owner(rack, user, &path, map)?;
    }
    let set = || -> Result<(), Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let own = rustix::fs::openat(directory, &name, flags, Mode::empty())?;
        // A user may have replaced its own directory meanwhile.
        let owner = if is_new { 0 } else { user.uid };
        if rustix::fs::fstat(&own)?.st_uid != owner {
            return Err(Errno::PERM);
        }
        rustix::fs::fchown(&own, Some(Uid::from_raw(user.uid)), Some(Gid::from_raw(group.gid)))?;
        rustix::fs::fchmod(&own, Mode::from_raw_mode(USER_MODE))
    };
    set().with_context(|| format!("directory '{shown}' cannot be given to user {user}; rmdir it, and repeat this"))
}

/// Checks that an existing directory of a user is not another's, who may have made it first.
fn check_owner(rack: &SharedRack, user: &User, path: &Path, map: &UserMap) -> Result<()> {
    let shown = path.display();
    let found = rustix::fs::lstat(path).with_context(|| format!("directory '{shown}'; repeat this"))?;
    if !is_directory(&found) {
        bail!("'{shown}' is not a directory of user {user}; rm '{shown}', and repeat this");
    }
    if found.st_uid != user.uid {
        let owner = user_name(found.st_uid);
        bail!("directory '{shown}' belongs to user {owner}, not to {user}; rm -r '{shown}', and repeat this");
    }
    match rack.check_user_directory(user.on_machine, map) {
        // The mode is set right below.
        Ok(()) | Err(SharedRackError::UserDirectory(_)) => Ok(()),
        Err(error) => Err(rack_dir::unusable(rack.path(), &error).into()),
    }
}
