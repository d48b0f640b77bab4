//! State transitions of a queue pair, and the attributes that each requires and allows.
//!
//! Source: IBA 11.2.5.2, table 96, as implemented by Linux' `ib_modify_qp_is_ok`, without alternate paths, which this
//! NIC does not have. A queue pair enters only the states `SendQueueError` and `Error` by itself.

use bitflags::bitflags;
use thiserror::Error;

use super::access::AccessFlags;
use super::address::NicAddress;
use super::state::QpState;
use crate::wire::{Psn, QpNumber, Service};

/// The path MTU: maximum payload of a packet.
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
    /// All MTUs.
    pub const ALL: [Self; 5] = [Self::B256, Self::B512, Self::B1024, Self::B2048, Self::B4096];

    /// Returns the MTU in bytes.
    pub const fn bytes(self) -> u32 {
        256 << self as u32
    }
}

/// Maximum of the 5-bit codes of the ACK and RNR timers.
const TIMER_CODE_MAX: u8 = 31;
/// Maximum of the 3-bit retry counts; 7 RNR retries mean infinitely many.
const RETRIES_MAX: u8 = 7;
/// Number of partitions: only the default one, with full membership.
const PARTITIONS: u16 = 1;
/// The only port of this NIC.
const PORT: u8 = 1;
const QP_NUMBER_MAX: u32 = (1 << 24) - 1;

bitflags! {
    /// The set of fields of [`QpAttributes`] (`ibv_qp_attr_mask`).
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

/// Attributes that a transition sets, or the current attributes (`ibv_qp_attr`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpAttributes {
    /// Partition index: 0, the only one.
    pub partition_index: Option<u16>,
    /// Port: 1, the only one.
    pub port: Option<u8>,
    /// Remote access rights that the peer has through this queue pair; other rights are ignored.
    pub access: Option<AccessFlags>,
    /// For datagrams: the queue key (Q_Key) that they must carry.
    pub queue_key: Option<u32>,
    /// The address of the peer.
    pub path: Option<NicAddress>,
    /// The path MTU.
    pub mtu: Option<Mtu>,
    /// The peer's queue pair.
    pub destination: Option<QpNumber>,
    /// The PSN of the first packet to receive.
    pub receive_psn: Option<Psn>,
    /// The PSN of the first packet to send.
    pub send_psn: Option<Psn>,
    /// Maximum number of outstanding READs and atomics from the peer (`max_dest_rd_atomic`).
    pub responder_reads_max: Option<u8>,
    /// Maximum number of outstanding READs and atomics to the peer (`max_rd_atomic`).
    pub initiator_reads_max: Option<u8>,
    /// Time that the peer waits after an RNR NAK, as a code of IBA table 46.
    pub rnr_timer_code: Option<u8>,
    /// ACK timeout: 4.096 us x 2^code; 0 disables the timer.
    pub ack_timer_code: Option<u8>,
    /// Number of retries after a timeout: 0 to 7.
    pub retries: Option<u8>,
    /// Number of retries after an RNR NAK: 0 to 6; 7 means infinitely many.
    pub rnr_retries: Option<u8>,
}

impl QpAttributes {
    /// Returns which attributes are set.
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

    /// Overwrites attributes with those that are given.
    pub(crate) fn update(&mut self, given: &Self) {
        self.partition_index = given.partition_index.or(self.partition_index);
        self.port = given.port.or(self.port);
        self.access = given.access.or(self.access);
        self.queue_key = given.queue_key.or(self.queue_key);
        self.path = given.path.or(self.path);
        self.mtu = given.mtu.or(self.mtu);
        self.destination = given.destination.or(self.destination);
        self.receive_psn = given.receive_psn.or(self.receive_psn);
        self.send_psn = given.send_psn.or(self.send_psn);
        self.responder_reads_max = given.responder_reads_max.or(self.responder_reads_max);
        self.initiator_reads_max = given.initiator_reads_max.or(self.initiator_reads_max);
        self.rnr_timer_code = given.rnr_timer_code.or(self.rnr_timer_code);
        self.ack_timer_code = given.ack_timer_code.or(self.ack_timer_code);
        self.retries = given.retries.or(self.retries);
        self.rnr_retries = given.rnr_retries.or(self.rnr_retries);
    }

    /// Returns the first value out of range, with its name and the allowed range.
    fn wrong_value(&self, reads_max: u8) -> Option<(&'static str, u32, &'static str)> {
        let narrow = |value: Option<u8>, max: u8| value.filter(|value| *value > max).map(u32::from);
        let values = [
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
        values.into_iter().find_map(|(name, value, remedy)| value.map(|value| (name, value, remedy)))
    }
}

/// Why a state transition is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum TransitionError {
    /// No such transition exists.
    #[error("queue pair {qp}: no transition from {from:?} to {to:?} for {service:?}; go through Init, RTR and RTS")]
    NotAllowed {
        /// The number of the queue pair.
        qp: u32,
        /// Its transport service.
        service: Service,
        /// Its current state.
        from: QpState,
        /// The requested state.
        to: QpState,
    },
    /// A required attribute is missing.
    #[error("queue pair {qp}: the transition from {from:?} to {to:?} requires {missing}; set it")]
    Missing {
        /// The number of the queue pair.
        qp: u32,
        /// Its current state.
        from: QpState,
        /// The requested state.
        to: QpState,
        /// The missing attributes.
        missing: AttributeSet,
    },
    /// An attribute that this transition does not allow.
    #[error("queue pair {qp}: the transition from {from:?} to {to:?} does not allow {unwanted}; leave it out")]
    Unwanted {
        /// The number of the queue pair.
        qp: u32,
        /// Its current state.
        from: QpState,
        /// The requested state.
        to: QpState,
        /// The attributes that are not allowed.
        unwanted: AttributeSet,
    },
    /// A value out of range.
    #[error("queue pair {qp}: {attribute} cannot be {value}; choose {remedy}")]
    Value {
        /// The number of the queue pair.
        qp: u32,
        /// The name of the attribute.
        attribute: &'static str,
        /// The given value.
        value: u32,
        /// The allowed values.
        remedy: &'static str,
    },
}

impl std::fmt::Display for AttributeSet {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut separator = "";
        for (name, _) in self.iter_names() {
            write!(formatter, "{separator}{}", name.to_ascii_lowercase())?;
            separator = ", ";
        }
        Ok(())
    }
}

/// The attributes that a transition requires and allows.
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

/// Checks that a queue pair may go from one state to another with these attributes. `reads_max` is the maximum number
/// of outstanding READs and atomics that the NIC supports.
///
/// # Errors
/// If the transition is not allowed, an attribute is missing or not allowed, or a value is out of range.
pub fn check_transition(
    qp: QpNumber,
    service: Service,
    from: QpState,
    to: QpState,
    attributes: &QpAttributes,
    reads_max: u8,
) -> Result<(), TransitionError> {
    let qp = qp.0;
    let rule = rule(service, from, to).ok_or(TransitionError::NotAllowed { qp, service, from, to })?;
    let given = attributes.given();
    let missing = rule.required - given;
    if !missing.is_empty() {
        return Err(TransitionError::Missing { qp, from, to, missing });
    }
    let unwanted = given - rule.required - rule.optional;
    if !unwanted.is_empty() {
        return Err(TransitionError::Unwanted { qp, from, to, unwanted });
    }
    match attributes.wrong_value(reads_max) {
        Some((attribute, value, remedy)) => Err(TransitionError::Value { qp, attribute, value, remedy }),
        None => Ok(()),
    }
}

/// Returns the attributes of a transition, or nothing if it does not exist.
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
