//! Opcodes, and which headers follow each (IBA 9.2, table 38).

use std::fmt;

use super::header::{Immediate, Operation, Service};

/// Which service an opcode is of: its highest three bits.
const RC: u8 = 0b000;
const UC: u8 = 0b001;
const UD: u8 = 0b011;
const SERVICE_SHIFT: u32 = 5;
const OPERATION_MASK: u8 = 0b1_1111;
/// Congestion notification (RoCEv2, annex A17.9.3).
const CONGESTION_NOTIFICATION: u8 = 0x81;

/// What the last packet of a message hands over, as the opcode tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Extra {
    Nothing,
    Data,
    Invalidate,
}

/// Operations with their lowest five bits.
const OPERATIONS: [(Operation, Extra, u8); 23] = [
    (Operation::SendFirst, Extra::Nothing, 0),
    (Operation::SendMiddle, Extra::Nothing, 1),
    (Operation::SendLast, Extra::Nothing, 2),
    (Operation::SendLast, Extra::Data, 3),
    (Operation::SendOnly, Extra::Nothing, 4),
    (Operation::SendOnly, Extra::Data, 5),
    (Operation::WriteFirst, Extra::Nothing, 6),
    (Operation::WriteMiddle, Extra::Nothing, 7),
    (Operation::WriteLast, Extra::Nothing, 8),
    (Operation::WriteLast, Extra::Data, 9),
    (Operation::WriteOnly, Extra::Nothing, 10),
    (Operation::WriteOnly, Extra::Data, 11),
    (Operation::ReadRequest, Extra::Nothing, 12),
    (Operation::ReadResponseFirst, Extra::Nothing, 13),
    (Operation::ReadResponseMiddle, Extra::Nothing, 14),
    (Operation::ReadResponseLast, Extra::Nothing, 15),
    (Operation::ReadResponseOnly, Extra::Nothing, 16),
    (Operation::Acknowledge, Extra::Nothing, 17),
    (Operation::AtomicAcknowledge, Extra::Nothing, 18),
    (Operation::CompareSwap, Extra::Nothing, 19),
    (Operation::FetchAdd, Extra::Nothing, 20),
    (Operation::SendLast, Extra::Invalidate, 22),
    (Operation::SendOnly, Extra::Invalidate, 23),
];
/// The last of a UC's opcodes: SEND and WRITE alone.
const UC_LAST: u8 = 11;

/// The first byte of a packet, and what it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Opcode {
    pub(super) service: Service,
    pub(super) operation: Operation,
    pub(super) extra: Extra,
}

impl fmt::Display for Opcode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?} {:?}", self.service, self.operation)?;
        match self.extra {
            Extra::Nothing => Ok(()),
            Extra::Data => formatter.write_str(" with immediate"),
            Extra::Invalidate => formatter.write_str(" with invalidate"),
        }
    }
}

impl Opcode {
    /// What a packet's first byte says.
    pub(super) fn parse(code: u8) -> Option<Self> {
        if code == CONGESTION_NOTIFICATION {
            let operation = Operation::CongestionNotification;
            return Some(Self { service: Service::Rc, operation, extra: Extra::Nothing });
        }
        let service = match code >> SERVICE_SHIFT {
            RC => Service::Rc,
            UC => Service::Uc,
            UD => Service::Ud,
            _ => return None,
        };
        let low = code & OPERATION_MASK;
        let (operation, extra, _) = *OPERATIONS.iter().find(|(.., known)| *known == low)?;
        has(service, operation, low).then_some(Self { service, operation, extra })
    }

    /// The opcode of an operation, where its service has it.
    pub(super) fn of(service: Service, operation: Operation, immediate: Option<Immediate>) -> Option<Self> {
        let extra = match immediate {
            None => Extra::Nothing,
            Some(Immediate::Data(_)) => Extra::Data,
            Some(Immediate::Invalidate(_)) => Extra::Invalidate,
        };
        if operation == Operation::CongestionNotification {
            // A notification does not tell the service of the queue pair that it is for.
            return (extra == Extra::Nothing).then_some(Self { service: Service::Rc, operation, extra });
        }
        let low = low_bits(operation, extra)?;
        has(service, operation, low).then_some(Self { service, operation, extra })
    }

    /// The first byte.
    pub(super) fn code(self) -> u8 {
        // Only those in the table are ever made, apart from the notification.
        let Some(low) = low_bits(self.operation, self.extra) else { return CONGESTION_NOTIFICATION };
        let service = match self.service {
            Service::Rc => RC,
            Service::Uc => UC,
            Service::Ud => UD,
        };
        service << SERVICE_SHIFT | low
    }

    /// Whether RETH follows in standard RoCEv2.
    pub(super) fn has_rdma(self) -> bool {
        matches!(self.operation, Operation::WriteFirst | Operation::WriteOnly | Operation::ReadRequest)
    }

    /// Whether RETH follows with the extension alone: every packet of a WRITE says where it belongs.
    pub(super) fn may_have_rdma(self) -> bool {
        matches!(self.operation, Operation::WriteMiddle | Operation::WriteLast)
    }

    pub(super) fn has_atomic(self) -> bool {
        matches!(self.operation, Operation::CompareSwap | Operation::FetchAdd)
    }

    pub(super) fn has_atomic_ack(self) -> bool {
        self.operation == Operation::AtomicAcknowledge
    }

    pub(super) fn has_ack(self) -> bool {
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

fn low_bits(operation: Operation, extra: Extra) -> Option<u8> {
    OPERATIONS.iter().find(|known| (known.0, known.1) == (operation, extra)).map(|known| known.2)
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
    fn opcodes_are_those_of_infiniband() {
        let known: Vec<u8> = (0..=u8::MAX).filter(|code| Opcode::parse(*code).is_some()).collect();
        let expected: Vec<u8> = (0..=20).chain([22, 23]).chain(0x20..=0x2b).chain([0x64, 0x65, 0x81]).collect();
        assert_eq!(known, expected);
        for code in known {
            assert_eq!(Opcode::parse(code).unwrap().code(), code);
        }
    }

    #[test]
    fn what_a_service_does_not_have_has_no_opcode() {
        assert_eq!(Opcode::of(Service::Uc, Operation::ReadRequest, None), None);
        assert_eq!(Opcode::of(Service::Ud, Operation::SendFirst, None), None);
        let invalidate = Some(Immediate::Invalidate(super::super::RKey(1)));
        assert_eq!(Opcode::of(Service::Rc, Operation::WriteOnly, invalidate), None);
        assert_eq!(Opcode::of(Service::Uc, Operation::SendOnly, invalidate), None);
        let opcode = Opcode::of(Service::Rc, Operation::SendOnly, invalidate).unwrap();
        assert_eq!((opcode.code(), opcode.to_string().as_str()), (23, "Rc SendOnly with invalidate"));
    }
}
