//! Transitions between states, and the attributes that each takes.
//!
//! Source: IBA 11.2.5.2, table 96, in the form that programs meet: Linux' `ib_modify_qp_is_ok` without alternate paths,
//! which this NIC does not have. Of its own accord a queue pair goes to `SendQueueError` and `Error` only.

use bitflags::bitflags;
use thiserror::Error;

use super::access::AccessFlags;
use super::address::NicAddress;
use super::state::QpState;
use crate::wire::{Psn, QpNumber, Service};

/// Bytes of payload that a packet carries at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mtu {
    /// 256 bytes.
    B256,
    /// 512 bytes.
    B512,
    /// 1024 bytes.
    B1024,
    /// 2048 bytes.
    B2048,
    /// 4096 bytes.
    B4096,
}

impl Mtu {
    /// All there are.
    pub const ALL: [Self; 5] = [Self::B256, Self::B512, Self::B1024, Self::B2048, Self::B4096];

    /// In bytes.
    pub const fn bytes(self) -> u32 {
        256 << self as u32
    }
}

/// Codes of five bits end here: times of the ACK and the RNR timer.
const TIMER_CODE_MAX: u8 = 31;
/// Counts of three bits end here: retries. 7 RNR retries are without end.
const RETRIES_MAX: u8 = 7;
/// The one partition of this NIC: the default one, with full membership.
const PARTITIONS: u16 = 1;
/// The one port of this NIC.
const PORT: u8 = 1;
const QP_NUMBER_MAX: u32 = (1 << 24) - 1;

bitflags! {
    /// Names of [`QpAttributes`]' fields.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct AttributeSet: u16 {
        /// [`QpAttributes::partition_index`].
        const PARTITION_INDEX = 1;
        /// [`QpAttributes::port`].
        const PORT = 1 << 1;
        /// [`QpAttributes::access`].
        const ACCESS = 1 << 2;
        /// [`QpAttributes::queue_key`].
        const QUEUE_KEY = 1 << 3;
        /// [`QpAttributes::path`].
        const PATH = 1 << 4;
        /// [`QpAttributes::mtu`].
        const MTU = 1 << 5;
        /// [`QpAttributes::destination`].
        const DESTINATION = 1 << 6;
        /// [`QpAttributes::receive_psn`].
        const RECEIVE_PSN = 1 << 7;
        /// [`QpAttributes::send_psn`].
        const SEND_PSN = 1 << 8;
        /// [`QpAttributes::responder_reads_max`].
        const RESPONDER_READS_MAX = 1 << 9;
        /// [`QpAttributes::initiator_reads_max`].
        const INITIATOR_READS_MAX = 1 << 10;
        /// [`QpAttributes::rnr_timer_code`].
        const RNR_TIMER_CODE = 1 << 11;
        /// [`QpAttributes::ack_timer_code`].
        const ACK_TIMER_CODE = 1 << 12;
        /// [`QpAttributes::retries`].
        const RETRIES = 1 << 13;
        /// [`QpAttributes::rnr_retries`].
        const RNR_RETRIES = 1 << 14;
    }
}

/// What a transition sets; in a query, what is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpAttributes {
    /// Which partition: 0, the only one.
    pub partition_index: Option<u16>,
    /// Which port: 1, the only one.
    pub port: Option<u8>,
    /// What the peer may do: the remote rights; others have no meaning here.
    pub access: Option<AccessFlags>,
    /// Of datagrams: the key that they must carry.
    pub queue_key: Option<u32>,
    /// Where the peer is.
    pub path: Option<NicAddress>,
    /// The largest payload of a packet.
    pub mtu: Option<Mtu>,
    /// The peer's queue pair.
    pub destination: Option<QpNumber>,
    /// The number of the first packet to come.
    pub receive_psn: Option<Psn>,
    /// The number of the first packet to go.
    pub send_psn: Option<Psn>,
    /// READs and atomics of the peer at a time (`max_dest_rd_atomic`).
    pub responder_reads_max: Option<u8>,
    /// READs and atomics of this side at a time (`max_rd_atomic`).
    pub initiator_reads_max: Option<u8>,
    /// How long the peer is to wait when nothing is posted here: code of IBA table 46.
    pub rnr_timer_code: Option<u8>,
    /// How long to wait for an acknowledgement: 4.096 us x 2^code; 0 is for ever.
    pub ack_timer_code: Option<u8>,
    /// How often to send again for want of an answer: 0 to 7.
    pub retries: Option<u8>,
    /// How often to try again when the peer has nothing posted: 0 to 6; 7 is without end.
    pub rnr_retries: Option<u8>,
}

