//! What a monitor and its proxy say to each other, over a socket that the proxy is born with as its standard input.
//!
//! ```text
//!   monitor                               proxy
//!   Setup, Device           ───────►
//!                           ◄───────      Ready
//!   LinkUp (peer, epoch)    ───────►      begins fresh lanes in the partitions of that link
//!   Mirror (address)        ───────►      listens for another node's server
//!                           ◄───────      Mirrored
//!                           ◄───────      Fault: the peer spoils the link; it is not used any more
//!   LinkDown (peer)         ───────►      resets that link's connections
//!                           ◄───────      Stopped: nothing is stored in that window any more; train again
//! ```
//!
//! Both ends are of one build: a message that is not understood is the end.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

use crate::{Class, Counters};

/// Descriptors that one packet brings.
const FDS_PER_PACKET: usize = 128;
/// Descriptors of a message.
const FDS_MAX: usize = 4096;
/// Bytes of a packet.
const PACKET_BYTES_MAX: usize = 128 << 10;

/// One data partition of every window of the rack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    /// What it is for.
    pub class: Class,
    /// The core of the thread that owns it.
    pub core: Option<u16>,
}

/// Another node of the rack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// Its slot in the device.
    pub slot: u8,
    /// Its address: connections that come from there have it.
    pub address: IpAddr,
    /// Ports of this node that its programs may connect to, as ranges with both ends.
    pub ports: Vec<(u16, u16)>,
}

/// What a proxy must know before anything else.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// The rack directory of this node's programs.
    pub rack_dir: PathBuf,
    /// This node's slot in the device.
    pub slot: u8,
    /// This node's address.
    pub address: IpAddr,
    /// The other nodes.
    pub peers: Vec<Peer>,
    /// Bytes at the start of each window that are the monitors'.
    pub control_bytes: usize,
    /// The partitions that follow, of equal size. The nth bulk partition belongs to the nth latency partition: a
    /// connection moves between those two.
    pub partitions: Vec<Partition>,
    /// Bytes that a connection sends before it is another's turn; `None` for the default.
    pub slice_bytes: Option<usize>,
}

/// From the monitor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToProxy {
    /// First of all, and once.
    Setup(Setup),
    /// The device, as `Device::hand_over` gives it; the descriptors come with it. Again when there are other bells.
    Device {
        /// What `hand_over` says of it.
        text: Vec<u8>,
    },
    /// The link is up.
    LinkUp {
        /// The peer's slot.
        peer: u8,
        /// The epoch in which it is up.
        epoch: u32,
        /// The secret of all lanes of this link in this epoch: the same at both ends, and not zero.
        secret: u64,
    },
    /// The link is not up any more, or is not to be used.
    LinkDown {
        /// The peer's slot.
        peer: u8,
    },
    /// Stand in for a listener of another node.
    Mirror {
        /// The peer's slot.
        peer: u8,
        /// Where it listens.
        address: SocketAddr,
    },
    /// Do so no more.
    Withdraw {
        /// Where it listened.
        address: SocketAddr,
    },
    /// Say what has happened so far.
    Count,
}

/// From the proxy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromProxy {
    /// The device is mapped, and the threads run.
    Ready,
    /// The answer to `Mirror`.
    Mirrored {
        /// Which.
        address: SocketAddr,
        /// Why not, if not.
        error: Option<String>,
    },
    /// The other node has nobody at that address: the proxy has stopped standing in for it.
    Withdrawn {
        /// The peer's slot.
        peer: u8,
        /// Which address.
        address: SocketAddr,
    },
    /// The answer to `LinkDown`.
    Stopped {
        /// The peer's slot.
        peer: u8,
    },
    /// The peer has spoiled the link: it is out of use, as after `LinkDown`. `Stopped` does not follow.
    Fault {
        /// The peer's slot.
        peer: u8,
        /// The epoch that it was in.
        epoch: u32,
        /// What was wrong.
        reason: String,
    },
    /// The peer broke the protocol for one connection, which was reset.
    Offence {
        /// The peer's slot.
        peer: u8,
        /// What was wrong.
        what: String,
    },
    /// The answer to `Count`: all links together, since the start.
    Counted {
        /// Connections that are open.
        connections: usize,
        /// What has happened.
        counters: Counters,
    },
}

