//! The state of a port's MLD listener, without I/O.

use std::net::Ipv6Addr;
use std::time::Duration;

use packet::ndisc;

use super::claim::{self, Claim};
use crate::Time;

/// Unsolicited Report Interval of RFC 3810, section 9.11.
pub(super) const UNSOLICITED_REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Robustness Variable of RFC 3810, section 9.1: so often a report that says *joins* goes out.
pub(super) const ROBUSTNESS: u32 = 2;
/// Half of the Query Interval of RFC 3810, section 9.2: a report may be lost.
pub(super) const REPORT_INTERVAL: Duration = Duration::from_secs(60);
/// Older Version Querier Present Timeout of RFC 3810, section 9.12, of its own default values.
pub(super) const OLDER_VERSION_QUERIER_TIMEOUT: Duration = Duration::from_secs(260);

/// Where a port's reports stand.
#[derive(Clone, Debug, Default)]
pub(super) struct ListenerState {
    /// When the next one is due that nobody asks for.
    pub(super) due: Option<Time>,
    /// How often it was said that these groups are joined.
    pub(super) joins_sent: u32,
    /// When the answer to who asked of all groups is due.
    general_response: Option<Time>,
    /// The same of single groups, which are the port's own.
    group_responses: Vec<(Ipv6Addr, Time)>,
    /// Until then a router of version 1 may listen.
    pub(super) v1_until: Option<Time>,
}

impl ListenerState {
    /// Of a port that is told of these addresses.
    pub(super) fn for_port(mut former: ListenerState, claims: &[Claim]) -> ListenerState {
        let groups = groups(claims);
        if groups.is_empty() {
            return ListenerState::default();
        }
        former.group_responses.retain(|(group, _)| groups.contains(group));
        match claim::first_probe_due(claims) {
            Some(begins) => ListenerState { due: Some(begins), joins_sent: 0, ..former },
            None => former,
        }
    }

    /// When something is to be said next.
    pub(super) fn due(&self) -> Option<Time> {
        let answers = self.group_responses.iter().map(|(_, due)| *due);
        self.due.into_iter().chain(self.general_response).chain(answers).min()
    }

    /// Notes what was asked, to be answered at that moment, or sooner where that was promised before.
    pub(super) fn schedule_response(&mut self, group: Option<Ipv6Addr>, at: Time) {
        if self.general_response.is_some_and(|answer| answer <= at) {
            return;
        }
        let Some(group) = group else {
            self.general_response = Some(at);
            return;
        };
        match self.group_responses.iter_mut().find(|(asked, _)| *asked == group) {
            Some((_, due)) => *due = at.min(*due),
            None => self.group_responses.push((group, at)),
        }
    }

    /// What is to be answered by now.
    pub(super) fn take_due_groups(&mut self, now: Time, all: Vec<Ipv6Addr>) -> Vec<Ipv6Addr> {
        if self.general_response.take_if(|due| *due <= now).is_some() {
            // It says what single answers would.
            self.group_responses.clear();
            return all;
        }
        let due = self.group_responses.extract_if(.., |(_, due)| *due <= now);
        due.map(|(group, _)| group).collect()
    }
}

/// The groups by which neighbours ask for these addresses.
pub(super) fn groups(claims: &[Claim]) -> Vec<Ipv6Addr> {
    let mut groups: Vec<Ipv6Addr> = claim::listened_v6(claims).map(ndisc::solicited_node).collect();
    groups.sort_unstable();
    groups.dedup();
    groups
}
