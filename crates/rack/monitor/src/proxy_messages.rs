//! Messages of the proxy.

use control::proxy::FromProxy;
use fabric::Epoch;
use tracing::{info, warn};

use crate::node_state::NodeState;

impl NodeState {
    /// Handles all messages that the proxy has sent.
    pub(crate) fn receive_from_proxy(&mut self, now_ns: u64) {
        loop {
            match self.proxy.receive() {
                Ok(Some(message)) => self.handle_proxy_message(message, now_ns),
                Ok(None) => return,
                Err(reason) => return self.end_proxy(&reason, now_ns),
            }
        }
    }

    fn handle_proxy_message(&mut self, message: FromProxy, now_ns: u64) {
        let actions = match message {
            FromProxy::Ready { .. } => return info!("the proxy is ready"),
            FromProxy::Report(_) => {
                return self.status_waiters.iter_mut().for_each(|(_, deadline_ns)| *deadline_ns = now_ns);
            }
            FromProxy::Stopped { peer, epoch } => return self.neighbours.stopped(peer.into(), Epoch(epoch)),
            FromProxy::Broken { peer, epoch, what } => {
                return self.reset_link(peer.into(), Epoch(epoch), &what, now_ns);
            }
            FromProxy::Listening { address } => self.listener_queries.listening(address),
            FromProxy::ListenFailed { address, reason } => {
                warn!(%address, "the proxy cannot listen at an address of another node: {reason}");
                self.listener_queries.listen_failed(address)
            }
            FromProxy::Refused { address } => self.listener_queries.refused(address),
            // Handled when the message was received. The state of links is polled in each iteration.
            FromProxy::Deposit(_)
            | FromProxy::Deposits(_)
            | FromProxy::Withdraw { .. }
            | FromProxy::PeerLeft { .. } => return,
        };
        self.execute(actions);
    }
}