/// A packet as it is sent.
#[derive(Serialize, Deserialize)]
struct Envelope<M> {
    descriptors: usize,
    message: M,
}

/// One end of the socket between a monitor and its proxy.
#[derive(Debug)]
pub struct Channel(OwnedFd);

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for Channel {
    fn from(socket: OwnedFd) -> Self {
        Self(socket)
    }
}

impl From<Channel> for OwnedFd {
    fn from(channel: Channel) -> Self {
        channel.0
    }
}

impl Channel {
    /// Both ends of a new one; the second is for the proxy.
    ///
    /// # Errors
    /// What socketpair answers.
    pub fn pair() -> Result<(Self, Self), Errno> {
        let flags = SocketFlags::CLOEXEC;
        let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Self(a), Self(b)))
    }

    /// Sends a message, and descriptors with it.
    ///
    /// # Errors
    /// What sendmsg answers; `MSGSIZE` for a message that no packet holds.
    pub fn send<M: Serialize>(&self, message: &M, descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let envelope = Envelope { descriptors: descriptors.len(), message };
        let bytes = serde_json::to_vec(&envelope).map_err(|_| Errno::INVAL)?;
        if bytes.len() > PACKET_BYTES_MAX || descriptors.len() > FDS_MAX {
            return Err(Errno::MSGSIZE);
        }
        let (first, rest) = descriptors.split_at(descriptors.len().min(FDS_PER_PACKET));
        self.send_packet(&bytes, first)?;
        rest.chunks(FDS_PER_PACKET).try_for_each(|more| self.send_packet(b"+", more))
    }

    fn send_packet(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_PER_PACKET))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(Errno::MSGSIZE);
        }
        loop {
            match rustix::net::sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                sent => return sent.map(|_| ()),
            }
        }
    }

    /// Waits for a message; `None` once the other end is gone.
    ///
    /// # Errors
    /// What recvmsg answers; `PROTO` for what is no message.
    pub fn receive<M: DeserializeOwned>(&self) -> Result<Option<(M, Vec<OwnedFd>)>, Errno> {
        let mut bytes = vec![0; PACKET_BYTES_MAX];
        let mut descriptors = Vec::new();
        let length = self.receive_packet(&mut bytes, &mut descriptors)?;
        if length == 0 {
            return Ok(None);
        }
        let envelope: Envelope<M> = serde_json::from_slice(&bytes[..length]).map_err(|_| Errno::PROTO)?;
        while descriptors.len() < envelope.descriptors.min(FDS_MAX) {
            let before = descriptors.len();
            self.receive_packet(&mut bytes, &mut descriptors)?;
            if descriptors.len() == before {
                return Err(Errno::PROTO);
            }
        }
        Ok(Some((envelope.message, descriptors)))
    }

    fn receive_packet(&self, bytes: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<usize, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_PER_PACKET))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            match rustix::net::recvmsg(&self.0, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(0),
                received => break received?,
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(Errno::PROTO);
        }
        Ok(received.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_and_many_descriptors_survive_the_way() {
        let (monitor, proxy) = Channel::pair().unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let message = ToProxy::Device { text: vec![7; 20_000] };
        let sender = std::thread::spawn(move || {
            monitor.send(&message, &vec![writer.as_fd(); 300]).unwrap();
            monitor.send(&ToProxy::Count, &[]).unwrap();
        });
        let (message, descriptors) = proxy.receive::<ToProxy>().unwrap().expect("a message");
        assert_eq!((message, descriptors.len()), (ToProxy::Device { text: vec![7; 20_000] }, 300));
        rustix::io::write(&descriptors[299], b"x").unwrap();
        assert_eq!(rustix::io::read(&reader, &mut [0; 2]), Ok(1));
        assert_eq!(proxy.receive::<ToProxy>().unwrap().map(|(message, _)| message), Some(ToProxy::Count));
        sender.join().unwrap();
        assert!(proxy.receive::<ToProxy>().unwrap().is_none(), "the monitor is gone");
    }

    #[test]
    fn what_is_no_message_is_an_error() {
        let (monitor, proxy) = Channel::pair().unwrap();
        rustix::net::send(&monitor, b"{\"descriptors\":0,\"message\":\"Dance\"}", SendFlags::empty()).unwrap();
        assert_eq!(proxy.receive::<ToProxy>().unwrap_err(), Errno::PROTO);
    }
}
