//! Kernel settings (sysctls) of a network namespace, which are changed temporarily and restored.

mod journal;
mod setting;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use journal::Journal;
pub use journal::Leftover;
use setting::{Name, Setting};

use crate::interface::InterfaceNames;

/// Changed settings and their former values. Dropping it restores them in reverse order, in the network namespace of
/// the dropping thread, which must be the one in which they were changed. A setting that someone else has changed in
/// the meantime keeps that value.
#[derive(Debug, Default)]
pub struct Sysctls {
    changed: Vec<Setting>,
    /// The file that remembers the settings if the process is killed.
    journal: Option<Journal>,
    /// Whether the kernel forwards packets of ports: see [`Sysctls::set_forwarding`].
    forwards: bool,
}

impl Sysctls {
    /// Creates an empty set.
    pub fn new() -> Sysctls {
        Sysctls::default()
    }

    /// Creates a set that a file remembers until the settings are restored. Settings that a killed process has left
    /// changed in this network namespace are taken over from the file. `namespace` is the path by which the namespace
    /// is found again, if it has one.
    ///
    /// # Errors
    /// The identity of the namespace cannot be determined.
    pub fn remembered_in(file: &Path, namespace: Option<&Path>) -> io::Result<Sysctls> {
        let journal = Journal::new(file, namespace)?;
        let mut sysctls = Sysctls { changed: Vec::new(), journal: Some(journal), forwards: false };
        if let Err(error) = sysctls.take_over(file) {
            sysctls.forget();
            return Err(error);
        }
        Ok(sysctls)
    }

    /// Takes over the settings that a killed process has left changed in this network namespace, from another file,
    /// which is then removed. A file of another namespace is left alone.
    ///
    /// # Errors
    /// The settings cannot be remembered in the file of this set.
    pub fn take_over_from(&mut self, file: &Path) -> io::Result<()> {
        if self.take_over(file)? {
            let _ = fs::remove_file(file);
        }
        Ok(())
    }

    /// Returns whether the file belongs to this namespace.
    fn take_over(&mut self, file: &Path) -> io::Result<bool> {
        let Some(journal) = &self.journal else { return Ok(false) };
        let Some(left) = journal.read_for_same_namespace(file) else { return Ok(false) };
        let names = InterfaceNames::open()?;
        for setting in left.into_iter().filter(|setting| setting.is_still_ours(&names)) {
            if !self.changed.iter().any(|known| known.is_same(&setting.name, setting.interface)) {
                self.changed.push(setting);
            }
        }
        self.save()?;
        Ok(true)
    }

    /// Restores what a killed process has left changed, in the calling thread's network namespace, and removes the file
    /// that remembers it.
    pub fn restore_leftover(file: &Path) -> io::Result<Leftover> {
        let mut sysctls = Sysctls { changed: Vec::new(), journal: Some(Journal::new(file, None)?), forwards: false };
        if !sysctls.take_over(file)? {
            sysctls.journal = None;
            return Ok(Leftover::OfAnotherNamespace);
        }
        // Dropping the set restores the settings and removes the file.
        Ok(Leftover::Restored(sysctls.changed.len()))
    }

    /// Returns the path of the network namespace in which a killed process has left settings changed; `None` if the
    /// namespace has no path, or if the file is damaged or of an earlier boot of the machine.
    pub fn namespace_of(file: &Path) -> Option<PathBuf> {
        journal::namespace_of(file)
    }

    /// Returns whether the file exists, but cannot be used.
    pub fn is_damaged(file: &Path) -> bool {
        journal::is_damaged(file)
    }

    fn save(&self) -> io::Result<()> {
        self.journal.as_ref().map_or(Ok(()), |journal| journal.write(&self.changed))
    }

    /// Changes a setting of the calling thread's network namespace, such as `net/ipv4/conf/eth0/forwarding`. The error
    /// names the setting.
    pub fn set(&mut self, name: &str, value: &str) -> io::Result<()> {
        let failed = |source: io::Error| io::Error::new(source.kind(), format!("setting {name} to {value}: {source}"));
        let parsed = Name::parse(name).ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
        let path = parsed.path();
        let before = fs::read_to_string(&path).map_err(failed)?.trim().to_string();
        let interface = parsed.interface().and_then(|name| InterfaceNames::open().ok()?.index_of(name));
        let known = self.changed.iter_mut().find(|known| known.is_same(&parsed, interface));
        match known {
            Some(known) => known.change(&before, value),
            None if before == value => return Ok(()),
            None => self.changed.push(Setting::new(parsed, interface, &before, value)),
        }
        if before != value {
            // A process that is killed in between has remembered too much rather than too little.
            self.save().map_err(failed)?;
            fs::write(&path, value).map_err(failed)?;
        }
        Ok(())
    }

    /// Restores the settings of an interface that is no longer a port.
    pub fn restore(&mut self, interface: &str) {
        let Ok(names) = InterfaceNames::open() else { return };
        let index = names.index_of(interface);
        let is_of_it = |setting: &mut Setting| match setting.interface {
            Some(of) => Some(of) == index,
            None => setting.name.interface() == Some(interface),
        };
        restore_all(&self.changed.extract_if(.., is_of_it).collect::<Vec<_>>(), &names);
        // The former file remembers too much, which does no harm.
        let _ = self.save();
    }

