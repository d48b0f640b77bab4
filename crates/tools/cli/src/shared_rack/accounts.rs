//! Users and groups of this machine, given by name or by number.

use std::ffi::CString;
use std::fmt;

use anyhow::{Context, Result};
use nix::unistd::{Gid, Uid};
use socket::rack::rules::OVERFLOW_UID;
use socket::rack::users::UserMap;

use crate::wrong_use::WrongUse;

/// The number that system calls take for "no change".
const NO_CHANGE: u32 = u32::MAX;

/// A group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its number.
    pub gid: u32,
    /// Its name, if it has one.
    pub name: Option<String>,
}

/// A user.
#[derive(Clone, Debug)]
pub struct User {
    /// Its number here.
    pub uid: u32,
    /// Its number on the machine, which differs in a user namespace.
    pub on_machine: u32,
    account: Option<nix::unistd::User>,
}

impl Group {
    /// Finds a group by its name or its number. A number need not have a name.
    ///
    /// # Errors
    /// Wrong use, if there is no such group.
    pub fn find(given: &str) -> Result<Self> {
        if is_number(given) {
            let gid = given.parse().ok().filter(|gid| *gid != NO_CHANGE);
            let gid = gid.ok_or_else(|| WrongUse::of(format!("group '{given}': no number of a group; name one")))?;
            return Ok(Self::of(gid));
        }
        let found = nix::unistd::Group::from_name(given).with_context(|| lookup_of("group", given))?;
        let unknown = || WrongUse::of(format!("group '{given}' does not exist; groupadd --system '{given}'"));
        let found = found.ok_or_else(unknown)?;
        Ok(Self { gid: found.gid.as_raw(), name: Some(found.name) })
    }

    /// Returns the group with a number.
    pub fn of(gid: u32) -> Self {
        let found = nix::unistd::Group::from_gid(Gid::from_raw(gid)).ok().flatten();
        Self { gid, name: found.map(|group| group.name) }
    }
}

impl fmt::Display for Group {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(formatter, "{name} ({})", self.gid),
            None => write!(formatter, "{}", self.gid),
        }
    }
}

impl User {
    /// Finds a user by name or by number, given with `option`. A number need not have an account.
    ///
    /// # Errors
    /// Wrong use, if there is no such user, or the number does not name one user of the machine.
    pub fn find(option: &str, given: &str, map: &UserMap) -> Result<Self> {
        let account = match number_of_user(option, given)? {
            Some(uid) => nix::unistd::User::from_uid(Uid::from_raw(uid)).ok().flatten().ok_or(uid),
            None => {
                let found = nix::unistd::User::from_name(given).with_context(|| lookup_of("user", given))?;
                let unknown = || format!("{option}: user '{given}' does not exist; useradd --system '{given}'");
                Ok(found.ok_or_else(|| WrongUse::of(unknown()))?)
            }
        };
        let uid = account.as_ref().map_or_else(|uid| *uid, |account| account.uid.as_raw());
        let shown = match given.parse() {
            Ok(OVERFLOW_UID) => String::new(),
            _ => format!(" ('{given}')"),
        };
        if uid == OVERFLOW_UID {
            let what = format!("user {OVERFLOW_UID}{shown} stands for every user without a number; name another user");
            return Err(WrongUse::of(format!("{option}: {what}")).into());
        }
        let unmapped =
            || format!("{option}: user '{given}' has no number outside of this user namespace; name another");
        let on_machine = map.on_machine(uid).ok_or_else(|| WrongUse::of(unmapped()))?;
        Ok(Self { uid, on_machine, account: account.ok() })
    }

    /// Returns its name, or its number without one.
    pub fn name(&self) -> String {
        self.account.as_ref().map_or_else(|| self.uid.to_string(), |account| account.name.clone())
    }

    /// Returns whether the account is known not to be a member of a group. Root needs no membership.
    pub fn is_no_member(&self, group: u32) -> bool {
        let Some(account) = self.account.as_ref().filter(|account| !account.uid.is_root()) else { return false };
        let groups = CString::new(account.name.as_str()).ok();
        let groups = groups.and_then(|name| nix::unistd::getgrouplist(&name, account.gid).ok());
        groups.is_some_and(|groups| !groups.contains(&Gid::from_raw(group)))
    }
}

impl fmt::Display for User {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.account {
            Some(account) => write!(formatter, "{} ({})", account.name, self.uid),
            None => write!(formatter, "{}", self.uid),
        }
    }
}

fn number_of_user(option: &str, given: &str) -> Result<Option<u32>> {
    if !is_number(given) {
        return Ok(None);
    }
    let wrong = || WrongUse::of(format!("{option}: '{given}' is no number of a user; see getent passwd"));
    Ok(Some(given.parse().ok().filter(|uid| *uid != NO_CHANGE).ok_or_else(wrong)?))
}

fn is_number(given: &str) -> bool {
    !given.is_empty() && given.bytes().all(|byte| byte.is_ascii_digit())
}

fn lookup_of(what: &str, given: &str) -> String {
    format!("{what} '{given}' cannot be looked up; give its number")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_groups_are_found_by_name_and_by_number() {
        let map = UserMap::identity();
        let root = User::find("--to", "root", &map).unwrap();
        assert_eq!((root.uid, root.on_machine, root.to_string().as_str()), (0, 0, "root (0)"));
        assert_eq!(User::find("--to", "0", &map).unwrap().name(), "root");
        let nameless = User::find("--to", "3999999", &map).unwrap();
        assert_eq!((nameless.uid, nameless.name().as_str()), (3_999_999, "3999999"));
        assert!(!root.is_no_member(3_999_999) && !nameless.is_no_member(3_999_999));
        assert_eq!(Group::find("root").unwrap(), Group::find("0").unwrap());
        assert_eq!(Group::find("3999999").unwrap().to_string(), "3999999");
    }

    #[test]
    fn an_account_outside_of_the_group_is_noticed() {
        let account = nix::unistd::User::from_name("daemon").ok().flatten();
        let Some(account) = account else { return };
        let daemon = User::find("--from", "daemon", &UserMap::identity()).unwrap();
        assert!(daemon.is_no_member(3_999_999) && !daemon.is_no_member(account.gid.as_raw()));
    }

    #[test]
    fn what_names_no_user_or_group_is_wrong_use() {
        let map = UserMap::identity();
        for (given, words) in [
            ("no-such-user", "--from: user 'no-such-user' does not exist; useradd --system 'no-such-user'"),
            ("", "--from: user '' does not exist"),
            ("-1", "--from: user '-1' does not exist"),
            ("65534", "--from: user 65534 stands for every user without a number; name another user"),
            ("4294967295", "--from: '4294967295' is no number of a user"),
            ("99999999999", "--from: '99999999999' is no number of a user"),
        ] {
            let error = User::find("--from", given, &map).unwrap_err();
            assert!(error.is::<WrongUse>() && error.to_string().starts_with(words), "{given}: {error}");
        }
        for (given, words) in [
            ("no-such-group", "group 'no-such-group' does not exist; groupadd --system 'no-such-group'"),
            ("4294967295", "group '4294967295': no number of a group"),
        ] {
            let error = Group::find(given).unwrap_err();
            assert!(error.is::<WrongUse>() && error.to_string().starts_with(words), "{given}: {error}");
        }
    }
}
