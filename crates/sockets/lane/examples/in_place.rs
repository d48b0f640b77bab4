//! Two threads that use one lane without a copy on either side: `cargo run --release -p lane --example in_place`
//!
//! The sender generates its bytes in the receiver's ring, and the receiver computes a checksum of them in place. Both
//! wait by yielding; see [`Consumer::announce_sleep`] for blocking.

#![allow(unsafe_code)] // Access in place uses raw pointers.

use fabric::{MemoryInbound, MemoryOutbound};
use lane::{Consumer, Corrupt, Layout, Producer};
use std::thread;
use volmem::Region;

const STREAM_BYTES: u64 = 64 << 20;

fn stream_byte(position: u64) -> u8 {
    (position.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

/// Adds a byte to Fletcher's checksum, which depends on the order of the bytes.
fn add(sum: &mut (u64, u64), byte: u8) {
    sum.0 = sum.0.wrapping_add(byte.into());
    sum.1 = sum.1.wrapping_add(sum.0);
}

fn produce(mut producer: Producer<MemoryOutbound, MemoryInbound>) -> Result<(u64, u64), Corrupt> {
    let mut sum = (0, 0);
    let mut sent_bytes = 0;
    while sent_bytes < STREAM_BYTES {
        let wanted_bytes = (STREAM_BYTES - sent_bytes).min(lane::RECORD_BYTES_MAX as u64) as usize;
        let Some(room) = producer.reserve(wanted_bytes)? else {
            thread::yield_now();
            continue;
        };
        for index in 0..room.len_bytes {
            let byte = stream_byte(sent_bytes + index as u64);
            add(&mut sum, byte);
            // SAFETY: `index` is inside the reservation, which is writable until the commit, and no other thread writes
            // it.
            unsafe { room.pointer.add(index).write(byte) };
        }
        producer.commit(room.len_bytes)?;
        sent_bytes += room.len_bytes as u64;
    }
    producer.finish();
    Ok(sum)
}

fn consume(mut consumer: Consumer<MemoryInbound, MemoryOutbound>) -> Result<(u64, u64), Corrupt> {
    let mut sum = (0, 0);
    while !consumer.is_finished() {
        let Some(chunk) = consumer.peek()? else {
            thread::yield_now();
            continue;
        };
        let pointer = consumer.pointer(chunk);
        for index in 0..chunk.len_bytes {
            // SAFETY: `index` is inside the chunk, which is readable until it is consumed, and the sender of this
            // program does not write it until then. With an untrusted sender, each byte must be read once and volatile,
            // as here.
            add(&mut sum, unsafe { pointer.add(index).read_volatile() });
        }
        consumer.consume(chunk.len_bytes)?;
    }
    Ok(sum)
}

fn main() -> Result<(), Corrupt> {
    let layout = Layout::packed(64, 4096);
    let (senders, receivers) = (Region::heap(layout.window_bytes()), Region::heap(layout.window_bytes()));
    // Known only to both endpoints; between programs, use getrandom(2).
    let secret = 0x1D0C_5EC7_2ABE_51DE;
    let producer =
        Producer::new(MemoryOutbound::new(receivers.clone()), MemoryInbound::new(senders.clone()), layout, secret);
    let consumer = Consumer::new(MemoryInbound::new(receivers), MemoryOutbound::new(senders), layout, secret);

    let sender = thread::spawn(move || produce(producer));
    let received = consume(consumer)?;
    let sent = sender.join().expect("the sender has no reason to panic")?;
    assert_eq!(sent, received, "the receiver saw other bytes than were sent");
    println!("{STREAM_BYTES} bytes in place, checksum {:016x}, the same at both endpoints", received.1);
    Ok(())
}
