//! IPv4 options (RFC 791, section 3.1; RFC 1812, sections 4.2.2.1 and 5.2.4): records routes and timestamps, rejects
//! source routes (RFC 7126), and leaves other options unchanged.

use std::net::Ipv4Addr;

use packet::ipv4::{HEADER_BYTES, Ipv4Option, Packet};

use crate::Time;

/// Why a packet is dropped because of its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OptionsError {
    /// A source route.
    SourceRoute,
    /// The byte at this offset of the header is invalid.
    Malformed { pointer: u8 },
}

const END_OF_LIST: u8 = 0;
const NO_OPERATION: u8 = 1;
/// Flag of timestamps that do not count from midnight UT (RFC 791): ours count from the start of the router.
const NON_STANDARD_TIME: u32 = 1 << 31;

/// Processes the options of a validated packet, and updates the checksum if they changed.
pub(super) fn process(bytes: &mut [u8], own: Ipv4Addr, now: Time) -> Result<(), OptionsError> {
    let mut packet = Packet::new_checked(bytes).map_err(|_| OptionsError::Malformed { pointer: 0 })?;
    let is_changed = process_all(packet.options_mut(), own, now)?;
    if is_changed {
        packet.fill_checksum();
    }
    Ok(())
}

/// Processes all options, and returns whether any changed. Bounded by the length: each option takes at least one byte.
fn process_all(options: &mut [u8], own: Ipv4Addr, now: Time) -> Result<bool, OptionsError> {
    let malformed = |at: usize| OptionsError::Malformed { pointer: (HEADER_BYTES + at) as u8 };
    let (mut at, mut is_changed) = (0, false);
    while at < options.len() {
        match options[at] {
            END_OF_LIST => break,
            NO_OPERATION => {
                at += 1;
                continue;
            }
            Ipv4Option::LOOSE_SOURCE_ROUTE | Ipv4Option::STRICT_SOURCE_ROUTE => return Err(OptionsError::SourceRoute),
            _ => {}
        }
        let bytes = usize::from(*options.get(at + 1).ok_or(malformed(at))?);
        if bytes < 2 || at + bytes > options.len() {
            return Err(malformed(at + 1));
        }
        let option = &mut options[at..at + bytes];
        let result = match option[0] {
            Ipv4Option::RECORD_ROUTE => record_route(option, own),
            Ipv4Option::TIMESTAMP => record_time(option, own, now),
            _ => Ok(false),
        };
        is_changed |= result.map_err(|offset| malformed(at + offset))?;
        at += bytes;
    }
    Ok(is_changed)
}

/// Records the router's data in the option. The error is the offset of the invalid byte in the option.
fn record_route(option: &mut [u8], own: Ipv4Addr) -> Result<bool, usize> {
    let pointer = usize::from(*option.get(2).ok_or(1_usize)?);
    if pointer < 4 {
        return Err(2);
    }
    if pointer > option.len() {
        return Ok(false);
    }
    let slot = option.get_mut(pointer - 1..pointer + 3).ok_or(2_usize)?;
    slot.copy_from_slice(&own.octets());
    option[2] = pointer as u8 + 4;
    Ok(true)
}

