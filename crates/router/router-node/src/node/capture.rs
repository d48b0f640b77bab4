//! Captures the frames of a port into a pipe, in the pcapng format (draft-ietf-opsawg-pcapng). The reader is another
//! process; frames for which the pipe and a buffer have no room are lost to the capture, never to the network.

use std::borrow::Cow;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{InterfaceDescriptionBlock, InterfaceDescriptionOption};
use pcap_file::pcapng::blocks::interface_statistics::{InterfaceStatisticsBlock, InterfaceStatisticsOption};
use pcap_file::pcapng::blocks::section_header::{SectionHeaderBlock, SectionHeaderOption};
use pcap_file::{DataLink, Endianness};
use router::PortId;

/// Bytes that wait for the reader, beyond what the pipe holds.
const WAITING_BYTES_MAX: usize = 8 << 20;
/// Resolution of time stamps as a power of ten: nanoseconds.
const TIMESTAMP_RESOLUTION: u8 = 9;
/// Bits of `epb_flags` for received and for sent frames.
const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;

/// The direction of a frame, seen from the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Received by the port.
    Received,
    /// Sent by the port.
    Sent,
}

/// What is captured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaptureSettings {
    /// The port.
    pub port: PortId,
    /// The name of the port's device.
    pub device: String,
    /// The name of the node.
    pub node: String,
    /// Largest number of bytes kept of a frame.
    pub frame_bytes_max: u32,
    /// Number of frames after which the capture ends.
    pub frames_max: u64,
}

/// A capture in progress.
pub struct Capture {
    settings: CaptureSettings,
    writer: PcapNgWriter<Vec<u8>>,
    /// Bytes of `writer` that the reader already has.
    written: usize,
    /// The end that is not blocking.
    pipe: OwnedFd,
    recorded: u64,
    lost: u64,
    lost_reported: u64,
}

/// The state of a [`Capture`] to which [`Capture::keep`] returns.
#[derive(Clone, Copy, Debug)]
struct Mark {
    bytes: usize,
    recorded: u64,
    lost: u64,
}

/// Frames that were recorded before it was known how many of them are sent.
#[derive(Debug, Default)]
pub struct Tentative(Vec<Mark>);

impl Capture {
    /// Starts a capture into a pipe whose descriptor does not block.
    pub fn new(settings: CaptureSettings, pipe: OwnedFd) -> Self {
        let text = |text: String| Cow::Owned(text);
        // In this order, the high half of all time stamps comes first, as it must (section 4.6).
        let section = SectionHeaderBlock {
            endianness: Endianness::Big,
            options: vec![SectionHeaderOption::UserApplication(text("crosslane router capture".to_owned()))],
            ..SectionHeaderBlock::default()
        };
        let description = text(format!("node {}", settings.node));
        let interface = InterfaceDescriptionBlock {
            linktype: DataLink::ETHERNET,
            snaplen: settings.frame_bytes_max,
            options: vec![
                InterfaceDescriptionOption::IfName(text(settings.device.clone())),
                InterfaceDescriptionOption::IfDescription(description),
                InterfaceDescriptionOption::IfTsResol(TIMESTAMP_RESOLUTION),
            ],
        };
        let writer = PcapNgWriter::with_section_header(Vec::new(), section);
        let mut writer = writer.expect("memory has room");
        writer.write_pcapng_block(interface).expect("memory has room");
        Self { settings, writer, written: 0, pipe, recorded: 0, lost: 0, lost_reported: 0 }
    }

    /// Returns the port.
    pub fn port(&self) -> PortId {
        self.settings.port
    }

    /// Records a frame at its time stamp.
    pub fn record(&mut self, now: SystemTime, direction: Direction, frame: &[u8]) {
        if self.recorded + self.lost >= self.settings.frames_max {
            return;
        }
        if self.writer.get_ref().len() - self.written > WAITING_BYTES_MAX {
            self.lost += 1;
            return;
        }
        self.recorded += 1;
        let kept = &frame[..frame.len().min(self.settings.frame_bytes_max as usize)];
        let flags = if direction == Direction::Received { INBOUND } else { OUTBOUND };
        let block = EnhancedPacketBlock {
            interface_id: 0,
            timestamp: since_1970(now),
            original_len: frame.len() as u32,
            data: Cow::Borrowed(kept),
            options: vec![EnhancedPacketOption::Flags(flags)],
        };
        self.writer.write_pcapng_block(block).expect("memory has room");
    }

