//! Explains packets field by field, for people.

use serde::Serialize;

use super::dllp::{self, Dllp};
use super::packet::{Packet, PacketError};
use super::repr::{
    Completion, CompletionStatus, ConfigRequest, Credits, DW_BYTES, DeviceId, FlowClass, IoRequest, MemoryOp,
    MemoryRequest, Message, Repr,
};

/// The explanation of a packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// A summary in one line.
    pub summary: String,
    /// The fields in the order of the bytes.
    pub fields: Vec<Field>,
    /// Errors of the packet, such as a wrong checksum; empty if there are none.
    pub faults: Vec<String>,
}

/// A field of a packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Field {
    /// The field's name in the specification.
    pub name: &'static str,
    /// The value.
    pub value: String,
    /// The value's meaning; may be empty.
    pub meaning: String,
}

/// Explains a packet outside flit mode.
///
/// # Errors
/// When its kind is unknown or the specification forbids the value of a field.
pub fn packet(packet: &Packet<'_>) -> Result<Explanation, PacketError> {
    let mut fields: Vec<Field> =
        packet.prefixes().map(|prefix| field("Prefix", format!("{:02x?}", prefix.to_bytes()), prefix)).collect();
    let repr = Repr::parse(packet)?;
    let mut faults = Vec::new();
    fields.push(field("Fmt, Type", format!("{:03b} {:05b}", packet.format(), packet.kind()), mnemonic(&repr)));
    explain_common(&repr, &mut fields);
    match &repr {
        Repr::Memory(request) => memory_fields(request, &mut fields),
        Repr::Io(request) => io_fields(request, &mut fields),
        Repr::Config(request) => config_fields(request, &mut fields),
        Repr::Completion(completion) => completion_fields(completion, &mut fields),
        Repr::Message(message) => message_fields(message, &mut fields),
    }
    cost_fields(&repr, &mut fields);
    if let Some(found) = packet.ecrc() {
        let expected = packet.expected_ecrc();
        fields.push(field("ECRC", hex(&found), if found == expected { "right" } else { "wrong" }));
        if found != expected {
            faults.push(format!("end-to-end checksum is {}, should be {}", hex(&found), hex(&expected)));
        }
    }
    Ok(Explanation { summary: summary(&repr), fields, faults })
}

/// Explains a data link layer packet.
pub fn dllp(packet: &Dllp) -> Explanation {
    let mut fields = Vec::new();
    let summary = match packet {
        Dllp::Ack(number) => format!("Ack: all packets up to {number} have arrived"),
        Dllp::Nak(number) => format!("Nak: packets after {number} must be replayed"),
        Dllp::FlowControl(flow) => {
            flow_fields(flow, &mut fields);
            format!("{} of {}: flow control credits", phase(flow.phase), class(flow.class))
        }
        Dllp::PowerManagement(power) => match power {
            dllp::PowerManagement::EnterL1 => "PM_Enter_L1".to_owned(),
            dllp::PowerManagement::EnterL23 => "PM_Enter_L23".to_owned(),
            dllp::PowerManagement::RequestL1 => "PM_Active_State_Request_L1".to_owned(),
            dllp::PowerManagement::RequestAck => "PM_Request_Ack".to_owned(),
        },
        Dllp::Feature { supported, is_acknowledged } => {
            let scaled = if supported & 1 == 1 { "with scaled flow control" } else { "without scaled flow control" };
            let seen = if *is_acknowledged { "the peer's were received" } else { "the peer's were not received" };
            format!("data link features {supported:#x}, {scaled}; {seen}")
        }
        Dllp::Vendor(bytes) => format!("vendor defined: {}", hex(bytes)),
        Dllp::Nop => "NOP".to_owned(),
    };
    Explanation { summary, fields, faults: Vec::new() }
}

fn field(name: &'static str, value: impl ToString, meaning: impl ToString) -> Field {
    Field { name, value: value.to_string(), meaning: meaning.to_string() }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the specification's abbreviation.
fn mnemonic(repr: &Repr) -> &'static str {
    match repr {
        Repr::Memory(request) => match request.op {
            MemoryOp::Read => "MRd",
            MemoryOp::Write => "MWr",
            MemoryOp::FetchAdd => "FetchAdd",
            MemoryOp::Swap => "Swap",
            MemoryOp::CompareAndSwap => "CAS",
            MemoryOp::DeferrableWrite => "DMWr",
        },
        Repr::Io(request) if request.is_write => "IOWr",
        Repr::Io(_) => "IORd",
        Repr::Config(request) => match (request.is_write, request.is_type_1) {
            (false, false) => "CfgRd0",
            (false, true) => "CfgRd1",
            (true, false) => "CfgWr0",
            (true, true) => "CfgWr1",
        },
        Repr::Completion(completion) if completion.length_dw > 0 => "CplD",
        Repr::Completion(_) => "Cpl",
        Repr::Message(message) if message.length_dw > 0 => "MsgD",
        Repr::Message(_) => "Msg",
    }
}