/// Records the router's data in the option. The error is the offset of the invalid byte in the option.
fn record_time(option: &mut [u8], own: Ipv4Addr, now: Time) -> Result<bool, usize> {
    const WITH_ADDRESSES: u8 = 1;
    const OF_ADDRESSES: u8 = 3;
    if option.len() < 4 {
        return Err(1);
    }
    let pointer = usize::from(option[2]);
    if pointer < 5 {
        return Err(2);
    }
    let (flag, overflow) = (option[3] & 0xf, option[3] >> 4);
    if pointer > option.len() {
        // No room: increments the overflow counter of four bits.
        if overflow == 15 {
            return Err(3);
        }
        option[3] += 1 << 4;
        return Ok(true);
    }
    let time = ((now.ns() / 1_000_000) as u32 | NON_STANDARD_TIME).to_be_bytes();
    let entry_bytes = if matches!(flag, WITH_ADDRESSES | OF_ADDRESSES) { 8 } else { 4 };
    let entry = option.get_mut(pointer - 1..pointer - 1 + entry_bytes).ok_or(2_usize)?;
    match flag {
        0 => entry.copy_from_slice(&time),
        WITH_ADDRESSES => {
            entry[..4].copy_from_slice(&own.octets());
            entry[4..].copy_from_slice(&time);
        }
        OF_ADDRESSES if entry[..4] == own.octets() => entry[4..].copy_from_slice(&time),
        OF_ADDRESSES => return Ok(false),
        _ => return Err(3),
    }
    option[2] = (pointer + entry_bytes) as u8;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
    const NOW: Time = Time::from_ns(5_000_000);

    fn processed(options: &[u8]) -> (Result<bool, OptionsError>, Vec<u8>) {
        let mut options = options.to_vec();
        (process_all(&mut options, OWN, NOW), options)
    }

    #[test]
    fn a_route_is_recorded_while_there_is_room() {
        let (result, options) = processed(&[1, 7, 7, 4, 0, 0, 0, 0]);
        assert_eq!((result, &options[..]), (Ok(true), &[1, 7, 7, 8, 192, 0, 2, 1][..]));
        assert_eq!(processed(&options), (Ok(false), options));
        assert_eq!(processed(&[7, 7, 5, 0, 0, 0, 0, 0]).0, Err(OptionsError::Malformed { pointer: 22 }), "half a slot");
        assert_eq!(processed(&[7, 7, 3, 0, 0, 0, 0, 0]).0, Err(OptionsError::Malformed { pointer: 22 }));
        assert_eq!(processed(&[7, 2, 0, 0]).0, Err(OptionsError::Malformed { pointer: 21 }));
    }

    #[test]
    fn timestamps_are_recorded_or_counted_as_overflow() {
        let (result, options) = processed(&[68, 8, 5, 0, 0, 0, 0, 0]);
        assert_eq!((result, &options[..]), (Ok(true), &[68, 8, 9, 0, 0x80, 0, 0, 5][..]));
        let (result, options) = processed(&options);
        assert_eq!((result, options[3]), (Ok(true), 0x10));
        assert_eq!(processed(&[68, 8, 9, 0xf0, 0, 0, 0, 0]).0, Err(OptionsError::Malformed { pointer: 23 }));
        let (result, options) = processed(&[68, 12, 5, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!((result, &options[..]), (Ok(true), &[68, 12, 13, 1, 192, 0, 2, 1, 0x80, 0, 0, 5][..]));
        let own_entry = [68, 12, 5, 3, 192, 0, 2, 1, 0, 0, 0, 0];
        assert_eq!(processed(&own_entry).1[2..], [13, 3, 192, 0, 2, 1, 0x80, 0, 0, 5]);
        let foreign_entry = [68, 12, 5, 3, 192, 0, 2, 2, 0, 0, 0, 0];
        assert_eq!(processed(&foreign_entry), (Ok(false), foreign_entry.to_vec()));
        assert_eq!(processed(&[68, 8, 5, 2, 0, 0, 0, 0]).0, Err(OptionsError::Malformed { pointer: 23 }));
    }

    #[test]
    fn source_routes_and_malformed_options_are_rejected_with_the_offset() {
        assert_eq!(processed(&[131, 3, 4, 0]).0, Err(OptionsError::SourceRoute));
        assert_eq!(processed(&[1, 1, 1, 137]).0, Err(OptionsError::SourceRoute));
        assert_eq!(processed(&[0, 131, 3, 4]).0, Ok(false), "padding follows the end of the list");
        assert_eq!(processed(&[148, 4, 0, 0]).0, Ok(false), "router alert is unchanged");
        assert_eq!(processed(&[1, 1, 1, 148]).0, Err(OptionsError::Malformed { pointer: 23 }), "no length");
        assert_eq!(processed(&[148, 5, 0, 0]).0, Err(OptionsError::Malformed { pointer: 21 }), "too long");
        assert_eq!(processed(&[148, 1, 0, 0]).0, Err(OptionsError::Malformed { pointer: 21 }), "too short");
    }

    #[test]
    fn arbitrary_options_cause_no_panic() {
        let mut random = sim::Random::new(1, "options");
        for _ in 0..200_000 {
            let length = 4 * (1 + random.below(10)) as usize;
            let kinds = [7, 68, 1, 148, random.bits() as u8];
            let mut options: Vec<u8> = (0..length).map(|_| (random.bits() % 16) as u8).collect();
            options[0] = kinds[random.below(5) as usize];
            let _ = process_all(&mut options, OWN, NOW);
        }
    }
}