    /// Records frames that a port may send, from the first on.
    pub fn record_tentatively<'a>(&mut self, now: SystemTime, frames: impl Iterator<Item = &'a [u8]>) -> Tentative {
        let mut marks = vec![self.mark()];
        for frame in frames {
            self.record(now, Direction::Sent, frame);
            marks.push(self.mark());
        }
        Tentative(marks)
    }

    /// Keeps those of the recorded frames that the port has sent.
    pub fn keep(&mut self, recorded: &Tentative, sent: usize) {
        let Some(mark) = recorded.0.get(sent) else { return };
        self.writer.get_mut().truncate(mark.bytes);
        (self.recorded, self.lost) = (mark.recorded, mark.lost);
    }

    fn mark(&self) -> Mark {
        Mark { bytes: self.writer.get_ref().len(), recorded: self.recorded, lost: self.lost }
    }

    /// Writes to the pipe as far as it has room. Returns whether the capture goes on: it ends with its last frame, or
    /// when its reader has gone.
    pub fn flush(&mut self) -> bool {
        if self.lost > self.lost_reported && self.writer.get_ref().len() - self.written < WAITING_BYTES_MAX {
            self.report_losses();
        }
        while self.written < self.writer.get_ref().len() {
            match rustix::io::write(&self.pipe, &self.writer.get_ref()[self.written..]) {
                Ok(bytes) => self.written += bytes,
                Err(error) if io::Error::from(error).kind() == ErrorKind::WouldBlock => return true,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return false,
            }
        }
        self.writer.get_mut().clear();
        self.written = 0;
        self.recorded + self.lost < self.settings.frames_max
    }

    /// Returns whether bytes wait for the reader.
    pub fn has_unwritten(&self) -> bool {
        self.written < self.writer.get_ref().len()
    }

    /// Writes the number of frames that were lost so far.
    fn report_losses(&mut self) {
        self.lost_reported = self.lost;
        let nanoseconds = since_1970(SystemTime::now()).as_nanos() as u64;
        let block = InterfaceStatisticsBlock {
            interface_id: 0,
            timestamp: nanoseconds,
            options: vec![
                InterfaceStatisticsOption::IsbIfRecv(self.recorded + self.lost),
                InterfaceStatisticsOption::IsbIfDrop(self.lost),
            ],
        };
        self.writer.write_pcapng_block(block).expect("memory has room");
    }
}

fn since_1970(now: SystemTime) -> Duration {
    now.duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use pcap_file::pcapng::{Block, PcapNgReader};
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    fn capture(frame_bytes_max: u32, frames_max: u64) -> (Capture, File) {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        let (device, node) = ("eth0".to_owned(), "a".to_owned());
        let settings = CaptureSettings { port: PortId(0), device, node, frame_bytes_max, frames_max };
        (Capture::new(settings, write), File::from(read))
    }

    /// Returns what the pipe holds.
    fn drain(pipe: &mut File) -> Vec<u8> {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        bytes
    }

    /// Returns the data and flags of all packets, and the last number of losses.
    fn parse(bytes: &[u8]) -> (Vec<(Vec<u8>, u32)>, Option<u64>) {
        let mut reader = PcapNgReader::new(bytes).unwrap();
        let (mut packets, mut lost) = (Vec::new(), None);
        while let Some(block) = reader.next_block() {
            match block.unwrap() {
                Block::EnhancedPacket(packet) => {
                    let [EnhancedPacketOption::Flags(flags)] = packet.options[..] else { panic!("{packet:?}") };
                    packets.push((packet.data.into_owned(), flags));
                }
                Block::InterfaceStatistics(statistics) => {
                    // The reader takes it for one number, whose high half is first only in this order of bytes.
                    assert_eq!(bytes[..12], [0x0a, 0x0d, 0x0d, 0x0a, 0, 0, 0, 60, 0x1a, 0x2b, 0x3c, 0x4d]);
                    let age = SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_nanos(statistics.timestamp));
                    assert!(age.is_ok_and(|age| age < Duration::from_secs(3600)), "{statistics:?}");
                    let drop = statistics.options.iter().find_map(|option| match option {
                        InterfaceStatisticsOption::IsbIfDrop(lost) => Some(*lost),
                        _ => None,
                    });
                    lost = drop.or(lost);
                }
                _ => {}
            }
        }
        (packets, lost)
    }

    #[test]
    fn frames_are_recorded_with_direction_and_cut_to_their_limit() {
        let (mut capture, mut pipe) = capture(4, u64::MAX);
        capture.record(UNIX_EPOCH, Direction::Received, b"received");
        capture.record(UNIX_EPOCH, Direction::Sent, b"abc");
        assert!(capture.flush() && !capture.has_unwritten());
        let (packets, lost) = parse(&drain(&mut pipe));
        assert_eq!(packets, [(b"rece".to_vec(), INBOUND), (b"abc".to_vec(), OUTBOUND)]);
        assert_eq!(lost, None);
    }

    #[test]
    fn only_frames_that_were_sent_are_kept() {
        let (mut capture, mut pipe) = capture(64, 2);
        let frames = [b"one".as_slice(), b"two", b"three"];
        for sent in [0, 1] {
            let recorded = capture.record_tentatively(UNIX_EPOCH, frames.into_iter());
            capture.keep(&recorded, sent);
        }
        assert!(capture.flush());
        capture.record(UNIX_EPOCH, Direction::Sent, b"four");
        assert!(!capture.flush(), "the capture has its two frames");
        let (packets, _) = parse(&drain(&mut pipe));
        assert_eq!(packets, [(b"one".to_vec(), OUTBOUND), (b"four".to_vec(), OUTBOUND)]);
    }

    #[test]
    fn a_slow_reader_loses_frames_and_is_told() {
        let (mut capture, mut pipe) = capture(65_536, u64::MAX);
        let frame = vec![7; 60_000];
        let mut bytes = Vec::new();
        for _ in 0..400 {
            capture.record(UNIX_EPOCH, Direction::Received, &frame);
            assert!(capture.flush());
        }
        while capture.has_unwritten() {
            bytes.extend(drain(&mut pipe));
            assert!(capture.flush());
        }
        // The losses follow once there is room.
        assert!(capture.flush());
        bytes.extend(drain(&mut pipe));
        let (packets, lost) = parse(&bytes);
        assert!(packets.iter().all(|(data, _)| *data == frame));
        assert_eq!(packets.len() as u64 + lost.unwrap(), 400);
        assert!(lost.unwrap() > 100, "{lost:?}");
    }

    #[test]
    fn a_capture_ends_with_its_reader() {
        let (mut capture, pipe) = capture(64, u64::MAX);
        drop(pipe);
        assert!(!capture.flush());
    }
}
