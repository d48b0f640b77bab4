//! Opcodes and the extended headers that follow each (IBA 9.2, table 38).

use std::fmt;

use super::header::{Immediate, Operation, Service};

/// The transport service of an opcode is in its highest three bits.
const RC: u8 = 0b000;
const UC: u8 = 0b001;
const UD: u8 = 0b011;
const SERVICE_SHIFT: u32 = 5;
const OPERATION_MASK: u8 = 0b1_1111;
/// Congestion notification (RoCEv2, annex A17.9.3).
const CONGESTION_NOTIFICATION: u8 = 0x81;

/// What the opcode says about the immediate data of a message's last packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ImmediateKind {
    None,
    Data,
    Invalidate,
}

/// The operations with the lowest five bits of their opcodes.
const OPERATIONS: [(Operation, ImmediateKind, u8); 23] = [
    (Operation::SendFirst, ImmediateKind::None, 0),
    (Operation::SendMiddle, ImmediateKind::None, 1),
    (Operation::SendLast, ImmediateKind::None, 2),
    (Operation::SendLast, ImmediateKind::Data, 3),
    (Operation::SendOnly, ImmediateKind::None, 4),
    (Operation::SendOnly, ImmediateKind::Data, 5),
    (Operation::WriteFirst, ImmediateKind::None, 6),
    (Operation::WriteMiddle, ImmediateKind::None, 7),
    (Operation::WriteLast, ImmediateKind::None, 8),
    (Operation::WriteLast, ImmediateKind::Data, 9),
    (Operation::WriteOnly, ImmediateKind::None, 10),
    (Operation::WriteOnly, ImmediateKind::Data, 11),
    (Operation::ReadRequest, ImmediateKind::None, 12),
    (Operation::ReadResponseFirst, ImmediateKind::None, 13),
    (Operation::ReadResponseMiddle, ImmediateKind::None, 14),
    (Operation::ReadResponseLast, ImmediateKind::None, 15),
    (Operation::ReadResponseOnly, ImmediateKind::None, 16),
    (Operation::Acknowledge, ImmediateKind::None, 17),
    (Operation::AtomicAcknowledge, ImmediateKind::None, 18),
    (Operation::CompareSwap, ImmediateKind::None, 19),
    (Operation::FetchAdd, ImmediateKind::None, 20),
    (Operation::SendLast, ImmediateKind::Invalidate, 22),
    (Operation::SendOnly, ImmediateKind::Invalidate, 23),
];
/// The highest opcode of UC, which has only SEND and WRITE.
const UC_LAST: u8 = 11;

/// The first byte of a packet, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Opcode {
    pub(super) service: Service,
    pub(super) operation: Operation,
    pub(super) immediate_kind: ImmediateKind,
}

impl fmt::Display for Opcode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?} {:?}", self.service, self.operation)?;
        match self.immediate_kind {
            ImmediateKind::None => Ok(()),
            ImmediateKind::Data => formatter.write_str(" with immediate"),
            ImmediateKind::Invalidate => formatter.write_str(" with invalidate"),
        }
    }
}

impl Opcode {
    /// Decodes the first byte of a packet.
    pub(super) fn parse(code: u8) -> Option<Self> {
        if code == CONGESTION_NOTIFICATION {
            let operation = Operation::CongestionNotification;
            return Some(Self { service: Service::Rc, operation, immediate_kind: ImmediateKind::None });
        }
        let service = match code >> SERVICE_SHIFT {
            RC => Service::Rc,
            UC => Service::Uc,
            UD => Service::Ud,
            _ => return None,
        };
        let low = code & OPERATION_MASK;
        let (operation, immediate_kind, _) = *OPERATIONS.iter().find(|(.., known)| *known == low)?;
        has(service, operation, low).then_some(Self { service, operation, immediate_kind })
    }

