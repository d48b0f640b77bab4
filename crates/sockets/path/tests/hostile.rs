//! Whatever a peer publishes, a machine ends with a result or an error, within a few steps.

use std::convert::Infallible;

use path::{Failure, ReceiveBy, ReceiverIo, Receiving, SenderIo, Sending, Word, Words};

/// Steps that one call may take.
const STEPS_MAX: u32 = 40;

/// I/O whose words and counts are random, small enough that they often fit.
struct Random {
    state: u64,
    steps: u32,
}

impl Random {
    fn next(&mut self) -> u64 {
        self.steps += 1;
        assert!(self.steps <= STEPS_MAX, "a call does not end");
        // SplitMix64 (Steele, Lea and Flood, 2014).
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ self.state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb) >> 13;
        if value & 0xf0 == 0 { u64::MAX - (value >> 8) % 3 } else { (value >> 8) % 6 }
    }
}

impl Words for Random {
    type Stop = Infallible;

    fn load(&mut self, _: Word) -> Result<u64, Infallible> {
        Ok(self.next())
    }
    fn store(&mut self, _: Word, _: u64) -> Result<(), Infallible> {
        Ok(())
    }
    fn fence(&mut self) -> Result<(), Infallible> {
        Ok(())
    }
}

impl SenderIo for Random {
    fn bytes_written(&mut self) -> Result<Option<u64>, Infallible> {
        Ok(Some(self.next()).filter(|count| *count < 5))
    }
    fn publish_begin(&mut self, _: u64) -> Result<(), Infallible> {
        Ok(())
    }
    fn publish_end(&mut self, _: bool) -> Result<(), Infallible> {
        Ok(())
    }
}

impl ReceiverIo for Random {
    fn bytes_read(&mut self) -> Result<Option<u64>, Infallible> {
        self.bytes_written()
    }
    fn bytes_available(&mut self) -> Result<u64, Infallible> {
        Ok(self.next() % 3)
    }
    fn has_urgent_byte(&mut self) -> Result<bool, Infallible> {
        Ok(self.next().is_multiple_of(3))
    }
    fn publish_cursor(&mut self, _: bool) -> Result<(), Infallible> {
        Ok(())
    }
    fn begins_at(&mut self) -> Result<u64, Infallible> {
        Ok(self.next())
    }
    fn enter(&mut self) -> Result<(), Infallible> {
        Ok(())
    }
    fn bytes_repeated(&mut self) -> Result<u64, Infallible> {
        Ok(self.next())
    }
    fn bytes_unread(&mut self) -> Result<u64, Infallible> {
        Ok(self.next())
    }
    fn drop_bytes(&mut self, bytes_max: u64) -> Result<u64, Infallible> {
        Ok(self.next() % (bytes_max + 1))
    }
    fn has_reached_end(&mut self) -> Result<Option<bool>, Infallible> {
        Ok([None, Some(false), Some(true)][self.next() as usize % 3])
    }
}

/// Makes one random call; returns whether the connection goes on.
fn receive(receiving: &mut Receiving, io: &mut Random, call: u64) -> bool {
    let by = match call % 4 {
        0 => receiving.freeze(io).map(|_| ReceiveBy::Nothing),
        1 => receiving.note_peer_left(io),
        2 => receiving.note_empty(io),
        _ => receiving.prepare(call & 4 == 0, io),
    };
    match by {
        Ok(ReceiveBy::KernelUpTo(bytes)) => {
            assert!(bytes > 0);
            receiving.note_read(bytes.min(call % 5));
            true
        }
        Ok(_) => true,
        Err(Failure::Corrupt(corrupt)) => !corrupt.to_string().contains("reset"),
        Err(Failure::Stopped(never)) => match never {},
    }
}

#[test]
fn a_hostile_peer_cannot_keep_a_machine_busy() {
    for seed in 0..20_000 {
        let mut io = Random { state: seed, steps: 0 };
        let (mut sending, mut receiving) = (Sending::default(), Receiving::default());
        for _ in 0..30 {
            io.steps = 0;
            let call = io.next();
            let Ok(_) = match call % 3 {
                0 => sending.ask(&mut io),
                1 => sending.go_back(&mut io).map(|_| ()),
                _ => sending.prepare(&mut io).map(|_| sending.note_resent()),
            };
            if !receive(&mut receiving, &mut io, call / 3) {
                break;
            }
        }
    }
}
