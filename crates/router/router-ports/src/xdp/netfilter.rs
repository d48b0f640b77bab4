//! The BPF programs of type *netfilter* on this machine (`linux/bpf.h`).

use std::ffi::c_int;
use std::io;

use super::bpf::{Attributes, call, call_for_fd};

const PROGRAM_GET_NEXT: c_int = 11;
const PROGRAM_GET_BY_ID: c_int = 13;
const GET_INFO: c_int = 15;
const LINK_GET_BY_ID: c_int = 30;
const LINK_GET_NEXT: c_int = 31;
const PROGRAM_NETFILTER: u32 = 32;
const LINK_NETFILTER: u32 = 10;
/// Offsets in `struct bpf_prog_info` and `struct bpf_link_info`, and the size of their parts that are read.
const KIND_AT: usize = 0;
const FAMILY_AT: usize = 16;
const HOOK_AT: usize = 20;
const INFO_BYTES: usize = 64;

/// Returns the family (`NFPROTO_IPV4` or `NFPROTO_IPV6`) and the hook of each attachment, in all network namespaces:
/// the kernel does not say which one it belongs to. Returns none without `CAP_SYS_ADMIN`, which listing needs.
pub fn netfilter_programs() -> Vec<(u32, u32)> {
    // Whoever reads a link keeps its program attached for that moment, so links are read only if there is a program.
    let is_loaded =
        objects(PROGRAM_GET_NEXT, PROGRAM_GET_BY_ID).any(|info| word_at(&info, KIND_AT) == PROGRAM_NETFILTER);
    if !is_loaded {
        return Vec::new();
    }
    let links = objects(LINK_GET_NEXT, LINK_GET_BY_ID).filter(|info| word_at(info, KIND_AT) == LINK_NETFILTER);
    let mut attached: Vec<(u32, u32)> =
        links.map(|info| (word_at(&info, FAMILY_AT), word_at(&info, HOOK_AT))).collect();
    attached.sort_unstable();
    attached
}

/// Returns information about all objects of a kind, by the commands that return the next identifier and an object's
/// descriptor.
fn objects(next: c_int, by_id: c_int) -> impl Iterator<Item = [u8; INFO_BYTES]> {
    let ids = std::iter::successors(next_id(next, 0), move |id| next_id(next, *id));
    // An object that has gone meanwhile has no information.
    ids.filter_map(move |id| information(by_id, id).ok())
}

fn next_id(next: c_int, id: u32) -> Option<u32> {
    let mut attributes = Attributes::new().word(0, id);
    // SAFETY: these attributes contain no pointers.
    unsafe { call(next, &mut attributes) }.ok()?;
    Some(attributes.word_at(4))
}

fn information(by_id: c_int, id: u32) -> io::Result<[u8; INFO_BYTES]> {
    let mut attributes = Attributes::new().word(0, id);
    // SAFETY: these attributes contain no pointers, and `by_id` is a command that returns a new descriptor.
    let object = unsafe { call_for_fd(by_id, &mut attributes) }?;
    let mut info = [0; INFO_BYTES];
    let mut attributes = Attributes::new().fd(0, &object).word(4, INFO_BYTES as u32).pointer_mut(8, &mut info);
    // SAFETY: `info` is exclusively borrowed during the call and has the size that the attributes say. It is zero, so
    // that it contains no pointers to further memory.
    unsafe { call(GET_INFO, &mut attributes) }?;
    Ok(info)
}

fn word_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::super::bpf::load_program_that_returns;
    use super::*;

    /// The hook is that of packets to the node itself, so that no node that runs beside this test forwards otherwise.
    #[test]
    fn netfilter_programs_are_listed() {
        const ATTACH_NETFILTER: u32 = 45;
        const LINK_CREATE: c_int = 28;
        let (family, hook, priority) = (2, 1, 4711);
        let name = "netfilter_programs_are_listed";
        let Some(namespace) = crate::namespace::for_test(name) else { return };
        let test = || {
            let Ok(program) = load_program_that_returns(1, PROGRAM_NETFILTER, ATTACH_NETFILTER) else {
                return println!("{name} is skipped: the kernel has no such programs");
            };
            let before = netfilter_programs();
            let mut attributes = Attributes::new().fd(0, &program).word(8, ATTACH_NETFILTER);
            attributes = attributes.word(16, family).word(20, hook).word(24, priority);
            // SAFETY: these attributes contain no pointers, and `LINK_CREATE` returns a new descriptor.
            let link = unsafe { call_for_fd(LINK_CREATE, &mut attributes) }.unwrap();
            let mut expected = before.clone();
            expected.push((family, hook));
            expected.sort_unstable();
            assert_eq!(netfilter_programs(), expected);
            drop(link);
            assert_eq!(netfilter_programs(), before);
        };
        namespace.within(test).unwrap();
    }
}
