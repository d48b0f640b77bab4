//! A port that receives the frames of one pcap file and writes sent frames to another.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use pcap_file::pcap::{PcapHeader, PcapPacket, PcapReader, PcapWriter};
use pcap_file::{DataLink, PcapError as FileError, TsResolution};
use router::{Packet, Pool, Port, PortLosses};

/// The reason why a packet file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PcapError {
    /// A file operation failed.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: String,
        /// The error of the system.
        source: io::Error,
    },
    /// The format is not one that a port can receive.
    #[error("{path}: {reason}; save it as pcap, with Ethernet frames (`editcap -F pcap` converts)")]
    Format {
        /// The file.
        path: String,
        /// The defect.
        reason: String,
    },
}

/// A port that reads and writes pcap files.
pub struct PcapPort {
    received: Option<PcapReader<BufReader<File>>>,
    /// A frame that was read when no buffer was free.
    pending: Option<Vec<u8>>,
    transmitted: Option<PcapWriter<BufWriter<File>>>,
    unusable: u64,
}

impl PcapPort {
    /// Opens a port that receives the frames of `received` as fast as they are polled, and writes sent frames to
    /// `transmitted`, which is created or truncated. Without `transmitted`, sent frames are discarded.
    pub fn open(received: Option<&Path>, transmitted: Option<&Path>) -> Result<PcapPort, PcapError> {
        let received = received.map(open_to_read).transpose()?;
        let transmitted = transmitted.map(open_to_write).transpose()?;
        Ok(PcapPort { received, pending: None, transmitted, unusable: 0 })
    }

    /// Replaces the output: sent frames are written to this file, which is created or truncated.
    ///
    /// # Errors
    /// Fails if the file cannot be created.
    pub fn with_output(mut self, transmitted: Option<&Path>) -> Result<PcapPort, PcapError> {
        self.transmitted = transmitted.map(open_to_write).transpose()?;
        Ok(self)
    }

    /// Returns the next frame. After a truncated frame, the file has no more frames.
    fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        if let Some(pending) = self.pending.take() {
            return Ok(Some(pending));
        }
        let Some(reader) = &mut self.received else { return Ok(None) };
        match reader.next_packet() {
            None => {
                self.received = None;
                Ok(None)
            }
            Some(Ok(packet)) => Ok(Some(packet.data.into_owned())),
            Some(Err(error)) => {
                self.received = None;
                Err(io_error(error))
            }
        }
    }
}

fn open_to_read(path: &Path) -> Result<PcapReader<BufReader<File>>, PcapError> {
    let name = path.display().to_string();
    let file = File::open(path).map_err(|source| PcapError::File { path: name.clone(), source })?;
    let format = |reason: String| PcapError::Format { path: name.clone(), reason };
    let reader = PcapReader::new(BufReader::new(file)).map_err(|error| format(format!("not a pcap file: {error}")))?;
    match reader.header().datalink {
        DataLink::ETHERNET => Ok(reader),
        other => Err(format(format!("its packets are {other:?}, not Ethernet"))),
    }
}

fn open_to_write(path: &Path) -> Result<PcapWriter<BufWriter<File>>, PcapError> {
    let failed = |source| PcapError::File { path: path.display().to_string(), source };
    let file = File::create(path).map_err(failed)?;
    let header =
        PcapHeader { datalink: DataLink::ETHERNET, ts_resolution: TsResolution::NanoSecond, ..PcapHeader::default() };
    PcapWriter::with_header(BufWriter::new(file), header).map_err(|error| failed(io_error(error)))
}

fn io_error(error: FileError) -> io::Error {
    match error {
        FileError::IoError(source) => source,
        other => io::Error::new(io::ErrorKind::InvalidData, other.to_string()),
    }
}

impl Port for PcapPort {
    fn receive(&mut self, pool: &mut Pool, into: &mut Vec<Packet>, packets_max: usize) -> io::Result<usize> {
        let before = into.len();
        while into.len() - before < packets_max {
            let Some(frame) = self.next()? else { break };
            if frame.len() > pool.bytes_max() {
                self.unusable += 1;
                continue;
            }
            let Some(packet) = pool.alloc_copy(&frame) else {
                self.pending = Some(frame);
                break;
            };
            into.push(packet);
        }
        Ok(into.len() - before)
    }

