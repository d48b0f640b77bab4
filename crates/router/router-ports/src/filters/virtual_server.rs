//! Services of the virtual server (IPVS). It reports no changes.

use std::fs;

const SERVICES: &str = "/proc/thread-self/net/ip_vs";
/// How lines of services begin; those of their servers begin with an arrow.
const PROTOCOLS: [&str; 4] = ["TCP ", "UDP ", "SCTP ", "FWM "];

/// Returns a description of the services, if there are any.
pub(super) fn find() -> Option<String> {
    // Without the module, there is no file.
    describe(&fs::read_to_string(SERVICES).ok()?)
}

fn describe(table: &str) -> Option<String> {
    let services = table.lines().filter(|line| PROTOCOLS.iter().any(|protocol| line.starts_with(protocol))).count();
    (services > 0).then(|| format!("IPVS, services: {services}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel that runs the tests may have no IPVS.
    #[test]
    fn services_are_counted() {
        let head = "IP Virtual Server version 1.2.1 (size=4096)\nProt LocalAddress:Port Scheduler Flags\n  \
                    -> RemoteAddress:Port Forward Weight ActiveConn InActConn\n";
        assert_eq!(describe(head), None);
        let services = "TCP  0A4D0101:0050 rr \n  -> 0A4D0202:0050      Masq    1      0          0         \nFWM  \
                        00000001 wlc persistent 360\n  -> 0A4D0202:0000      Route   1      0          0         \n";
        assert_eq!(describe(&format!("{head}{services}")), Some("IPVS, services: 2".to_owned()));
    }
}
