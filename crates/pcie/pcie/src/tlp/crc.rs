//! The three checksums of PCI Express: LCRC, ECRC and the CRC of data link layer packets.
//!
//! All process each byte from its lowest bit, start with all ones and are sent inverted, lowest byte first. LCRC and
//! ECRC use the polynomial of Ethernet (Base Specification 5.0, sections 2.7.1 and 3.6.3); the CRC of a data link layer
//! packet uses 0x100B (section 3.4.2).

use crc::{Algorithm, CRC_32_ISO_HDLC, Crc};

const DLLP: Algorithm<u16> = Algorithm {
    width: 16,
    poly: 0x100b,
    init: 0xffff,
    refin: true,
    refout: true,
    xorout: 0xffff,
    check: 0,
    residue: 0,
};
static CRC_16: Crc<u16> = Crc::<u16>::new(&DLLP);
static CRC_32: Crc<u32> = Crc::<u32>::new(&CRC_32_ISO_HDLC);

/// The variant bit of a header's first byte, which may change in transit: it distinguishes type 0 from type 1 of
/// configuration requests.
const TYPE_VARIANT: u8 = 0x01;
/// The variant bit of a header's third byte, which may change in transit: poisoned (EP).
const POISON_VARIANT: u8 = 0x40;

/// Returns the checksum of the four bytes of a data link layer packet, as sent.
pub fn dllp(bytes: [u8; 4]) -> [u8; 2] {
    CRC_16.checksum(&bytes).to_le_bytes()
}

/// Returns the link CRC of a packet, as sent: over the two bytes of sequence number and the whole packet.
pub fn lcrc(sequence: u16, packet: &[u8]) -> [u8; 4] {
    let mut digest = CRC_32.digest();
    digest.update(&sequence.to_be_bytes());
    digest.update(packet);
    digest.finalize().to_le_bytes()
}

/// Returns the end-to-end checksum, as sent: over the end-to-end prefixes, the header and the payload, with variant
/// bits taken as ones.
pub fn ecrc(end_to_end_prefixes: &[u8], header: &[u8], payload: &[u8]) -> [u8; 4] {
    let mut digest = CRC_32.digest();
    for prefix in end_to_end_prefixes.chunks(4) {
        digest.update(&[prefix[0] | TYPE_VARIANT]);
        digest.update(&prefix[1..]);
    }
    if let [first, second, third, rest @ ..] = header {
        digest.update(&[first | TYPE_VARIANT, *second, third | POISON_VARIANT]);
        digest.update(rest);
    }
    digest.update(payload);
    digest.finalize().to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes a checksum bit by bit, like the shift register in the specification's figure.
    fn shift_register(polynomial: u32, width: u32, bytes: &[u8]) -> u32 {
        let mask = u32::MAX >> (32 - width);
        let mut register = mask;
        for byte in bytes {
            for bit in 0..8 {
                let feedback = (register >> (width - 1) & 1) ^ u32::from(byte >> bit & 1);
                register = (register << 1 & mask) ^ if feedback == 1 { polynomial } else { 0 };
            }
        }
        (!register & mask).reverse_bits() >> (32 - width)
    }

    #[test]
    fn checksums_equal_the_shift_register_of_the_specification() {
        let packet: Vec<u8> = (0..57_u8).map(|byte| byte.wrapping_mul(37)).collect();
        let framed: Vec<u8> = [0x0a, 0xbc].into_iter().chain(packet.iter().copied()).collect();
        assert_eq!(u32::from_le_bytes(lcrc(0xabc, &packet)), shift_register(0x04c1_1db7, 32, &framed));
        for bytes in [[0, 0, 0, 0], [0x10, 0, 0x0f, 0xff], [0x80, 0x12, 0x34, 0x56]] {
            assert_eq!(u32::from(u16::from_le_bytes(dllp(bytes))), shift_register(0x100b, 16, &bytes));
        }
    }

    #[test]
    fn a_correct_packet_leaves_the_known_residue() {
        // After a correct packet the register holds 0x556F, which hardware receivers compare.
        for sequence in 0..100_u16 {
            let bytes = [0, 0, (sequence >> 8) as u8, sequence as u8];
            let whole: Vec<u8> = bytes.into_iter().chain(dllp(bytes)).collect();
            assert_eq!(CRC_16.checksum(&whole) ^ 0xffff, 0x556f);
        }
    }

    #[test]
    fn ecrc_does_not_cover_variant_bits() {
        let header = [0x44, 0, 0x80, 1, 0, 0, 0, 15, 1, 0, 0, 0];
        let mut forwarded = header;
        forwarded[0] ^= 1; // type 1 became type 0 at the last bridge
        forwarded[2] |= 0x40; // and the packet was poisoned
        assert_eq!(ecrc(&[], &header, &[1, 2, 3, 4]), ecrc(&[], &forwarded, &[1, 2, 3, 4]));
        assert_ne!(ecrc(&[], &header, &[1, 2, 3, 4]), ecrc(&[], &header, &[1, 2, 3, 5]));
    }
}
