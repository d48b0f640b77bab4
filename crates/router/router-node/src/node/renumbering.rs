//! Translates port numbers in reports that the forwarding thread sent before it renumbered its ports.

use std::collections::VecDeque;

use router::PortId;

/// Renumberings that the thread has not confirmed, oldest first: for each new number, the former one; `None` for a new
/// port.
#[derive(Debug, Default)]
pub(super) struct PortRenumbering(VecDeque<Vec<Option<PortId>>>);

impl PortRenumbering {
    /// Adds a renumbering that was sent to the thread.
    pub fn push(&mut self, stays: Vec<Option<PortId>>) {
        self.0.push_back(stays);
    }

    /// Removes the oldest renumbering, which the thread has confirmed: later reports use the new numbers.
    pub fn acknowledge(&mut self) {
        self.0.pop_front();
    }

    /// Returns the current number of a port in a report; `None` if the port was removed.
    pub fn current(&self, port: PortId) -> Option<PortId> {
        self.0.iter().try_fold(port, |port, stays| {
            let index = stays.iter().position(|former| *former == Some(port))?;
            Some(PortId(index as u8))
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
    fn a_port_is_translated_through_all_unconfirmed_renumberings() {
        let mut renumbering = PortRenumbering::default();
        assert_eq!(now(&renumbering, 2), [Some(0), Some(1)]);
        // The first port is removed, and a new one is inserted before the second.
        renumbering.push(vec![None, Some(PortId(1)), Some(PortId(2))]);
        renumbering.push(vec![Some(PortId(2)), Some(PortId(1))]);
        assert_eq!(now(&renumbering, 3), [None, Some(1), Some(0)]);
        renumbering.acknowledge();
        assert_eq!(now(&renumbering, 3), [None, Some(1), Some(0)], "of the second alone: port 0 is not in it");
        renumbering.acknowledge();
        assert_eq!(now(&renumbering, 3), [Some(0), Some(1), Some(2)]);
    }
}
