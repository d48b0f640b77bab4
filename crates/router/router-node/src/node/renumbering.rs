//! Numbers of ports that come from a thread which has not heard yet that ports were renumbering.

use std::collections::VecDeque;

use router::PortId;

/// Rearrangements that the thread has been told of and has not answered, the oldest first: what number each port had
/// before, if it is no new one.
#[derive(Debug, Default)]
pub(super) struct PortRenumbering(VecDeque<Vec<Option<PortId>>>);

impl PortRenumbering {
    /// The thread is told of one.
    pub fn push(&mut self, stays: Vec<Option<PortId>>) {
        self.0.push_back(stays);
    }

    /// The thread has answered the oldest: what it says from now on comes after it.
    pub fn acknowledge(&mut self) {
        self.0.pop_front();
    }

    /// The number that the port has now of which the thread speaks; `None` of one that is no port any more.
    pub fn current(&self, port: PortId) -> Option<PortId> {
        self.0.iter().try_fold(port, |port, stays| {
            let place = stays.iter().position(|former| *former == Some(port))?;
            Some(PortId(place as u8))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now(renumbering: &PortRenumbering, ports: u8) -> Vec<Option<u8>> {
        (0..ports).map(|port| renumbering.current(PortId(port)).map(|port| port.0)).collect()
    }

    #[test]
    fn a_port_is_followed_through_all_rearrangements_that_were_not_answered() {
        let mut renumbering = PortRenumbering::default();
        assert_eq!(now(&renumbering, 2), [Some(0), Some(1)]);
        // The first port goes, and a new one comes before the second.
        renumbering.push(vec![None, Some(PortId(1)), Some(PortId(2))]);
        renumbering.push(vec![Some(PortId(2)), Some(PortId(1))]);
        assert_eq!(now(&renumbering, 3), [None, Some(1), Some(0)]);
        renumbering.acknowledge();
        assert_eq!(now(&renumbering, 3), [None, Some(1), Some(0)], "of the second alone: port 0 is not in it");
        renumbering.acknowledge();
        assert_eq!(now(&renumbering, 3), [Some(0), Some(1), Some(2)]);
    }
}