impl QpAttributes {
    /// Which are there.
    pub fn given(&self) -> AttributeSet {
        let mut given = AttributeSet::empty();
        given.set(AttributeSet::PARTITION_INDEX, self.partition_index.is_some());
        given.set(AttributeSet::PORT, self.port.is_some());
        given.set(AttributeSet::ACCESS, self.access.is_some());
        given.set(AttributeSet::QUEUE_KEY, self.queue_key.is_some());
        given.set(AttributeSet::PATH, self.path.is_some());
        given.set(AttributeSet::MTU, self.mtu.is_some());
        given.set(AttributeSet::DESTINATION, self.destination.is_some());
        given.set(AttributeSet::RECEIVE_PSN, self.receive_psn.is_some());
        given.set(AttributeSet::SEND_PSN, self.send_psn.is_some());
        given.set(AttributeSet::RESPONDER_READS_MAX, self.responder_reads_max.is_some());
        given.set(AttributeSet::INITIATOR_READS_MAX, self.initiator_reads_max.is_some());
        given.set(AttributeSet::RNR_TIMER_CODE, self.rnr_timer_code.is_some());
        given.set(AttributeSet::ACK_TIMER_CODE, self.ack_timer_code.is_some());
        given.set(AttributeSet::RETRIES, self.retries.is_some());
        given.set(AttributeSet::RNR_RETRIES, self.rnr_retries.is_some());
        given
    }

    /// The first value that cannot be, with its name and what can be.
    fn wrong_value(&self, reads_max: u8) -> Option<(&'static str, u32, &'static str)> {
        let narrow = |value: Option<u8>, max: u8| value.filter(|value| *value > max).map(u32::from);
        let wrong = [
            (
                "partition index",
                self.partition_index.filter(|index| *index >= PARTITIONS).map(u32::from),
                "0, the only one",
            ),
            ("port", self.port.filter(|port| *port != PORT).map(u32::from), "1, the only one"),
            ("destination", self.destination.filter(|qp| qp.0 > QP_NUMBER_MAX).map(|qp| qp.0), "a number of 24 bits"),
            ("responder reads", narrow(self.responder_reads_max, reads_max), "up to what the NIC offers"),
            ("initiator reads", narrow(self.initiator_reads_max, reads_max), "up to what the NIC offers"),
            ("RNR timer code", narrow(self.rnr_timer_code, TIMER_CODE_MAX), "0 to 31"),
            ("ACK timer code", narrow(self.ack_timer_code, TIMER_CODE_MAX), "0 to 31"),
            ("retries", narrow(self.retries, RETRIES_MAX), "0 to 7"),
            ("RNR retries", narrow(self.rnr_retries, RETRIES_MAX), "0 to 7"),
        ];
        wrong.into_iter().find_map(|(name, value, remedy)| value.map(|value| (name, value, remedy)))
    }
}

/// A transition that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum TransitionError {
    /// No such arrow in the figure.
    #[error("queue pair {qp}: no way from {from:?} to {to:?} for {service:?}; go through reset, init, RTR and RTS")]
    NoWay {
        /// Its number.
        qp: u32,
        /// Its service.
        service: Service,
        /// Where it is.
        from: QpState,
        /// Where it was to go.
        to: QpState,
    },
    /// Something must be given.
    #[error("queue pair {qp}: from {from:?} to {to:?} without {missing}; give it")]
    Missing {
        /// Its number.
        qp: u32,
        /// Where it is.
        from: QpState,
        /// Where it was to go.
        to: QpState,
        /// What is missing.
        missing: Attributes,
    },
    /// Something cannot be set here.
    #[error("queue pair {qp}: {unwanted} cannot be set from {from:?} to {to:?}; leave it out")]
    Unwanted {
        /// Its number.
        qp: u32,
        /// Where it is.
        from: QpState,
        /// Where it was to go.
        to: QpState,
        /// What is too much.
        unwanted: Attributes,
    },
    /// A value that cannot be.
    #[error("queue pair {qp}: {attribute} cannot be {value}; choose {remedy}")]
    Value {
        /// Its number.
        qp: u32,
        /// Of which attribute.
        attribute: &'static str,
        /// What was given.
        value: u32,
        /// What can be.
        remedy: &'static str,
    },
}

/// Attributes by name, for an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes(pub AttributeSet);

impl std::fmt::Display for Attributes {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut separator = "";
        for (name, _) in self.0.iter_names() {
            write!(formatter, "{separator}{}", name.to_ascii_lowercase())?;
            separator = ", ";
        }
        Ok(())
    }
}

/// What a transition takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rule {
    required: AttributeSet,
    optional: AttributeSet,
}

impl Rule {
    const NOTHING: Self = Self { required: AttributeSet::empty(), optional: AttributeSet::empty() };

    const fn optional(optional: AttributeSet) -> Self {
        Self { required: AttributeSet::empty(), optional }
    }
}