    fn transmit(&mut self, pool: &mut Pool, from: &mut VecDeque<Packet>) -> io::Result<usize> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let count = from.len();
        let mut written = Ok(());
        for packet in from.drain(..) {
            let bytes = pool.bytes(&packet);
            if let (Some(writer), Ok(())) = (self.transmitted.as_mut(), &written) {
                written = writer.write_packet(&PcapPacket::new(now, bytes.len() as u32, bytes)).map(drop);
            }
            pool.free(packet);
        }
        written.map_err(io_error)?;
        Ok(count)
    }

    fn wakes(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Frames that remain in the file are available at once.
    fn may_sleep(&mut self) -> bool {
        self.received.is_none() && self.pending.is_none()
    }

    fn losses(&self) -> PortLosses {
        PortLosses { receive_unusable: self.unusable, ..PortLosses::default() }
    }
}

impl Drop for PcapPort {
    fn drop(&mut self) {
        if let Some(writer) = self.transmitted.take() {
            // An error can no longer be reported.
            let _ = writer.into_writer().flush();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receive(port: &mut PcapPort, pool: &mut Pool) -> io::Result<Vec<Packet>> {
        let mut into = Vec::new();
        port.receive(pool, &mut into, 10).map(|_| into)
    }

    #[test]
    fn frames_that_were_sent_to_a_file_are_received_from_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("frames.pcap");
        let mut pool = Pool::new(2, 512, 64);
        let mut port = PcapPort::open(None, Some(&path)).unwrap();
        assert!(port.may_sleep());
        for bytes in [60, 400, 61] {
            let mut queue = VecDeque::from([pool.alloc_copy(&vec![bytes as u8; bytes]).unwrap()]);
            assert_eq!(port.transmit(&mut pool, &mut queue).unwrap(), 1);
        }
        drop(port);

        let mut port = PcapPort::open(Some(&path), None).unwrap();
        assert!(!port.may_sleep());
        let mut frames = receive(&mut port, &mut pool).unwrap();
        assert_eq!(frames.iter().map(|frame| pool.bytes(frame).len()).collect::<Vec<_>>(), [60, 400]);
        assert!(receive(&mut port, &mut pool).unwrap().is_empty() && !port.may_sleep(), "a frame waits for a buffer");
        pool.free(frames.pop().unwrap());
        let last = receive(&mut port, &mut pool).unwrap();
        assert_eq!(pool.bytes(&last[0]), [61; 61]);
        assert!(receive(&mut port, &mut pool).unwrap().is_empty() && port.may_sleep());
    }

    #[test]
    fn a_full_file_system_loses_packets_but_no_buffers() {
        let mut pool = Pool::new(64, 2048, 64);
        let mut port = PcapPort::open(None, Some(Path::new("/dev/full"))).unwrap();
        // Writes are buffered, so that an error appears only after several packets.
        let is_refused = (0..16).any(|_| {
            let mut queue: VecDeque<Packet> = (0..64).map(|_| pool.alloc_copy(&[7; 1500]).unwrap()).collect();
            let refused = port.transmit(&mut pool, &mut queue).is_err();
            assert_eq!((queue.len(), pool.available()), (0, 64));
            refused
        });
        assert!(is_refused, "/dev/full has room");
    }

    #[test]
    fn files_without_frames_are_refused_and_a_truncated_file_ends() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("frames.pcap");
        let refusal = |path: &Path| PcapPort::open(Some(path), None).err().unwrap().to_string();
        assert!(refusal(&path).ends_with("No such file or directory (os error 2)"), "{}", refusal(&path));
        std::fs::write(&path, [0u8; 40]).unwrap();
        assert!(refusal(&path).contains(": not a pcap file: "), "{}", refusal(&path));
        let header = PcapHeader { datalink: DataLink::RAW, ..PcapHeader::default() };
        drop(PcapWriter::with_header(File::create(&path).unwrap(), header).unwrap());
        assert!(refusal(&path).contains("its packets are RAW, not Ethernet"), "{}", refusal(&path));

        let mut pool = Pool::new(2, 512, 64);
        let mut port = PcapPort::open(None, Some(&path)).unwrap();
        let mut queue = VecDeque::from([pool.alloc_copy(&[7; 60]).unwrap()]);
        port.transmit(&mut pool, &mut queue).unwrap();
        drop(port);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        let mut port = PcapPort::open(Some(&path), None).unwrap();
        assert!(receive(&mut port, &mut pool).is_err());
        assert!(port.may_sleep());
    }
}
