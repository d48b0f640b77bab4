//! A changed setting: its name, the value that was found, and the values that were written.

use std::fs;
use std::path::PathBuf;

use crate::interface::{InterfaceIndex, InterfaceNames};

/// Maximum length of a value; the settings that a router changes are small numbers.
const VALUE_BYTES_MAX: usize = 16;

/// The name of a setting below `/proc/sys`: `net/ipv4/conf/SCOPE/KEY`, or the same with `ipv6`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Name {
    family: String,
    /// An interface, `all` or `default`.
    scope: String,
    key: String,
}

impl Name {
    /// Parses a name; returns `None` if it is not of this form.
    pub(super) fn parse(name: &str) -> Option<Name> {
        let rest = name.strip_prefix("net/")?;
        let [family, "conf", scope, key] = rest.split('/').collect::<Vec<_>>()[..] else { return None };
        let is_key = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        let is_scope = !scope.is_empty() && scope != "." && scope != ".." && scope.len() < libc::IFNAMSIZ;
        let is_valid = matches!(family, "ipv4" | "ipv6") && is_scope && is_key;
        is_valid.then(|| Name { family: family.to_owned(), scope: scope.to_owned(), key: key.to_owned() })
    }

    /// Returns the interface whose setting it is, if it is not one of the whole namespace.
    pub(super) fn interface(&self) -> Option<&str> {
        Some(self.scope.as_str()).filter(|scope| !matches!(*scope, "all" | "default"))
    }

    pub(super) fn path(&self) -> PathBuf {
        PathBuf::from("/proc/sys").join(self.to_string())
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "net/{}/conf/{}/{}", self.family, self.scope, self.key)
    }
}

/// A setting that was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) name: Name,
    /// The index of the interface, which keeps its settings when it is renamed.
    pub(super) interface: Option<InterfaceIndex>,
    /// The value that was found.
    found: String,
    /// The value before the last change.
    previous: String,
    /// The value of the last change.
    written: String,
}

impl Setting {
    pub(super) fn new(name: Name, interface: Option<InterfaceIndex>, found: &str, written: &str) -> Setting {
        Setting { name, interface, found: found.to_owned(), previous: found.to_owned(), written: written.to_owned() }
    }

    /// Returns whether this is the setting of that name. Each interface has its own, whatever its name is.
    pub(super) fn is_same(&self, name: &Name, interface: Option<InterfaceIndex>) -> bool {
        let is_same_key = (&self.name.family, &self.name.key) == (&name.family, &name.key);
        let is_same_scope = self.name.scope == name.scope || self.interface.is_some();
        is_same_key && self.interface == interface && is_same_scope
    }

    /// Records a further change, from the value `before`. A value that is not ours is what someone else wants.
    pub(super) fn change(&mut self, before: &str, value: &str) {
        if !self.is_ours(before) {
            self.found = before.to_owned();
        }
        (self.previous, self.written) = (before.to_owned(), value.to_owned());
    }

    /// Records a change from the value `before` to `value`, and then to the value that was found, which is returned.
    pub(super) fn change_and_return(&mut self, before: &str, value: &str) -> String {
        let found = if self.is_ours(before) { self.found.clone() } else { before.to_owned() };
        self.change(before, &found);
        self.previous = value.to_owned();
        found
    }

    /// Returns whether a current value was written by the router. A killed process may not have written the last one.
    fn is_ours(&self, current: &str) -> bool {
        current == self.written || current == self.previous
    }

    /// Returns the path of the setting, whatever the name of the interface is now; `None` if the interface is gone.
    fn path(&self, names: &InterfaceNames) -> Option<PathBuf> {
        let Some(interface) = self.interface else { return Some(self.name.path()) };
        Some(Name { scope: names.name_of(interface)?, ..self.name.clone() }.path())
    }

    fn current(&self, names: &InterfaceNames) -> Option<(PathBuf, String)> {
        let path = self.path(names)?;
        let current = fs::read_to_string(&path).ok()?.trim().to_owned();
        Some((path, current))
    }

    /// Returns whether the setting exists and has a value that the router has written.
    pub(super) fn is_still_ours(&self, names: &InterfaceNames) -> bool {
        self.current(names).is_some_and(|(_, current)| self.is_ours(&current))
    }

    /// Returns the path and the value that was found, unless the interface is gone or someone else has changed the
    /// setting.
    pub(super) fn to_restore(&self, names: &InterfaceNames) -> Option<(PathBuf, &str)> {
        let (path, current) = self.current(names)?;
        self.is_ours(&current).then_some((path, &self.found))
    }

    /// Returns the line of a file that remembers the setting.
    pub(super) fn line(&self) -> String {
        let Setting { name, interface, found, previous, written } = self;
        format!("{} {name} {found} {previous} {written}\n", interface.map_or(0, |interface| interface.0))
    }

    /// Parses such a line.
    pub(super) fn parse(line: &str) -> Option<Setting> {
        let [index, name, values @ ..] = &line.split(' ').collect::<Vec<_>>()[..] else { return None };
        let is_value = |value: &&str| value.len() <= VALUE_BYTES_MAX && value.parse::<i64>().is_ok();
        let [found, previous, written] = values else { return None };
        let (name, index) = (Name::parse(name)?, index.parse().ok()?);
        // A setting of the whole namespace has no interface.
        let interface = Some(InterfaceIndex(index)).filter(|_| index != 0);
        if !values.iter().all(is_value) || interface.is_some() && name.interface().is_none() {
            return None;
        }
        let [found, previous, written] = [found, previous, written].map(|value| (*value).to_owned());
        Some(Setting { name, interface, found, previous, written })
    }
}