    /// Returns the opcode of an operation, if its transport service has it.
    pub(super) fn of(service: Service, operation: Operation, immediate: Option<Immediate>) -> Option<Self> {
        let immediate_kind = match immediate {
            None => ImmediateKind::None,
            Some(Immediate::Data(_)) => ImmediateKind::Data,
            Some(Immediate::Invalidate(_)) => ImmediateKind::Invalidate,
        };
        if operation == Operation::CongestionNotification {
            // A CNP does not say the transport service of the queue pair that it is for.
            return (immediate_kind == ImmediateKind::None).then_some(Self {
                service: Service::Rc,
                operation,
                immediate_kind,
            });
        }
        let low = low_bits(operation, immediate_kind)?;
        has(service, operation, low).then_some(Self { service, operation, immediate_kind })
    }

    /// Returns the first byte of the packet.
    pub(super) fn code(self) -> u8 {
        // Only the CNP is not in the table.
        let Some(low) = low_bits(self.operation, self.immediate_kind) else { return CONGESTION_NOTIFICATION };
        let service = match self.service {
            Service::Rc => RC,
            Service::Uc => UC,
            Service::Ud => UD,
        };
        service << SERVICE_SHIFT | low
    }

    /// Returns whether a RETH follows in standard RoCEv2.
    pub(super) fn has_reth(self) -> bool {
        matches!(self.operation, Operation::WriteFirst | Operation::WriteOnly | Operation::ReadRequest)
    }

    /// Returns whether a RETH follows with the selective extension, where every packet of a WRITE carries its address.
    pub(super) fn may_have_reth(self) -> bool {
        matches!(self.operation, Operation::WriteMiddle | Operation::WriteLast)
    }

    pub(super) fn has_atomic(self) -> bool {
        matches!(self.operation, Operation::CompareSwap | Operation::FetchAdd)
    }

    pub(super) fn has_atomic_ack(self) -> bool {
        self.operation == Operation::AtomicAcknowledge
    }

    pub(super) fn has_aeth(self) -> bool {
        matches!(
            self.operation,
            Operation::Acknowledge
                | Operation::AtomicAcknowledge
                | Operation::ReadResponseFirst
                | Operation::ReadResponseLast
                | Operation::ReadResponseOnly
        )
    }

    pub(super) fn has_payload(self) -> bool {
        !matches!(
            self.operation,
            Operation::ReadRequest
                | Operation::Acknowledge
                | Operation::AtomicAcknowledge
                | Operation::CompareSwap
                | Operation::FetchAdd
                | Operation::CongestionNotification
        )
    }

    pub(super) fn is_congestion_notification(self) -> bool {
        self.operation == Operation::CongestionNotification
    }
}

fn low_bits(operation: Operation, immediate_kind: ImmediateKind) -> Option<u8> {
    OPERATIONS.iter().find(|known| (known.0, known.1) == (operation, immediate_kind)).map(|known| known.2)
}

fn has(service: Service, operation: Operation, low: u8) -> bool {
    match service {
        Service::Rc => true,
        Service::Uc => low <= UC_LAST,
        Service::Ud => operation == Operation::SendOnly && low <= UC_LAST,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_are_those_of_the_infiniband_specification() {
        let known: Vec<u8> = (0..=u8::MAX).filter(|code| Opcode::parse(*code).is_some()).collect();
        let expected: Vec<u8> = (0..=20).chain([22, 23]).chain(0x20..=0x2b).chain([0x64, 0x65, 0x81]).collect();
        assert_eq!(known, expected);
        for code in known {
            assert_eq!(Opcode::parse(code).unwrap().code(), code);
        }
    }

    #[test]
    fn operations_that_a_service_does_not_have_have_no_opcode() {
        assert_eq!(Opcode::of(Service::Uc, Operation::ReadRequest, None), None);
        assert_eq!(Opcode::of(Service::Ud, Operation::SendFirst, None), None);
        let invalidate = Some(Immediate::Invalidate(super::super::RKey(1)));
        assert_eq!(Opcode::of(Service::Rc, Operation::WriteOnly, invalidate), None);
        assert_eq!(Opcode::of(Service::Uc, Operation::SendOnly, invalidate), None);
        let opcode = Opcode::of(Service::Rc, Operation::SendOnly, invalidate).unwrap();
        assert_eq!((opcode.code(), opcode.to_string().as_str()), (23, "Rc SendOnly with invalidate"));
    }
}
