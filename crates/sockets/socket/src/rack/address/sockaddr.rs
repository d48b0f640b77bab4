//! C socket addresses in the memory of programs.

#![allow(unsafe_code)] // Socket addresses in the memory of C callers.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use rustix::io::Errno;

use super::canonical::Family;
use crate::process::memory;

const SOCKADDR_IN_BYTES: usize = size_of::<libc::sockaddr_in>();
const SOCKADDR_IN6_BYTES: usize = size_of::<libc::sockaddr_in6>();
/// The kernel accepts IPv6 addresses without their last field, the scope.
const SOCKADDR_IN6_BYTES_MIN: usize = SOCKADDR_IN6_BYTES - 4;
const SOCKADDR_BYTES_MAX: usize = size_of::<libc::sockaddr_storage>();

/// Reads the address that a program has passed to `bind` or `connect`.
///
/// # Errors
/// `FAULT` for a null pointer, `INVAL` for a length that no address has, `AFNOSUPPORT` for a family other than IPv4 and
/// IPv6.
///
/// # Safety
/// `pointer` is null or readable for `bytes` bytes.
pub unsafe fn read_sockaddr(pointer: *const libc::sockaddr, bytes: libc::socklen_t) -> Result<SocketAddr, Errno> {
    let bytes = bytes as usize;
    if pointer.is_null() {
        return Err(Errno::FAULT);
    }
    if !(size_of::<libc::sa_family_t>()..=SOCKADDR_BYTES_MAX).contains(&bytes) {
        return Err(Errno::INVAL);
    }
    if !memory::are_readable(pointer.cast::<u8>(), bytes) {
        return Err(Errno::FAULT);
    }
    let mut copy = [0_u8; SOCKADDR_BYTES_MAX];
    // SAFETY: the caller guarantees that `bytes` bytes are readable. They fit into `copy`, a local, as checked above.
    unsafe { std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), copy.as_mut_ptr(), bytes) };
    decode_sockaddr(&copy[..bytes])
}

/// Decodes the bytes of a C socket address.
fn decode_sockaddr(bytes: &[u8]) -> Result<SocketAddr, Errno> {
    let family = libc::sa_family_t::from_ne_bytes(array(bytes, 0).ok_or(Errno::INVAL)?);
    let port = || array(bytes, 2).map(u16::from_be_bytes).ok_or(Errno::INVAL);
    match Family::from_raw(i32::from(family)).ok_or(Errno::AFNOSUPPORT)? {
        Family::V4 if bytes.len() < SOCKADDR_IN_BYTES => Err(Errno::INVAL),
        Family::V4 => {
            let ip = Ipv4Addr::from(array::<4>(bytes, 4).ok_or(Errno::INVAL)?);
            Ok(SocketAddr::V4(SocketAddrV4::new(ip, port()?)))
        }
        Family::V6 if bytes.len() < SOCKADDR_IN6_BYTES_MIN => Err(Errno::INVAL),
        Family::V6 => {
            let flow = u32::from_ne_bytes(array(bytes, 4).ok_or(Errno::INVAL)?);
            let ip = Ipv6Addr::from(array::<16>(bytes, 8).ok_or(Errno::INVAL)?);
            let scope = array(bytes, 24).map_or(0, u32::from_ne_bytes);
            Ok(SocketAddr::V6(SocketAddrV6::new(ip, port()?, flow, scope)))
        }
    }
}

pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

