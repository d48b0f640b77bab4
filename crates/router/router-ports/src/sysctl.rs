//! Kernel settings (sysctls) of a network namespace, which are changed temporarily and restored.

use std::fs;
use std::io;
use std::path::PathBuf;

/// Changed settings and their former values. Dropping it restores them in reverse order, in the network namespace of
/// the dropping thread, which must be the one in which they were changed.
#[derive(Debug, Default)]
pub struct Sysctls {
    before: Vec<(PathBuf, String)>,
}

impl Sysctls {
    /// Creates an empty set.
    pub fn new() -> Sysctls {
        Sysctls::default()
    }

    /// Changes a setting of the calling thread's network namespace, such as `net/ipv4/conf/eth0/forwarding`. The error
    /// names the setting.
    pub fn set(&mut self, name: &str, value: &str) -> io::Result<()> {
        let path = PathBuf::from("/proc/sys").join(name);
        let failed = |source: io::Error| io::Error::new(source.kind(), format!("setting {name} to {value}: {source}"));
        let before = fs::read_to_string(&path).map_err(failed)?.trim().to_string();
        if before != value {
            fs::write(&path, value).map_err(failed)?;
            self.remember(path, before);
        }
        Ok(())
    }

    /// Records the former value of a setting, unless one is recorded: the settings of an interface that is removed and
    /// added again are changed each time, and the first value counts.
    fn remember(&mut self, path: PathBuf, before: String) {
        if !self.before.iter().any(|(recorded, _)| *recorded == path) {
            self.before.push((path, before));
        }
    }

    /// Restores the settings of an interface that is no longer a port.
    pub fn restore(&mut self, interface: &str) {
        let folders = ["ipv4", "ipv6"].map(|family| PathBuf::from(format!("/proc/sys/net/{family}/conf/{interface}")));
        for (path, before) in
            self.before.extract_if(.., |(path, _)| folders.iter().any(|folder| path.starts_with(folder)))
        {
            // The interface may have been removed together with its settings.
            let _ = fs::write(path, before);
        }
    }

    /// Takes over the settings that `other` changed, so that this value restores them.
    pub fn adopt(&mut self, mut other: Sysctls) {
        other.before.drain(..).for_each(|(path, before)| self.remember(path, before));
    }

    /// Leaves the settings changed, for a namespace that is not kept either.
    pub fn forget(mut self) {
        self.before.clear();
    }

    /// Changes the settings of a port's interface: behind it, the kernel is a host and not a second router. It does not
    /// forward packets received there, ignores routes from router advertisements and redirects, which are meant for
    /// hosts and not for routers (RFC 1812, section 5.2.7.2), and accepts packets for this node independent of the
    /// return path.
    pub fn configure_port(&mut self, interface: &str) -> io::Result<()> {
        self.set(&format!("net/ipv4/conf/{interface}/forwarding"), "0")?;
        self.set(&format!("net/ipv4/conf/{interface}/rp_filter"), "0")?;
        self.set("net/ipv4/conf/all/rp_filter", "0")?;
        // Without forwarding, each of the two settings alone enables redirects.
        self.set(&format!("net/ipv4/conf/{interface}/accept_redirects"), "0")?;
        self.set("net/ipv4/conf/all/accept_redirects", "0")?;
        if self.has_v6(interface) {
            // IPv6 has one setting for all interfaces.
            self.set("net/ipv6/conf/all/forwarding", "0")?;
            self.set(&format!("net/ipv6/conf/{interface}/accept_ra"), "0")?;
            self.set(&format!("net/ipv6/conf/{interface}/accept_redirects"), "0")?;
        }
        Ok(())
    }

    /// Changes the settings of the interface between the router and its own kernel: packets from any source may arrive
    /// there, and the kernel forwards nothing into it.
    pub fn configure_tun(&mut self, interface: &str) -> io::Result<()> {
        self.configure_port(interface)?;
        // Packets to any address of the node are local, whichever interface has the address.
        self.set(&format!("net/ipv4/conf/{interface}/accept_local"), "1")
    }

    fn has_v6(&self, interface: &str) -> bool {
        PathBuf::from("/proc/sys/net/ipv6/conf").join(interface).exists()
    }
}

impl Drop for Sysctls {
    fn drop(&mut self) {
        for (path, before) in self.before.drain(..).rev() {
            // The interface may have been removed together with its settings.
            let _ = fs::write(path, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace;

    #[test]
    fn changed_settings_are_restored() {
        let Some(namespace) = namespace::for_test("changed_settings_are_restored") else { return };
        let test = || {
            let read = |name: &str| fs::read_to_string(format!("/proc/sys/net/{name}")).unwrap().trim().to_string();
            let mut outer = Sysctls::new();
            outer.set("net/ipv4/conf/lo/forwarding", "1").unwrap();
            outer.set("net/ipv6/conf/all/forwarding", "1").unwrap();
            for of in ["ipv4/conf/lo", "ipv4/conf/all", "ipv6/conf/lo"] {
                outer.set(&format!("net/{of}/accept_redirects"), "1").unwrap();
            }
            let mut inner = Sysctls::new();
            inner.configure_port("lo").unwrap();
            inner.configure_tun("lo").unwrap();
            assert_eq!([read("ipv4/conf/lo/forwarding"), read("ipv6/conf/all/forwarding")], ["0", "0"]);
            let redirects =
                ["ipv4/conf/lo", "ipv4/conf/all", "ipv6/conf/lo"].map(|of| format!("{of}/accept_redirects"));
            assert_eq!(redirects.each_ref().map(|name| read(name)), ["0", "0", "0"]);
            drop(inner);
            assert_eq!([read("ipv4/conf/lo/forwarding"), read("ipv6/conf/all/forwarding")], ["1", "1"]);
            assert_eq!(redirects.each_ref().map(|name| read(name)), ["1", "1", "1"]);
            // An interface that is removed and added again, and then is no longer a port.
            let mut again = Sysctls::new();
            for _ in 0..3 {
                again.configure_port("lo").unwrap();
                fs::write("/proc/sys/net/ipv4/conf/lo/forwarding", "1").unwrap();
            }
            assert_eq!(again.before.iter().filter(|(path, _)| path.ends_with("ipv4/conf/lo/forwarding")).count(), 1);
            again.configure_port("lo").unwrap();
            again.restore("lo");
            assert_eq!([read("ipv4/conf/lo/forwarding"), read("ipv6/conf/all/forwarding")], ["1", "0"]);
            assert_eq!(redirects.each_ref().map(|name| read(name)), ["1", "0", "1"]);
            drop(again);
            assert_eq!(redirects.each_ref().map(|name| read(name)), ["1", "1", "1"]);
            let error = outer.set("net/ipv4/conf/gone0/forwarding", "1").unwrap_err().to_string();
            assert!(error.starts_with("setting net/ipv4/conf/gone0/forwarding to 1: "), "{error}");
        };
        namespace.within(test).unwrap();
    }
}
