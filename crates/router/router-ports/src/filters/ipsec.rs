//! IPsec policies (`linux/xfrm.h`): they block packets, or require that packets are encrypted.

use super::attribute;
use super::own_addresses::OwnAddresses;
use crate::netlink::NetlinkError;
use crate::netlink::socket::Socket;

const GET_POLICY: u16 = 0x15;
const GET_DEFAULT: u16 = 0x28;
/// `struct xfrm_userpolicy_id`.
const POLICY_ID_BYTES: usize = 64;
/// `struct xfrm_userpolicy_info`, with the selector first.
const POLICY_BYTES: usize = 168;
const DESTINATION_AT: usize = 0;
const SOURCE_AT: usize = 16;
const FAMILY_AT: usize = 40;
const DESTINATION_BITS_AT: usize = 42;
const SOURCE_BITS_AT: usize = 43;
const DIRECTION_AT: usize = 160;
const ACTION_AT: usize = 161;
const TEMPLATES: u16 = 5;
const INTERFACE_ID: u16 = 31;
const ALLOW: u8 = 0;
/// The directions that forwarded packets pass. The others are *in*, and those of single sockets.
const DIRECTIONS: [(u8, &str); 2] = [(1, "out"), (2, "fwd")];
/// `struct xfrm_userpolicy_default`: in, fwd, out.
const DEFAULT_BYTES: usize = 3;
const DEFAULT_BLOCK: u8 = 1;

/// Returns a description of the policies that packets between interfaces may match: one for each direction and effect.
pub(super) fn find(socket: &mut Socket, own: &OwnAddresses) -> Result<Vec<String>, NetlinkError> {
    let mut found: Vec<String> = Vec::new();
    socket.dump_raw(GET_POLICY, &[0; POLICY_ID_BYTES], &mut found, Vec::clear, |found, message| {
        found.extend(describe(message, own));
    })?;
    found.sort();
    found.dedup();
    Ok(found)
}

/// Returns a description of what happens to packets that match no policy, if they are blocked. A kernel before 5.14
/// has no such setting, and refuses the request.
pub(super) fn find_default(socket: &mut Socket) -> Result<Vec<String>, NetlinkError> {
    let mut is_blocking = false;
    socket.ask_raw(GET_DEFAULT, &[0; DEFAULT_BYTES], |message| {
        is_blocking = message.get(1..DEFAULT_BYTES).is_some_and(|forwarded| forwarded.contains(&DEFAULT_BLOCK));
    })?;
    Ok(is_blocking.then(|| "IPsec default policy, block".to_owned()).into_iter().collect())
}

fn describe(message: &[u8], own: &OwnAddresses) -> Option<String> {
    let (policy, attributes) = message.split_at_checked(POLICY_BYTES)?;
    let (_, direction) = DIRECTIONS.into_iter().find(|(number, _)| *number == policy[DIRECTION_AT])?;
    let family = u16::from_ne_bytes([policy[FAMILY_AT], policy[FAMILY_AT + 1]]);
    let is_of_node = own.is_all_of(family, &policy[DESTINATION_AT..], policy[DESTINATION_BITS_AT])
        || own.is_all_of(family, &policy[SOURCE_AT..], policy[SOURCE_BITS_AT]);
    // Only packets by an XFRM interface match those with its identifier, and such an interface is no port.
    let is_of_interface = attribute(attributes, INTERFACE_ID).is_some_and(|id| id != [0; 4]);
    let effect = match policy[ACTION_AT] {
        _ if is_of_node || is_of_interface => return None,
        ALLOW if attribute(attributes, TEMPLATES).is_none_or(<[u8]>::is_empty) => return None,
        ALLOW => "encrypt",
        _ => "block",
    };
    Some(format!("IPsec policy, direction {direction}, {effect}"))
}
