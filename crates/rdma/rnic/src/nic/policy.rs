//! Transport policies: how each recovers lost packets, and where it keeps the contexts of queue pairs.
//!
//! The engine asks for the two properties of a policy, [`TransportPolicy::loss_recovery`] and
//! [`TransportPolicy::context_storage`], never for a policy by name. Constants that differ (timers, sizes of cache and
//! pool) follow from the same properties in [`super::NicProfile::new`].

use serde::{Deserialize, Serialize};

/// The design of a NIC's transport. Files and results call it by its [name](TransportPolicy::name).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TransportPolicy {
    /// Selective repeat without state on chip: hardware accepts packets that arrive in order, software of the host
    /// handles the others; work requests are not cached ("SRNIC", NSDI 2023).
    #[default]
    Srnic,
    /// SRNIC with the contexts in the host's memory and a pool of them on chip. Contexts are fetched before the
    /// scheduler needs them, and while received packets wait for them. A design of this project.
    SrnicPaged,
    /// Selective repeat with bitmaps on chip ("IRN", SIGCOMM 2018).
    Irn,
    /// Standard RoCEv2: packets that arrive out of order are dropped and retransmitted.
    GoBackN,
    /// Go-back-N with the contexts in the host's memory and a cache of them on chip.
    ConnectionCache,
}

/// How a policy recovers lost packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LossRecovery {
    /// The receiver drops packets that arrive out of order; the sender goes back to the first missing one.
    GoBackN,
    /// Selective repeat with bitmaps in the NIC.
    SelectiveOnChip,
    /// Selective repeat whose bitmaps the host's software keeps: the slow path.
    SelectiveInSoftware,
}

/// Where a policy keeps the contexts of queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContextStorage {
    /// All contexts are on chip.
    OnChip,
    /// All contexts are in the host's memory; a cache with random replacement is on chip.
    Cache,
    /// All contexts are in the host's memory; a pool that the scheduler prefetches into is on chip.
    Pool,
}

impl TransportPolicy {
    /// All policies.
    pub const ALL: [Self; 5] = [Self::Srnic, Self::Irn, Self::GoBackN, Self::ConnectionCache, Self::SrnicPaged];

    /// Returns the name of the policy on command lines and in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Srnic => "srnic",
            Self::SrnicPaged => "srnic-paged",
            Self::Irn => "irn",
            Self::GoBackN => "go-back-n",
            Self::ConnectionCache => "connection-cache",
        }
    }

    /// Returns a description of the policy for help texts.
    pub const fn description(self) -> &'static str {
        match self {
            Self::Srnic => "Selective repeat whose state is in the host's memory",
            Self::SrnicPaged => "SRNIC with contexts in the host's memory and a pool of them on chip",
            Self::Irn => "Selective repeat with bitmaps on chip",
            Self::GoBackN => "Standard RoCEv2 with all contexts on chip",
            Self::ConnectionCache => "Standard RoCEv2, with contexts in the host's memory and a cache of them on chip",
        }
    }

    /// Returns how the policy recovers lost packets.
    pub const fn loss_recovery(self) -> LossRecovery {
        match self {
            Self::Srnic | Self::SrnicPaged => LossRecovery::SelectiveInSoftware,
            Self::Irn => LossRecovery::SelectiveOnChip,
            Self::GoBackN | Self::ConnectionCache => LossRecovery::GoBackN,
        }
    }

    /// Returns where the policy keeps contexts.
    pub const fn context_storage(self) -> ContextStorage {
        match self {
            Self::Srnic | Self::Irn | Self::GoBackN => ContextStorage::OnChip,
            Self::SrnicPaged => ContextStorage::Pool,
            Self::ConnectionCache => ContextStorage::Cache,
        }
    }

    /// Returns whether the receiver keeps packets that arrive out of order and only lost ones are retransmitted.
    pub const fn is_selective(self) -> bool {
        !matches!(self.loss_recovery(), LossRecovery::GoBackN)
    }

    /// Returns whether the host's software handles packets that arrive out of order.
    pub const fn has_slow_path(self) -> bool {
        matches!(self.loss_recovery(), LossRecovery::SelectiveInSoftware)
    }
}
