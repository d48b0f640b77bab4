//! Connects to a listener of this node or of another one.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use stats_page::FallbackReason;

use super::address::{Opener, destination};
use super::directory::{Rack, netns_cookie};
use super::local::*;
use super::remote::ConnectProgress;
use super::{monitor, reasons, remote};
use crate::descriptor::hidden::close;
use crate::process::limit;

/// Connects to a lane listener in the rack of the calling thread. `bound` is the address that `getsockname` returns for
/// the program's TCP socket, `shares` says whether the socket shares it with others, and `netns` is the cookie of the
/// network namespace that the socket was created in.
///
/// # Errors
/// Those of [`connect_in`], and `RackUnavailable`; `NamespaceDiffers` if the calling thread is in another namespace
/// than the socket.
pub fn connect(
    to: SocketAddr,
    bound: Option<SocketAddr>,
    shares: bool,
    netns: u64,
) -> Result<ConnectProgress, FallbackReason> {
    let node = crate::process::settings::settings().node;
    let opener = if shares { Opener::SharingProgram } else { Opener::Program };
    let request = ConnectRequest { destination: to, source: bound, node, opener };
    connect_now(&request, netns).map_err(|no_lane| no_lane.reason)
}

/// Returns whether no listener can match a destination in the rack that this process keeps open for the network
/// namespace of a socket, so that [`connect`] would find none. Most programs connect to servers without lanes, and this
/// takes a few system calls. False if it is not known: a rack that is not open yet, or a node of several.
pub fn is_without_listener(to: SocketAddr, netns: u64) -> bool {
    crate::process::settings::settings().node.is_none() && Rack::is_known_to_be_without(destination(to), netns)
}

/// Opens the rack, once a process, so that [`is_without_listener`] knows of later connects to other machines.
fn keep_rack_open(netns: u64) {
    static IS_TRIED: AtomicBool = AtomicBool::new(false);
    if !IS_TRIED.swap(true, Ordering::Relaxed)
        && let Ok(socket) = unix_stream()
    {
        if netns_cookie(socket.as_fd()) == netns {
            let _ = Rack::current_for(socket.as_fd());
        }
        close(socket);
    }
}

fn connect_now(request: &ConnectRequest, netns: u64) -> Result<ConnectProgress, NoLane> {
    // The route is determined before the rack is opened, because a connection to another machine does not need it.
    let route = request.route();
    let may_be_remote = request.may_be_remote(&route);
    if let (Err(no_lane), false) = (route, may_be_remote) {
        keep_rack_open(netns);
        return Err(no_lane);
    }
    let lifeline = new_lifeline()?;
    if netns_cookie(lifeline.as_fd()) != netns {
        return Err(NoLane::new(FallbackReason::NamespaceDiffers));
    }
    let unavailable = |errno| NoLane::with_errno(reasons::of_rack_error(errno), errno);
    let rack = Rack::current_for(lifeline.as_fd()).map_err(unavailable)?;
    if may_be_remote && monitor::has_monitor(&rack) {
        return remote::connect(rack, request, lifeline);
    }
    let route = route?;
    if crate::process::settings::settings().honours_filters {
        return Err(NoLane::new(FallbackReason::PacketFilters));
    }
    if limit::is_address_space_limited() {
        return Err(NoLane::new(FallbackReason::AddressSpaceLimited));
    }
    let (lifeline, tuple) = match connect_lifeline(&rack, route, lifeline, request.opener, || Ok(())) {
        Err(NoLane { errno: Some(Errno::ADDRINUSE), .. }) if route.port != 0 => return Ok(ConnectProgress::TupleInUse),
        connected => connected?,
    };
    check_trusted(lifeline.as_fd())?;
    Ok(ConnectProgress::LifelineConnected { lifeline, tuple })
}
