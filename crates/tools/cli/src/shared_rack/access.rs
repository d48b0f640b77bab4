//! The access control list of a shared rack (acl(5)): users whom rules name may enter it without being members of its
//! group. A service may drop its supplementary groups when it changes its user, as HAProxy does.

use std::collections::BTreeSet;
use std::os::fd::AsFd;

use rustix::fs::XattrFlags;
use rustix::io::Errno;
use socket::rack::rules::Rules;
use socket::rack::users::UserMap;

// `linux/posix_acl_xattr.h`: a version, then for each entry a tag, its rights and a number.
const ATTRIBUTE: &str = "system.posix_acl_access";
const VERSION: u32 = 2;
const OWNER: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP: u16 = 0x04;
const MASK: u16 = 0x10;
const OTHERS: u16 = 0x20;
const NO_NUMBER: u32 = u32::MAX;

const ALL: u16 = 7;
const ENTER: u16 = 1;

/// Lets the users of all rules enter a directory of mode 3770.
///
/// # Errors
/// `OPNOTSUPP` on a file system without access control lists.
pub fn grant(directory: impl AsFd, rules: &Rules, map: &UserMap) -> Result<(), Errno> {
    let users = rules.all().iter().flat_map(|rule| [rule.from, rule.to]).filter_map(|uid| map.here(uid));
    let list = list(&users.filter(|uid| *uid != 0).collect());
    rustix::fs::fsetxattr(directory, ATTRIBUTE, &list, XattrFlags::empty())
}

/// Returns the list of a directory whose owner and group have all rights, whose others have none, and that these users
/// may enter.
fn list(users: &BTreeSet<u32>) -> Vec<u8> {
    let mut entries = vec![(OWNER, ALL, NO_NUMBER)];
    entries.extend(users.iter().map(|uid| (USER, ENTER, *uid)));
    entries.extend([(GROUP, ALL, NO_NUMBER), (MASK, ALL, NO_NUMBER), (OTHERS, 0, NO_NUMBER)]);
    let mut bytes = VERSION.to_le_bytes().to_vec();
    for (tag, rights, number) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(rights.to_le_bytes());
        bytes.extend(number.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_list_has_each_user_once_and_leaves_the_mode() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = std::fs::File::open(scratch.path()).unwrap();
        std::fs::set_permissions(scratch.path(), std::fs::Permissions::from_mode(0o770)).unwrap();
        let rules = Rules::parse(b"allow from 33 to 999\nallow from 999 to 33\nallow from 33 to 0\n").unwrap();
        match grant(&directory, &rules, &UserMap::identity()) {
            Err(Errno::OPNOTSUPP | Errno::PERM) => return,
            granted => granted.unwrap(),
        }
        let mut read = [0; 256];
        let bytes = rustix::fs::fgetxattr(&directory, ATTRIBUTE, &mut read).unwrap();
        assert_eq!(read[..bytes], list(&BTreeSet::from([33, 999])));
        assert_eq!(bytes, 4 + 6 * 8);
        assert_eq!(directory.metadata().unwrap().permissions().mode() & 0o777, 0o770);
    }
}