/// Encodes an address as a C socket address. Returns the bytes and how many of them are used.
pub fn encode_sockaddr(address: SocketAddr) -> ([u8; SOCKADDR_IN6_BYTES], usize) {
    let mut bytes = [0_u8; SOCKADDR_IN6_BYTES];
    bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
    match address {
        SocketAddr::V4(v4) => {
            bytes[..2].copy_from_slice(&(libc::AF_INET as libc::sa_family_t).to_ne_bytes());
            bytes[4..8].copy_from_slice(&v4.ip().octets());
            (bytes, SOCKADDR_IN_BYTES)
        }
        SocketAddr::V6(v6) => {
            bytes[..2].copy_from_slice(&(libc::AF_INET6 as libc::sa_family_t).to_ne_bytes());
            bytes[4..8].copy_from_slice(&v6.flowinfo().to_ne_bytes());
            bytes[8..24].copy_from_slice(&v6.ip().octets());
            bytes[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
            (bytes, SOCKADDR_IN6_BYTES)
        }
    }
}

/// Writes an address as `getsockname`, `getpeername` and `accept` do: truncated to the caller's length, which is set to
/// the full length.
///
/// # Errors
/// `FAULT` for a null pointer that would be written through, `INVAL` for a negative length.
///
/// # Safety
/// `bytes_inout` is null or readable and writable; `pointer` is null or writable for as many bytes as it says.
pub unsafe fn write_sockaddr(
    address: SocketAddr,
    pointer: *mut libc::sockaddr,
    bytes_inout: *mut libc::socklen_t,
) -> Result<(), Errno> {
    memory::check_writable(bytes_inout)?;
    let (bytes, full) = encode_sockaddr(address);
    // SAFETY: `bytes_inout` is not null, and the caller guarantees that it is readable.
    let room = unsafe { bytes_inout.read_unaligned() };
    let room = i32::try_from(room).map_err(|_| Errno::INVAL)? as usize;
    let written = full.min(room);
    if !memory::are_writable(pointer.cast::<u8>(), written) {
        return Err(Errno::FAULT);
    }
    if written > 0 {
        // SAFETY: `written` is at most the length of `bytes` and the room that the caller guarantees to be writable.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), pointer.cast::<u8>(), written) };
    }
    // SAFETY: `bytes_inout` is not null, and the caller guarantees that it is writable.
    unsafe { bytes_inout.write_unaligned(full as libc::socklen_t) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rack::address::canonical::tests::any_address;
    use proptest::prelude::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn read_back(address: SocketAddr) -> Result<SocketAddr, Errno> {
        let (bytes, length) = encode_sockaddr(address);
        // SAFETY: `length` is at most the length of `bytes`.
        unsafe { read_sockaddr(bytes.as_ptr().cast(), length as u32) }
    }

    proptest! {
        #[test]
        fn a_socket_address_survives_its_c_form(address in any_address()) {
            prop_assert_eq!(read_back(address), Ok(address));
        }

        #[test]
        fn any_bytes_are_an_address_or_an_error(
            bytes in prop::collection::vec(any::<u8>(), 0..140),
            family in 0..12_u16,
        ) {
            let mut bytes = bytes;
            if bytes.len() >= 2 {
                bytes[..2].copy_from_slice(&family.to_ne_bytes());
            }
            // SAFETY: the pointer and the length are those of the vector.
            let read = unsafe { read_sockaddr(bytes.as_ptr().cast(), bytes.len() as u32) };
            let valid = match i32::from(family) {
                libc::AF_INET => (16..=128).contains(&bytes.len()),
                libc::AF_INET6 => (24..=128).contains(&bytes.len()),
                _ => false,
            };
            prop_assert_eq!(read.is_ok(), valid);
        }
    }

    fn write_cut(given: SocketAddr, room: u32) -> (Result<(), Errno>, [u8; 40], u32) {
        let mut buffer = [0xaa_u8; 40];
        let mut length = room;
        // SAFETY: `room` is at most 40, the length of `buffer`, or is refused before anything is written.
        let result = unsafe { write_sockaddr(given, buffer.as_mut_ptr().cast(), &raw mut length) };
        (result, buffer, length)
    }

    #[test]
    fn an_address_is_truncated_to_a_short_buffer_and_its_full_length_is_reported() {
        let v4 = address("127.0.0.1:6379");
        let (whole, _) = encode_sockaddr(v4);
        for room in 0..40_u32 {
            let (result, buffer, length) = write_cut(v4, room);
            let written = room.min(16) as usize;
            assert_eq!((result, length), (Ok(()), 16));
            assert_eq!(buffer[..written], whole[..written]);
            assert!(buffer[written..].iter().all(|byte| *byte == 0xaa));
        }
        assert_eq!(write_cut(address("[::1]:1"), 40).2, 28);
        assert_eq!(write_cut(v4, u32::MAX).0, Err(Errno::INVAL));
    }

    #[test]
    fn null_pointers_are_faults() {
        let mut length = 16;
        // SAFETY: the functions accept null pointers, which they refuse.
        unsafe {
            assert_eq!(read_sockaddr(std::ptr::null(), 16), Err(Errno::FAULT));
            assert_eq!(write_sockaddr(address("1.2.3.4:5"), std::ptr::null_mut(), &raw mut length), Err(Errno::FAULT));
            assert_eq!(
                write_sockaddr(address("1.2.3.4:5"), std::ptr::null_mut(), std::ptr::null_mut()),
                Err(Errno::FAULT)
            );
        }
    }
}