/// Checks that a queue pair may go from one state to another with these attributes. `reads_max`: how many READs and
/// atomics at a time this NIC offers.
///
/// # Errors
/// When it may not.
pub fn check_transition(
    qp: QpNumber,
    service: Service,
    from: QpState,
    to: QpState,
    attributes: &QpAttributes,
    reads_max: u8,
) -> Result<(), TransitionError> {
    let qp = qp.0;
    let rule = rule(service, from, to).ok_or(TransitionError::NoWay { qp, service, from, to })?;
    let given = attributes.given();
    let missing = Attributes(rule.required - given);
    if !missing.0.is_empty() {
        return Err(TransitionError::Missing { qp, from, to, missing });
    }
    let unwanted = Attributes(given - rule.required - rule.optional);
    if !unwanted.0.is_empty() {
        return Err(TransitionError::Unwanted { qp, from, to, unwanted });
    }
    match attributes.wrong_value(reads_max) {
        Some((attribute, value, remedy)) => Err(TransitionError::Value { qp, attribute, value, remedy }),
        None => Ok(()),
    }
}

/// What takes a queue pair from one state to another; nothing where there is no way.
fn rule(service: Service, from: QpState, to: QpState) -> Option<Rule> {
    use QpState::{Error, Init, ReadyToReceive, ReadyToSend, Reset, SendQueueDrain, SendQueueError};
    match (from, to) {
        (_, Reset) => Some(Rule::NOTHING),
        (Reset, Init) => Some(Rule { required: init_attributes(service), optional: AttributeSet::empty() }),
        (Reset, _) => None,
        (_, Error) => Some(Rule::NOTHING),
        (Init, Init) => Some(Rule::optional(init_attributes(service))),
        (Init, ReadyToReceive) => Some(init_to_receive(service)),
        (ReadyToReceive, ReadyToSend) => Some(receive_to_send(service)),
        (ReadyToSend | SendQueueDrain, ReadyToSend) => Some(Rule::optional(while_sending(service))),
        (SendQueueError, ReadyToSend) if service != Service::Rc => Some(Rule::optional(match service {
            Service::Ud => AttributeSet::QUEUE_KEY,
            Service::Uc | Service::Rc => AttributeSet::ACCESS,
        })),
        (ReadyToSend, SendQueueDrain) => Some(Rule::NOTHING),
        (SendQueueDrain, SendQueueDrain) => Some(Rule::optional(while_drained(service))),
        _ => None,
    }
}

fn init_attributes(service: Service) -> AttributeSet {
    let own = if service == Service::Ud { AttributeSet::QUEUE_KEY } else { AttributeSet::ACCESS };
    AttributeSet::PARTITION_INDEX | AttributeSet::PORT | own
}

fn init_to_receive(service: Service) -> Rule {
    let connected = AttributeSet::PATH | AttributeSet::MTU | AttributeSet::DESTINATION | AttributeSet::RECEIVE_PSN;
    let required = match service {
        Service::Ud => AttributeSet::empty(),
        Service::Uc => connected,
        Service::Rc => connected | AttributeSet::RESPONDER_READS_MAX | AttributeSet::RNR_TIMER_CODE,
    };
    let optional = match service {
        Service::Ud => AttributeSet::PARTITION_INDEX | AttributeSet::QUEUE_KEY,
        Service::Uc | Service::Rc => AttributeSet::PARTITION_INDEX | AttributeSet::ACCESS,
    };
    Rule { required, optional }
}

fn receive_to_send(service: Service) -> Rule {
    let required = match service {
        Service::Ud | Service::Uc => AttributeSet::SEND_PSN,
        Service::Rc => AttributeSet::SEND_PSN | reliable_sending(),
    };
    Rule { required, optional: while_sending(service) }
}

fn reliable_sending() -> AttributeSet {
    AttributeSet::ACK_TIMER_CODE | AttributeSet::RETRIES | AttributeSet::RNR_RETRIES | AttributeSet::INITIATOR_READS_MAX
}

fn while_sending(service: Service) -> AttributeSet {
    match service {
        Service::Ud => AttributeSet::QUEUE_KEY,
        Service::Uc => AttributeSet::ACCESS,
        Service::Rc => AttributeSet::ACCESS | AttributeSet::RNR_TIMER_CODE,
    }
}

fn while_drained(service: Service) -> AttributeSet {
    let connected = AttributeSet::PATH | AttributeSet::ACCESS | AttributeSet::PARTITION_INDEX;
    match service {
        Service::Ud => AttributeSet::PARTITION_INDEX | AttributeSet::QUEUE_KEY,
        Service::Uc => connected,
        Service::Rc => {
            connected
                | reliable_sending()
                | AttributeSet::PORT
                | AttributeSet::RESPONDER_READS_MAX
                | AttributeSet::RNR_TIMER_CODE
        }
    }
}

#[cfg(test)]
mod tests;
