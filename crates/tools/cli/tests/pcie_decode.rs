//! Tests of `crosslane pcie decode`.

use std::io::Write;
use std::process::{Command, Output, Stdio};

fn decode(arguments: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_crosslane"))
        .args(["pcie", "decode"])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that reads no input may have ended already.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

const READ: &str = "20000010 0501a5ff 00000001 23456780";

#[test]
fn a_packet_is_decoded() {
    for output in [decode(&READ.split(' ').collect::<Vec<_>>(), ""), decode(&[], READ)] {
        let lines = text(&output.stdout);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(lines.starts_with("MRd of 64 bytes at 0x123456780 from 05:00.1\n"), "{lines}");
        assert!(lines.contains("Requester ID"), "{lines}");
    }
}

#[test]
fn an_error_log_is_decoded_header_by_header() {
    let log = "pcieport 0000:00:1c.0: AER:   TLP Header: 40000001 0000000f 00001000 00000000\n\
               pcieport 0000:00:1c.0: AER:   TLP Header: 4a000001 00080004 05010200 00000000\n";
    let output = decode(&["--json"], log);
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let summaries: Vec<&str> =
        value.as_array().unwrap().iter().map(|packet| packet["summary"].as_str().unwrap()).collect();
    assert_eq!(
        summaries,
        ["MWr of 4 bytes at 0x1000 from 00:00.0", "CplD with 4 bytes from 00:01.0 for tag 0x2 of 05:00.1"]
    );
}

#[test]
fn data_link_layer_packets_and_frames_are_decoded() {
    let output = decode(&["--dllp", "00 00 00 00 d0 b9"], "");
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let expected = stderr.rsplit("have 0x").next().unwrap().trim();
    let checksum = format!("{}{}", &expected[2..4], &expected[..2]);
    let output = decode(&["--dllp", "00000000", &checksum], "");
    assert_eq!(text(&output.stdout), "Ack: all packets up to 0 have arrived\n");
    let output = decode(&["--framed", "0007", "00000001 0000000f 00001000", "00000000"], "");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("sequence number 7: MRd of 4 bytes"), "{}", text(&output.stdout));
    assert!(text(&output.stdout).contains("fault: link checksum"), "{}", text(&output.stdout));
}

#[test]
fn an_invalid_packet_is_one_line_and_exit_code_2() {
    for (arguments, word) in [
        (&["hello"][..], "'hello'"),
        (&["012"], "odd number"),
        (&["40000001 0000000f 00001000"], "--header"),
        (&["00000001 0000000f 00001000 00000000"], "--framed"),
        (&["3f000001 00000000 00000000 00000000"], "unknown"),
        (&["--dllp", "0000"], "2 bytes"),
        (&["--framed", "00"], "1 bytes"),
        (&[""], "no bytes"),
    ] {
        let output = decode(arguments, "");
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.starts_with("crosslane: ") && stderr.lines().count() == 1, "{stderr}");
        assert!(stderr.contains(word), "{word}: {stderr}");
    }
}
