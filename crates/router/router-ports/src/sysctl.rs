//! The kernel's settings of a network namespace, changed for a while and put back.

use std::fs;
use std::io;
use std::path::PathBuf;

/// Settings that were changed, and what they were before. Dropping it puts them back, the last one first: in the
/// network namespace of the thread that drops it, which is to be the one that they were changed in.
#[derive(Debug, Default)]
pub struct Sysctls {
    before: Vec<(PathBuf, String)>,
}

impl Sysctls {
    /// Nothing changed yet.
    pub fn new() -> Sysctls {
        Sysctls::default()
    }

    /// Changes a setting of the calling thread's network namespace, such as `net/ipv4/conf/eth0/forwarding`. The error
    /// names it.
    pub fn set(&mut self, name: &str, value: &str) -> io::Result<()> {
        let path = PathBuf::from("/proc/sys").join(name);
        let failed = |source: io::Error| io::Error::new(source.kind(), format!("setting {name} to {value}: {source}"));
        let before = fs::read_to_string(&path).map_err(failed)?.trim().to_string();
        if before != value {
            fs::write(&path, value).map_err(failed)?;
            self.note(path, before);
        }
        Ok(())
    }

    /// What a setting was before it was changed for the first time counts: of an interface that comes and goes, it is
    /// changed each time.
    fn note(&mut self, path: PathBuf, before: String) {
        if !self.before.iter().any(|(noted, _)| *noted == path) {
            self.before.push((path, before));
        }
    }

    /// Puts back what was changed of an interface that is no port any more.
    pub fn put_back(&mut self, interface: &str) {
        let folders = ["ipv4", "ipv6"].map(|family| PathBuf::from(format!("/proc/sys/net/{family}/conf/{interface}")));
        for (path, before) in
            self.before.extract_if(.., |(path, _)| folders.iter().any(|folder| path.starts_with(folder)))
        {
            // The interface, and its settings with it, may be gone.
            let _ = fs::write(path, before);
        }
    }

    /// What another one changed is put back by this one.
    pub fn adopt(&mut self, mut other: Sysctls) {
        other.before.drain(..).for_each(|(path, before)| self.note(path, before));
    }

    /// What was changed stays: its namespace is not kept either.
    pub fn keep(mut self) {
        self.before.clear();
    }

    /// What a port's interface needs: the kernel behind it is a host there, not a second router. It forwards nothing
    /// that comes in there, takes no routes from advertisements and redirects, which are for hosts and not for a router
    /// (RFC 1812, section 5.2.7.2), and receives what is for it whichever way the answer goes.
    pub fn for_port(&mut self, interface: &str) -> io::Result<()> {
        self.set(&format!("net/ipv4/conf/{interface}/forwarding"), "0")?;
        self.set(&format!("net/ipv4/conf/{interface}/rp_filter"), "0")?;
        self.set("net/ipv4/conf/all/rp_filter", "0")?;
        // Where nothing is forwarded, either of the two settings suffices for them to be believed.
        self.set(&format!("net/ipv4/conf/{interface}/accept_redirects"), "0")?;
        self.set("net/ipv4/conf/all/accept_redirects", "0")?;
        if self.has_v6(interface) {
            // IPv6 has one switch for all interfaces.
            self.set("net/ipv6/conf/all/forwarding", "0")?;
            self.set(&format!("net/ipv6/conf/{interface}/accept_ra"), "0")?;
            self.set(&format!("net/ipv6/conf/{interface}/accept_redirects"), "0")?;
        }
        Ok(())
    }

    /// What the line between the router and its own kernel needs: any source may come in there, and the kernel forwards
    /// nothing into it.
    pub fn for_tun(&mut self, interface: &str) -> io::Result<()> {
        self.for_port(interface)?;
        // Packets to other addresses of the node are its own, whichever interface has them.
        self.set(&format!("net/ipv4/conf/{interface}/accept_local"), "1")
    }

    fn has_v6(&self, interface: &str) -> bool {
        PathBuf::from("/proc/sys/net/ipv6/conf").join(interface).exists()
    }
}

impl Drop for Sysctls {
    fn drop(&mut self) {
        for (path, before) in self.before.drain(..).rev() {
            // The interface, and its settings with it, may be gone.
            let _ = fs::write(path, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace;

    #[test]
    fn what_was_changed_is_put_back() {
        let Some(namespace) = namespace::for_test("what_was_changed_is_put_back") else { return };
        let test = || {
            let read = |name: &str| fs::read_to_string(format!("/proc/sys/net/{name}")).unwrap().trim().to_string();
            let mut outer = Sysctls::new();
            outer.set("net/ipv4/conf/lo/forwarding", "1").unwrap();
            outer.set("net/ipv6/conf/all/forwarding", "1").unwrap();
            for of in ["ipv4/conf/lo", "ipv4/conf/all", "ipv6/conf/lo"] {
                outer.set(&format!("net/{of}/accept_redirects"), "1").unwrap();
            }
            let mut inner = Sysctls::new();
            inner.for_port("lo").unwrap();
            inner.for_tun("lo").unwrap();
            assert_eq!([read("ipv4/conf/lo/forwarding"), read("ipv6/conf/all/forwarding")], ["0", "0"]);
            let redirects =
                ["ipv4/conf/lo", "ipv4/conf/all", "ipv6/conf/lo"].map(|of| format!("{of}/accept_redirects"));
            assert_eq!(redirects.each_ref().map(|name| read(name)), ["0", "0", "0"]);
            drop(inner);
            assert_eq!([read("ipv4/conf/lo/forwarding"), read("ipv6/conf/all/forwarding")], ["1", "1"]);
            assert_eq!(redirects.each_ref().map(|name| read(name)), ["1", "1", "1"]);
            // Of one that comes and goes, and then is no port any more.
            let mut again = Sysctls::new();
            for _ in 0..3 {
                again.for_port("lo").unwrap();
                fs::write("/proc/sys/net/ipv4/conf/lo/forwarding", "1").unwrap();
            }
            assert_eq!(again.before.iter().filter(|(path, _)| path.ends_with("ipv4/conf/lo/forwarding")).count(), 1);
            again.for_port("lo").unwrap();
            again.put_back("lo");
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
