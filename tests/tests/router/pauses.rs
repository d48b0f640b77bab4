//! Pauses of the whole machine, as when a virtual machine is migrated or a laptop sleeps.

use std::thread::sleep;
use std::time::Duration;

use rustix::process::Signal;
use system_tests::process::signal;
use system_tests::wait_until;

use super::cluster::{Lab, PLAIN};

/// Several times the hold time of the cluster.
const PAUSE: Duration = Duration::from_secs(1);

/// All processes of a cluster stop and run again, as in a pause of their machine, so each finds its peer silent for
/// longer than the hold time, by the clock.
#[test]
fn a_pause_of_the_machine_costs_no_session() {
    let Some(lab) = Lab::new("a_pause_of_the_machine_costs_no_session", &["a", "b", "h1", "h2"]) else { return };
    lab.join(("a", "eth0"), ("h1", "eth0"), 1);
    lab.join(("b", "eth0"), ("h2", "eth0"), 2);
    lab.write(&PLAIN.replacen(
        "\n[[nodes]]",
        "\n[timeouts]\nbeat_ns = \"50 ms\"\nsilence_ns = \"200 ms\"\n\n[[nodes]]",
        1,
    ));
    lab.up();
    wait_until("the way to the other host", || lab.ping("h1", "10.77.2.2").status.success());
    let logs = || ["a", "b"].map(|node| lab.log(node)).concat();
    let pids = [0, 1].map(|node| lab.node(node)["pid"].as_u64().expect("up"));
    for _ in 0..3 {
        // Without a wait between the two, in which one would watch the other in the stopped state.
        pids.into_iter().for_each(|pid| signal(pid, Signal::STOP));
        sleep(PAUSE);
        pids.into_iter().for_each(|pid| signal(pid, Signal::CONT));
        let ping = lab.ping("h1", "10.77.2.2");
        assert!(ping.status.success(), "{ping}\n{}", logs());
    }
    for node in [0, 1] {
        let peers = lab.node(node)["peers"].clone();
        let losses = peers.as_array().expect("peers").iter().map(|peer| peer["losses"].as_u64().expect("a number"));
        assert_eq!(losses.sum::<u64>(), 0, "{peers:#}\n{}", logs());
    }
}
