//! Compares the checksum with its definition, word by word.

use super::*;

/// RFC 1071 as written: 16 bits at a time.
fn reference(bytes: &[u8]) -> u16 {
    let mut sum = 0_u32;
    for word in bytes.chunks(2) {
        sum += u32::from(word[0]) << 8 | word.get(1).copied().map_or(0, u32::from);
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[test]
fn the_checksum_equals_that_of_adding_words_one_by_one() {
    // The example of RFC 1071, section 3.
    assert_eq!(compute(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
    let mut bytes = Vec::new();
    let mut word = 1_u32;
    for _ in 0..3_000 {
        assert_eq!(compute(&bytes), reference(&bytes), "{} B", bytes.len());
        word = word.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        bytes.push(if word & 0xf00 == 0 { 0xff } else { (word >> 24) as u8 });
    }
    assert_eq!(compute(&[0xff; 0xffff]), reference(&[0xff; 0xffff]), "a carry at every word");
}

#[test]
fn a_sum_can_be_computed_in_parts() {
    let bytes = [0xff, 0xfe, 1, 2, 3, 4, 0xff, 0xff, 9, 9];
    let sum = Sum::new().add_bytes(&bytes[..4]).add_word(0x0304).add_bytes(&bytes[6..]);
    assert_eq!(sum.checksum(), compute(&bytes));
}

#[test]
fn an_incremental_update_equals_a_new_checksum() {
    // Every old word, with new values at which a carry or a zero could go wrong, in headers with various checksums.
    for old in 0..=u16::MAX {
        for (new, other) in [(old.wrapping_sub(0x100), 0_u16), (0, 0xffff), (0xffff, 0x1234), (!old, 1), (old, !old)] {
            let sum = |word: u16| Sum::new().add_word(word).add_word(other).add_word(1).checksum();
            let found = update(sum(old), old, new);
            // 0 and 0xffff are the same number in ones' complement; a sum of words that are not all zero is never 0, so
            // its checksum is never 0xffff.
            assert_eq!(found, sum(new), "{old:04x} to {new:04x} with {other:04x}");
        }
    }
}

#[test]
fn a_partial_checksum_is_completed_only_if_its_field_lies_inside() {
    let mut packet = [0, 0, 9, 1, 2, 0, 0, 3, 4];
    // The field holds the folded sum of a pseudo-header.
    packet[5..7].copy_from_slice(&0x1111_u16.to_be_bytes());
    assert_eq!(complete_partial(&mut packet, 3, 2, false), Some(()));
    let expected = Sum::new().add_bytes(&[1, 2]).add_word(0x1111).add_bytes(&[3, 4]).checksum();
    assert_eq!(packet[5..7], expected.to_be_bytes());
    for (start, field_at) in [(10, 0), (9, 0), (3, 5), (0, usize::MAX), (usize::MAX, 0)] {
        let before = packet;
        assert_eq!(complete_partial(&mut packet, start, field_at, false), None, "{start} {field_at}");
        assert_eq!(packet, before);
    }
    let mut zero = [0xff, 0xff, 0, 0];
    assert_eq!(complete_partial(&mut zero, 0, 2, true), Some(()));
    assert_eq!(zero[2..], [0xff, 0xff], "UDP sends 0xffff for 0");
}
