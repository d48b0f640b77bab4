//! `crosslane pcie decode`: decodes packets field by field.

use std::io::Read;

use anyhow::{Context, Result, bail};
use pcie::tlp::dump::{self, Dump};
use pcie::tlp::explain::{self, Explanation};
use pcie::tlp::{Dllp, Packet, PacketError, crc};
use stats::{Align, Table};

use crate::output;
use crate::wrong_use::WrongUse;

/// Options of `crosslane pcie decode`.
#[derive(clap::Args)]
pub struct Options {
    /// Bytes in hex, in wire order [default: read standard input: plain hex, the output of xxd or hexdump -C, or the
    /// kernel's "TLP Header:" lines; an empty line starts a new packet]
    hex: Vec<String>,
    /// The bytes are headers without payload, as in an error log
    #[arg(long, conflicts_with_all = ["dllp", "framed"])]
    header: bool,
    /// The bytes are a data link layer packet: four bytes and a two-byte checksum
    #[arg(long, conflicts_with = "framed")]
    dllp: bool,
    /// The bytes are framed for the link: a two-byte sequence number precedes the packet, a four-byte LCRC follows it
    #[arg(long)]
    framed: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Sizes of the fields that the data link layer adds around a packet.
const SEQUENCE_BYTES: usize = 2;
const LCRC_BYTES: usize = 4;

/// Prints the decoded packets. Fails if a checksum is wrong.
pub fn main(options: &Options) -> Result<()> {
    let text = if options.hex.is_empty() { standard_input()? } else { options.hex.join(" ") };
    let dumps = dump::parse(&text).map_err(WrongUse::of)?;
    let explained: Vec<Explanation> = dumps.iter().map(|dump| explain_dump(options, dump)).collect::<Result<_>>()?;
    match &explained[..] {
        [one] if options.json => output::print_json(one)?,
        all if options.json => output::print_json(&all)?,
        all => output::print(&all.iter().map(render).collect::<Vec<_>>().join("\n"))?,
    }
    let faults: usize = explained.iter().map(|explanation| explanation.faults.len()).sum();
    if faults > 0 { bail!("{faults} checksums are wrong; the packets are damaged or mistyped") } else { Ok(()) }
}

fn standard_input() -> Result<String> {
    let mut bytes = Vec::new();
    std::io::stdin().read_to_end(&mut bytes).context("reading standard input")?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn explain_dump(options: &Options, dump: &Dump) -> Result<Explanation> {
    if options.dllp {
        return Ok(explain::dllp(&Dllp::parse(&dump.bytes).map_err(WrongUse::of)?));
    }
    if options.framed {
        return explain_framed(&dump.bytes);
    }
    let packet = if options.header || dump.is_header_only {
        Packet::header_only(&dump.bytes)
    } else {
        Packet::new_checked(&dump.bytes)
    };
    packet.and_then(|packet| explain::packet(&packet)).map_err(|error| with_remedy(error, dump).into())
}

fn explain_framed(bytes: &[u8]) -> Result<Explanation> {
    let Some((sequence, rest)) = bytes.split_first_chunk::<SEQUENCE_BYTES>() else {
        return Err(too_short(bytes));
    };
    let Some((packet, lcrc)) = rest.split_last_chunk::<LCRC_BYTES>() else {
        return Err(too_short(bytes));
    };
    let sequence = u16::from_be_bytes(*sequence);
    let view = Packet::new_checked(packet).map_err(WrongUse::of)?;
    let mut explanation = explain::packet(&view).map_err(WrongUse::of)?;
    explanation.summary = format!("sequence number {}: {}", sequence & 0xfff, explanation.summary);
    let expected = crc::lcrc(sequence, packet);
    if *lcrc != expected {
        explanation.faults.push(format!("link checksum is {lcrc:02x?}, should be {expected:02x?}"));
    }
    Ok(explanation)
}

fn too_short(bytes: &[u8]) -> anyhow::Error {
    WrongUse::of(PacketError::Truncated { found: bytes.len(), needed: SEQUENCE_BYTES + LCRC_BYTES }).into()
}

/// Adds a remedy to an error. A dump that ends too early is usually a header from an error log.
fn with_remedy(error: PacketError, dump: &Dump) -> WrongUse {
    let is_bare_header = matches!(dump.bytes.len(), 12 | 16);
    match error {
        PacketError::Truncated { .. } if is_bare_header => {
            WrongUse::of(format!("{error}; if it is a header without its payload, add --header"))
        }
        PacketError::TooLong { .. } => WrongUse::of(format!("{error}; in that case add --framed or remove them")),
        _ => WrongUse::of(error),
    }
}

fn render(explanation: &Explanation) -> String {
    let mut table = Table::new(&[("FIELD", Align::Left), ("VALUE", Align::Left), ("MEANING", Align::Left)]);
    for field in &explanation.fields {
        table.row(vec![field.name.to_owned(), field.value.clone(), field.meaning.clone()]);
    }
    let fields = if table.is_empty() { String::new() } else { table.render() };
    let faults: String = explanation.faults.iter().map(|fault| format!("fault: {fault}\n")).collect();
    format!("{}\n{fields}{faults}", explanation.summary)
}
