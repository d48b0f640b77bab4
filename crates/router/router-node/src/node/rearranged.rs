//! Numbers of ports that come from a thread which has not heard yet that ports were rearranged.

use std::collections::VecDeque;

use router::PortId;

/// Rearrangements that the thread has been told of and has not answered, the oldest first: what number each port had
/// before, if it is no new one.
#[derive(Debug, Default)]
pub(super) struct Rearranged(VecDeque<Vec<Option<PortId>>>);

impl Rearranged {
    /// The thread is told of one.
    pub fn tell(&mut self, stays: Vec<Option<PortId>>) {
        self.0.push_back(stays);
    }

    /// The thread has answered the oldest: what it says from now on comes after it.
    pub fn heard(&mut self) {
        self.0.pop_front();
    }

    /// The number that the port has now of which the thread speaks; `None` of one that is no port any more.
    pub fn now(&self, port: PortId) -> Option<PortId> {
        self.0.iter().try_fold(port, |port, stays| {
            let place = stays.iter().position(|former| *former == Some(port))?;
            Some(PortId(place as u8))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now(rearranged: &Rearranged, ports: u8) -> Vec<Option<u8>> {
        (0..ports).map(|port| rearranged.now(PortId(port)).map(|port| port.0)).collect()
    }

    #[test]
    fn a_port_is_followed_through_all_rearrangements_that_were_not_answered() {
        let mut rearranged = Rearranged::default();
        assert_eq!(now(&rearranged, 2), [Some(0), Some(1)]);
        // The first port goes, and a new one comes before the second.
        rearranged.tell(vec![None, Some(PortId(1)), Some(PortId(2))]);
        rearranged.tell(vec![Some(PortId(2)), Some(PortId(1))]);
        assert_eq!(now(&rearranged, 3), [None, Some(1), Some(0)]);
        rearranged.heard();
        assert_eq!(now(&rearranged, 3), [None, Some(1), Some(0)], "of the second alone: port 0 is not in it");
        rearranged.heard();
        assert_eq!(now(&rearranged, 3), [Some(0), Some(1), Some(2)]);
    }
}
