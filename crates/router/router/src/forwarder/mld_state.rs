//! The state of a port's MLD listener, without I/O.

use std::net::Ipv6Addr;
use std::time::Duration;

use packet::ndisc;

use super::claim::{self, Claim};
use crate::Time;

/// Unsolicited Report Interval (RFC 3810, section 9.11).
pub(super) const UNSOLICITED_REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Robustness Variable (RFC 3810, section 9.1): the number of reports of a change of state.
pub(super) const ROBUSTNESS: u32 = 2;
/// Interval of unsolicited reports: half of the Query Interval (RFC 3810, section 9.2), so that one may be lost.
pub(super) const REPORT_INTERVAL: Duration = Duration::from_secs(60);
/// Older Version Querier Present Timeout (RFC 3810, section 9.12) for the default values.
pub(super) const OLDER_VERSION_QUERIER_TIMEOUT: Duration = Duration::from_secs(260);

/// The MLD listener of a port.
#[derive(Clone, Debug, Default)]
pub(super) struct ListenerState {
    /// When the next unsolicited report is due.
    pub(super) due: Option<Time>,
    /// Number of reports of the join sent so far.
    pub(super) joins_sent: u32,
    /// When the response to a general query is due.
    general_response: Option<Time>,
    /// When responses to queries of single groups are due.
    group_responses: Vec<(Ipv6Addr, Time)>,
    /// Until when a querier of version 1 is assumed to be present.
    pub(super) v1_until: Option<Time>,
}

impl ListenerState {
    /// Returns the listener for these addresses, based on the former one.
    pub(super) fn for_port(mut former: ListenerState, claims: &[Claim]) -> ListenerState {
        let groups = groups(claims);
        if groups.is_empty() {
            return ListenerState::default();
        }
        former.group_responses.retain(|(group, _)| groups.contains(group));
        match claim::first_probe_due(claims) {
            Some(first_due) => ListenerState { due: Some(first_due), joins_sent: 0, ..former },
            None => former,
        }
    }

    /// Returns when the next report is due.
    pub(super) fn due(&self) -> Option<Time> {
        let group_responses = self.group_responses.iter().map(|(_, due)| *due);
        self.due.into_iter().chain(self.general_response).chain(group_responses).min()
    }

    /// Schedules the response to a query, unless an earlier one is scheduled that covers it (RFC 3810, section 6.2).
    pub(super) fn schedule_response(&mut self, group: Option<Ipv6Addr>, at: Time) {
        if self.general_response.is_some_and(|answer| answer <= at) {
            return;
        }
        let Some(group) = group else {
            self.general_response = Some(at);
            return;
        };
        match self.group_responses.iter_mut().find(|(scheduled, _)| *scheduled == group) {
            Some((_, due)) => *due = at.min(*due),
            None => self.group_responses.push((group, at)),
        }
    }

    /// Removes and returns the groups whose responses are due; `all` are the groups of a general response.
    pub(super) fn take_due_groups(&mut self, now: Time, all: Vec<Ipv6Addr>) -> Vec<Ipv6Addr> {
        if self.general_response.take_if(|due| *due <= now).is_some() {
            // The general response covers single groups.
            self.group_responses.clear();
            return all;
        }
        let due = self.group_responses.extract_if(.., |(_, due)| *due <= now);
        due.map(|(group, _)| group).collect()
    }
}

/// Returns the solicited-node groups of these addresses.
pub(super) fn groups(claims: &[Claim]) -> Vec<Ipv6Addr> {
    let mut groups: Vec<Ipv6Addr> = claim::listened_v6(claims).map(ndisc::solicited_node).collect();
    groups.sort_unstable();
    groups.dedup();
    groups
}
