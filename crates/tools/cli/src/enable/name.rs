//! Names of services, and of the folders with their drop-ins (systemd.unit(5)).

use crate::wrong_use::WrongUse;

const SUFFIX: &str = ".service";
/// Types of units that are not services.
const OTHER_SUFFIXES: [&str; 10] =
    [".socket", ".target", ".timer", ".path", ".mount", ".automount", ".swap", ".slice", ".scope", ".device"];
/// Longest name of a unit (systemd: `UNIT_NAME_MAX`, with the terminating zero).
const NAME_BYTES_MAX: usize = 255;

/// The name of a service, an instance of a template, or a template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceName {
    /// With its suffix.
    file: String,
}

impl ServiceName {
    /// Parses a name with or without `.service`.
    ///
    /// # Errors
    /// Wrong use for a name that systemd does not allow, and for units that are not services.
    pub fn parse(given: &str) -> Result<Self, WrongUse> {
        let shown = given.escape_debug();
        if let Some(suffix) = OTHER_SUFFIXES.iter().find(|suffix| given.ends_with(**suffix)) {
            let what = format!("'{shown}' is a {} unit; name the service that it starts", &suffix[1..]);
            return Err(WrongUse::of(what));
        }
        let stem = given.strip_suffix(SUFFIX).unwrap_or(given);
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b":-_.\\@".contains(&byte);
        let is_name = !stem.is_empty() && !stem.starts_with('@') && stem.bytes().all(is_allowed);
        if !is_name || stem.len() + SUFFIX.len() > NAME_BYTES_MAX {
            let what = "is no name of a service; name one as systemctl list-units --type=service shows it";
            return Err(WrongUse::of(format!("'{shown}' {what}")));
        }
        Ok(Self { file: format!("{stem}{SUFFIX}") })
    }

    /// Returns the name of its unit file.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Returns the name without the suffix, as people write it.
    pub fn short(&self) -> &str {
        self.file.strip_suffix(SUFFIX).unwrap_or(&self.file)
    }

    /// Returns the part before the `@`, and the instance, which is empty for the template itself.
    fn parts(&self) -> (&str, Option<&str>) {
        match self.short().split_once('@') {
            Some((prefix, instance)) => (prefix, Some(instance)),
            None => (self.short(), None),
        }
    }

    /// Returns whether it is a template, which stands for all of its instances.
    pub fn is_template(&self) -> bool {
        self.parts().1 == Some("")
    }

    /// Returns the template of an instance.
    pub fn template(&self) -> Option<Self> {
        let (prefix, instance) = self.parts();
        instance.filter(|instance| !instance.is_empty()).map(|_| Self { file: format!("{prefix}@{SUFFIX}") })
    }

    /// Returns the name that this one, whose unit file is a link to `target`, is an alias of.
    pub fn alias_of(&self, target: &str) -> Option<Self> {
        let mut real = Self::parse(target).ok().filter(|real| real.file == target)?;
        if let (true, (_, Some(instance))) = (real.is_template(), self.parts()) {
            real.file = format!("{}@{instance}{SUFFIX}", real.parts().0);
        }
        (real != *self).then_some(real)
    }

    /// Returns the folder of its drop-ins.
    pub fn drop_in_folder(&self) -> String {
        format!("{}.d", self.file)
    }

    /// Returns the folders whose drop-ins apply to it, the most specific first: `a-b.service.d`, then `a-.service.d`.
    pub fn drop_in_folders(&self) -> Vec<String> {
        let mut folders = Vec::new();
        for name in [Some(self.clone()), self.template()].into_iter().flatten() {
            let (prefix, instance) = name.parts();
            let rest = instance.map_or_else(String::new, |instance| format!("@{instance}"));
            folders.push(name.drop_in_folder());
            let dashes = prefix.rmatch_indices('-').filter(|(at, _)| at + 1 < prefix.len());
            folders.extend(dashes.map(|(at, _)| format!("{}{rest}{SUFFIX}.d", &prefix[..=at])));
        }
        folders
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_is_named_with_and_without_its_suffix() {
        let name = ServiceName::parse("redis-server").unwrap();
        assert_eq!(name, ServiceName::parse("redis-server.service").unwrap());
        assert_eq!((name.file(), name.short()), ("redis-server.service", "redis-server"));
        assert_eq!((name.template(), name.is_template()), (None, false));
        assert_eq!(name.drop_in_folders(), ["redis-server.service.d", "redis-.service.d"]);
    }

    #[test]
    fn an_instance_has_its_own_folder_and_that_of_its_template() {
        let name = ServiceName::parse("postgresql@16-main").unwrap();
        assert_eq!(name.template().unwrap().file(), "postgresql@.service");
        assert!(name.template().unwrap().is_template());
        assert_eq!(name.drop_in_folders(), ["postgresql@16-main.service.d", "postgresql@.service.d"]);
    }

    #[test]
    fn the_name_behind_an_alias_is_that_of_its_target() {
        let alias = |name: &str, target: &str| {
            ServiceName::parse(name).unwrap().alias_of(target).map(|real| real.file().to_owned())
        };
        assert_eq!(alias("redis", "redis-server.service"), Some("redis-server.service".to_owned()));
        assert_eq!(alias("autovt@tty1", "getty@.service"), Some("getty@tty1.service".to_owned()));
        assert_eq!(alias("redis-server", "redis-server.service"), None, "a link to a file elsewhere");
        assert_eq!(alias("getty@tty1", "getty@.service"), None);
        assert_eq!(alias("redis", "redis.conf"), None);
    }

    #[test]
    fn other_units_and_other_characters_are_wrong_use() {
        for given in ["", ".service", "@x", "a/b", "../x", "a b", "a\n", "a*", "nginx.socket", "a.timer", "é"] {
            let error = ServiceName::parse(given).unwrap_err().to_string();
            assert!(error.contains("; name ") && error.lines().count() == 1, "{given:?}: {error}");
        }
        assert!(ServiceName::parse(&"a".repeat(247)).is_ok());
        assert!(ServiceName::parse(&"a".repeat(248)).is_err());
    }
}
