//! `crosslane router capture`.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::Stdio;

use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption;
use pcap_file::pcapng::{Block, PcapNgReader};
use system_tests::{Process, WAIT_MAX, wait_until};

use super::cluster::{Lab, PLAIN};

/// Bits of the flags of received and of sent frames.
const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;

/// Returns the direction and the addresses of each ICMP packet of a file.
fn pings(file: &Path) -> Vec<(u32, [u8; 4], [u8; 4])> {
    let mut reader = PcapNgReader::new(File::open(file).expect("a file")).expect("a pcapng file");
    let mut pings = Vec::new();
    while let Some(block) = reader.next_block() {
        let Block::EnhancedPacket(packet) = block.expect("a block") else { continue };
        let [EnhancedPacketOption::Flags(direction)] = packet.options[..] else { panic!("{packet:?}") };
        let (ethernet, ip) = packet.data.split_at(14);
        if ethernet[12..] == [8, 0] && ip[9] == 1 {
            let address = |at: usize| [ip[at], ip[at + 1], ip[at + 2], ip[at + 3]];
            pings.push((direction, address(12), address(16)));
        }
    }
    pings
}

#[test]
fn a_port_is_captured_in_both_directions() {
    let Some(lab) = Lab::new("a_port_is_captured_in_both_directions", &["a", "b", "h1", "h2"]) else { return };
    lab.join(("a", "eth0"), ("h1", "eth0"), 1);
    lab.join(("b", "eth0"), ("h2", "eth0"), 2);
    lab.write(PLAIN);
    lab.up();
    lab.ping("h1", "10.77.2.2").must_succeed();
    let file = lab.folder.join("a.pcapng");
    let name = file.to_str().expect("a name");
    let capture = |more: &[&str]| {
        let arguments = [&["--node", "a", "--port", "eth0", "--write", name], more].concat();
        let capturing = Process::start(&mut lab.command("capture", &arguments));
        // The node writes the header at once.
        wait_until("a file", || fs::metadata(&file).is_ok_and(|file| file.len() > 0));
        capturing
    };
    let capturing = capture(&[]);
    lab.ping("h1", "10.77.2.2").must_succeed();
    capturing.stop(WAIT_MAX).must_succeed();
    let (own, other) = ([10, 77, 1, 2], [10, 77, 2, 2]);
    let ping = [(INBOUND, own, other), (OUTBOUND, other, own)];
    assert_eq!(pings(&file), [ping, ping].concat());

    // It ends by itself after a number of frames.
    fs::remove_file(&file).expect("the file");
    let capturing = capture(&["--count", "1"]);
    lab.ping("h1", "10.77.2.2").must_succeed();
    capturing.wait(WAIT_MAX).must_succeed();
    assert!(pings(&file).len() <= 1);

    // It ends when its reader has gone, also if no frame arrives.
    let mut piped = lab.command("capture", &["--node", "a", "--port", "eth0", "--write", "-"]);
    let mut piped = piped.stdout(Stdio::piped()).spawn().expect("a process");
    let mut reader = piped.stdout.take().expect("a pipe");
    reader.read_exact(&mut [0; 12]).expect("a header");
    drop(reader);
    let mut status = None;
    wait_until("its end", || {
        status = piped.try_wait().expect("a child");
        status.is_some()
    });
    assert!(status.is_some_and(|status| status.success()), "{status:?}");

    let before = fs::read(&file).expect("a file");
    let refused = |arguments: &[&str], words: &[&str]| {
        let finished = lab.finish("capture", arguments);
        assert!(!finished.status.success() && words.iter().all(|word| finished.stderr.contains(word)), "{finished}");
    };
    refused(&["--node", "a", "--port", "eth7", "--write", name], &["eth7", "choose one of eth0"]);
    refused(&["--node", "z", "--port", "eth0", "--write", name], &["'z'", "a, b"]);
    refused(&["--node", "a", "--port", "eth0", "--write", "/nowhere/x"], &["/nowhere/x"]);
    assert!(!before.is_empty() && fs::read(&file).expect("a file") == before, "mistakes keep an existing file");

    fs::remove_file(&file).expect("the file");
    let capturing = capture(&[]);
    lab.finish("down", &[]).must_succeed();
    let ended = capturing.wait(WAIT_MAX).must_exit_with(1);
    assert!(ended.stderr.contains("node 'a' has ended the capture"), "{ended}");
}