    /// Leaves the settings changed, for a namespace that is not kept either, and the file as it is.
    pub fn forget(mut self) {
        self.changed.clear();
        self.journal = None;
    }

    /// Changes the settings of a port's interface: behind it, the kernel is a host and not a second router. It does not
    /// forward packets received there, ignores routes from router advertisements and redirects, which are meant for
    /// hosts and not for routers (RFC 1812, section 5.2.7.2), and accepts packets for this node independent of the
    /// return path.
    pub fn configure_port(&mut self, interface: &str) -> io::Result<()> {
        self.set(&format!("net/ipv4/conf/{interface}/forwarding"), self.forwarding())?;
        self.set(&format!("net/ipv4/conf/{interface}/rp_filter"), "0")?;
        self.set("net/ipv4/conf/all/rp_filter", "0")?;
        // Without forwarding, each of the two settings alone enables redirects.
        self.set(&format!("net/ipv4/conf/{interface}/accept_redirects"), "0")?;
        self.set("net/ipv4/conf/all/accept_redirects", "0")?;
        if self.has_v6(interface) {
            self.set_forwarding_v6(&[interface])?;
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

    /// Sets whether the kernel forwards packets of ports, and of the interface `tun` between it and the router,
    /// now and in later calls of [`Sysctls::configure_port`]. It then sends redirects like the router, if `redirects`
    /// is set: to hosts on a port's network, and not to the router.
    pub fn set_forwarding(&mut self, forwards: bool, ports: &[&str], tun: &str, redirects: bool) -> io::Result<()> {
        self.forwards = forwards;
        for interface in ports.iter().chain([&tun]) {
            self.set(&format!("net/ipv4/conf/{interface}/forwarding"), self.forwarding())?;
            if forwards && (!redirects || *interface == tun) {
                self.set(&format!("net/ipv4/conf/{interface}/send_redirects"), "0")?;
            }
        }
        if forwards {
            // One of the two settings alone enables redirects.
            self.set("net/ipv4/conf/all/send_redirects", "0")?;
        }
        if self.has_v6(tun) {
            self.set_forwarding_v6(&[ports, &[tun]].concat())?;
        }
        Ok(())
    }

    /// Sets whether the kernel forwards IPv6, for which one setting decides. Changing it also changes that of each
    /// interface, which decides whether the kernel is a host there, for example one that accepts router advertisements:
    /// all interfaces keep what they had, and then ports are configured.
    fn set_forwarding_v6(&mut self, ports: &[&str]) -> io::Result<()> {
        const ALL: &str = "net/ipv6/conf/all/forwarding";
        let value = self.forwarding();
        if fs::read_to_string(Path::new("/proc/sys").join(ALL)).is_ok_and(|current| current.trim() != value) {
            let kept = self.expect_change_v6(value)?;
            self.set(ALL, value)?;
            // The interface may have been removed in the meantime.
            kept.into_iter().for_each(|(path, found)| _ = fs::write(path, found));
        }
        ports.iter().try_for_each(|port| self.set(&format!("net/ipv6/conf/{port}/forwarding"), value))
    }

    /// Remembers that the setting of each interface is about to become `value`, and then what it was at first. Returns
    /// the paths, and what it was.
    fn expect_change_v6(&mut self, value: &str) -> io::Result<Vec<(PathBuf, String)>> {
        let names = InterfaceNames::open()?;
        let mut kept = Vec::new();
        for scope in fs::read_dir("/proc/sys/net/ipv6/conf")?.flatten().map(|entry| entry.file_name()) {
            let Some(scope) = scope.to_str().filter(|scope| *scope != "all") else { continue };
            let Some(name) = Name::parse(&format!("net/ipv6/conf/{scope}/forwarding")) else { continue };
            // The interface may have been removed in the meantime.
            let Ok(before) = fs::read_to_string(name.path()) else { continue };
            let (before, interface) = (before.trim(), name.interface().and_then(|scope| names.index_of(scope)));
            let path = name.path();
            let at = self.changed.iter().position(|known| known.is_same(&name, interface)).unwrap_or_else(|| {
                self.changed.push(Setting::new(name, interface, before, before));
                self.changed.len() - 1
            });
            kept.push((path, self.changed[at].change_and_return(before, value)));
        }
        Ok(kept)
    }

    fn forwarding(&self) -> &'static str {
        if self.forwards { "1" } else { "0" }
    }

    fn has_v6(&self, interface: &str) -> bool {
        PathBuf::from("/proc/sys/net/ipv6/conf").join(interface).exists()
    }
}

/// Restores settings in reverse order. One may change others, so that all are read before.
fn restore_all(settings: &[Setting], names: &InterfaceNames) {
    let to_write: Vec<_> = settings.iter().rev().filter_map(|setting| setting.to_restore(names)).collect();
    for (path, found) in to_write {
        // The interface may have been removed together with its settings.
        let _ = fs::write(path, found);
    }
}

impl Drop for Sysctls {
    fn drop(&mut self) {
        if let Ok(names) = InterfaceNames::open() {
            restore_all(&self.changed, &names);
        }
        if let Some(journal) = &self.journal {
            journal.remove();
        }
    }
}

#[cfg(test)]
mod tests;