fn summary(repr: &Repr) -> String {
    let name = mnemonic(repr);
    match repr {
        Repr::Memory(request) => {
            let bytes = request.length_dw * DW_BYTES;
            format!("{name} of {bytes} bytes at {:#x} from {}", request.address, request.requester)
        }
        Repr::Io(request) => format!("{name} at I/O address {:#x} from {}", request.address, request.requester),
        Repr::Config(request) => {
            format!("{name} of register {:#x} of {} from {}", request.register, request.target, request.requester)
        }
        Repr::Completion(completion) => {
            let bytes = completion.length_dw * DW_BYTES;
            let (from, to) = (completion.completer, completion.requester);
            format!("{name} with {bytes} bytes from {from} for tag {:#x} of {to}", completion.tag)
        }
        Repr::Message(message) => format!("{name} {} from {}", message_name(message.code), message.requester),
    }
}

fn explain_common(repr: &Repr, fields: &mut Vec<Field>) {
    let common = repr.common();
    fields.push(field("TC", common.traffic_class, ""));
    let attributes: Vec<&str> = [(4, "ID-based ordering"), (2, "relaxed ordering"), (1, "no snoop")]
        .into_iter()
        .filter(|(bit, _)| common.attributes & bit != 0)
        .map(|(_, name)| name)
        .collect();
    fields.push(field("Attr", format!("{:03b}", common.attributes), attributes.join(", ")));
    let translation = ["untranslated", "translation request", "translated", "reserved"];
    fields.push(field("AT", common.address_type, translation[usize::from(common.address_type & 3)]));
    if let Some(hint) = common.processing_hint {
        let meanings = ["bi-directional", "requester", "target", "target with priority"];
        fields.push(field("PH", hint, meanings[usize::from(hint & 3)]));
    }
    fields.push(field(
        "EP",
        u8::from(common.is_poisoned),
        if common.is_poisoned { "poisoned: the payload is known to be wrong" } else { "" },
    ));
    fields.push(field("TD", u8::from(common.has_ecrc), if common.has_ecrc { "ECRC follows" } else { "no ECRC" }));
    let bytes = repr.payload_bytes();
    fields.push(field("Payload", bytes, "bytes"));
}

fn memory_fields(request: &MemoryRequest, fields: &mut Vec<Field>) {
    fields.push(field("Length", request.length_dw, "double words"));
    requester_fields(request.requester, request.tag, fields);
    fields.push(field("First DW BE", format!("{:04b}", request.first_byte_enable), ""));
    fields.push(field("Last DW BE", format!("{:04b}", request.last_byte_enable), ""));
    fields.push(field("Address", format!("{:#x}", request.address), format!("{} bits", request.width)));
}

fn io_fields(request: &IoRequest, fields: &mut Vec<Field>) {
    requester_fields(request.requester, request.tag, fields);
    fields.push(field("First DW BE", format!("{:04b}", request.first_byte_enable), ""));
    fields.push(field("Address", format!("{:#x}", request.address), "I/O space"));
}

fn config_fields(request: &ConfigRequest, fields: &mut Vec<Field>) {
    requester_fields(request.requester, request.tag, fields);
    fields.push(field("First DW BE", format!("{:04b}", request.first_byte_enable), ""));
    fields.push(field("Target", request.target, "bus:device.function"));
    fields.push(field("Register", format!("{:#05x}", request.register), ""));
}

fn completion_fields(completion: &Completion, fields: &mut Vec<Field>) {
    let status = match completion.status {
        CompletionStatus::Successful => ("SC", "successful"),
        CompletionStatus::UnsupportedRequest => ("UR", "unsupported request"),
        CompletionStatus::ConfigurationRetry => ("CRS", "configuration request retry status"),
        CompletionStatus::CompleterAbort => ("CA", "completer abort"),
    };
    fields.push(field("Completer ID", completion.completer, "bus:device.function"));
    fields.push(field("Status", status.0, status.1));
    fields.push(field("Byte Count", completion.byte_count, "remaining bytes of the request, including these"));
    requester_fields(completion.requester, completion.tag, fields);
    fields.push(field("Lower Address", format!("{:#04x}", completion.lower_address), "of the first byte carried"));
}

fn message_fields(message: &Message, fields: &mut Vec<Field>) {
    let routing = ["to the root complex", "by address", "by ID", "broadcast", "local", "gathered to the root complex"];
    let meaning = routing.get(usize::from(message.routing)).copied().unwrap_or("reserved");
    fields.push(field("Routing", format!("{:03b}", message.routing), meaning));
    requester_fields(message.requester, message.tag.into(), fields);
    fields.push(field("Message Code", format!("{:#04x}", message.code), message_name(message.code)));
    fields.push(field("Bytes 8-15", format!("{:016x}", message.rest), ""));
}

fn requester_fields(requester: DeviceId, tag: u16, fields: &mut Vec<Field>) {
    fields.push(field("Requester ID", requester, "bus:device.function"));
    fields.push(field("Tag", format!("{tag:#x}"), ""));
}

fn cost_fields(repr: &Repr, fields: &mut Vec<Field>) {
    let Credits { header, data } = repr.credits();
    fields.push(field(
        "Credits",
        format!("{header} + {data}"),
        format!("header and data, {}", class(repr.flow_class())),
    ));
    let bytes = repr.wire_bytes();
    fields.push(field("On the wire", bytes, "bytes with framing and LCRC, outside flit mode"));
}

fn flow_fields(flow: &dllp::FlowControl, fields: &mut Vec<Field>) {
    fields.push(field("VC", flow.channel, ""));
    fields.push(field("HdrFC", flow.credits.header, scale(flow.scales.0)));
    fields.push(field("DataFC", flow.credits.data, scale(flow.scales.1)));
}

fn scale(bits: u8) -> &'static str {
    ["not scaled", "scaled by 1", "scaled by 4", "scaled by 16"][usize::from(bits & 3)]
}

fn phase(phase: dllp::FlowPhase) -> &'static str {
    match phase {
        dllp::FlowPhase::Init1 => "InitFC1",
        dllp::FlowPhase::Init2 => "InitFC2",
        dllp::FlowPhase::Update => "UpdateFC",
    }
}

fn class(class: FlowClass) -> &'static str {
    match class {
        FlowClass::Posted => "posted",
        FlowClass::NonPosted => "non-posted",
        FlowClass::Completion => "completion",
    }
}

/// Returns the name of a message code (section 2.2.8).
fn message_name(code: u8) -> &'static str {
    match code {
        0x00 => "Unlock",
        0x01 => "Invalidate Request",
        0x02 => "Invalidate Completion",
        0x04 => "Page Request",
        0x05 => "PRG Response",
        0x10 => "LTR",
        0x12 => "OBFF",
        0x14 => "PM_Active_State_Nak",
        0x18 => "PM_PME",
        0x19 => "PME_Turn_Off",
        0x1b => "PME_TO_Ack",
        0x20..=0x23 => "Assert_INTx",
        0x24..=0x27 => "Deassert_INTx",
        0x30 => "ERR_COR",
        0x31 => "ERR_NONFATAL",
        0x33 => "ERR_FATAL",
        0x50 => "Set_Slot_Power_Limit",
        0x52 => "PTM Request",
        0x53 => "PTM Response",
        0x7e => "Vendor_Defined Type 0",
        0x7f => "Vendor_Defined Type 1",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tlp::dllp::{FlowControl, FlowPhase};

    fn value<'a>(explanation: &'a Explanation, name: &str) -> &'a str {
        &explanation.fields.iter().find(|field| field.name == name).unwrap().value
    }

    #[test]
    fn a_read_from_an_error_log_is_explained() {
        let bytes = [0x20, 0, 0, 16, 5, 1, 0xa5, 0xff, 0, 0, 0, 1, 0x23, 0x45, 0x67, 0x80];
        let explanation = packet(&Packet::new_checked(&bytes).unwrap()).unwrap();
        assert_eq!(explanation.summary, "MRd of 64 bytes at 0x123456780 from 05:00.1");
        assert_eq!(value(&explanation, "On the wire"), "24");
        assert_eq!(value(&explanation, "Credits"), "1 + 0");
        assert!(explanation.faults.is_empty());
    }

    #[test]
    fn a_wrong_checksum_is_reported() {
        let bytes = [0x40, 0, 0x80, 1, 0, 0, 0, 0x0f, 0, 0, 0x10, 0, 1, 2, 3, 4, 0, 0, 0, 0];
        let explanation = packet(&Packet::new_checked(&bytes).unwrap()).unwrap();
        assert_eq!(explanation.summary, "MWr of 4 bytes at 0x1000 from 00:00.0");
        assert_eq!(explanation.faults.len(), 1);
        assert!(explanation.faults[0].contains("00000000"), "{:?}", explanation.faults);
    }

    #[test]
    fn flow_control_credits_are_explained() {
        let credits = Credits { header: 12, data: 345 };
        let class = FlowClass::Posted;
        let explanation = dllp(&Dllp::FlowControl(FlowControl {
            phase: FlowPhase::Update,
            class,
            channel: 0,
            credits,
            scales: (0, 2),
        }));
        assert_eq!(explanation.summary, "UpdateFC of posted: flow control credits");
        assert_eq!((value(&explanation, "HdrFC"), value(&explanation, "DataFC")), ("12", "345"));
    }
}
