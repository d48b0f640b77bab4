//! A service as systemd would load it: its unit file, and then its drop-ins in the order of their names.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::name::ServiceName;
use super::unit_file;
use crate::wrong_use::WrongUse;

/// Where an administrator's unit files are.
pub const ADMINISTRATOR_FOLDER: &str = "/etc/systemd/system";
/// Folders with unit files, the first of which takes precedence.
const FOLDERS: [&str; 5] = [
    ADMINISTRATOR_FOLDER,
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];
/// Drop-ins for all services.
const FOLDER_OF_ALL: &str = "service.d";
/// Number of aliases that are followed.
const ALIASES_MAX: usize = 8;
/// Number of bytes that are read of a file (systemd: `LONG_LINE_MAX`, for one line).
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Number of drop-ins that are read.
const DROP_INS_MAX: usize = 1000;

/// The unit files below a root directory.
pub struct UnitFiles {
    root: PathBuf,
}

/// A setting and the file that has it.
struct Setting {
    key: String,
    value: String,
    /// As it is called below the root directory.
    file: PathBuf,
}

/// The settings of a service.
pub struct Unit {
    /// Its name, which is not an alias.
    pub name: ServiceName,
    settings: Vec<Setting>,
}

/// A drop-in that is not yet written, by the name of its file, and its text.
#[derive(Clone, Copy)]
pub struct NewDropIn<'a> {
    pub file_name: &'a str,
    pub text: &'a str,
}

impl UnitFiles {
    pub fn below(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Returns the path below the root directory.
    pub fn path(&self, absolute: &Path) -> PathBuf {
        self.root.join(absolute.strip_prefix("/").unwrap_or(absolute))
    }

    /// Finds the unit file of a service. Returns the service's own name, if the given one is an alias, and the text.
    ///
    /// # Errors
    /// Wrong use, if there is none, or it is masked.
    fn find(&self, given: &ServiceName) -> Result<(ServiceName, PathBuf, String)> {
        let mut name = given.clone();
        for _ in 0..ALIASES_MAX {
            let template = name.template();
            let files = [Some(&name), template.as_ref()].into_iter().flatten();
            let paths = files.flat_map(|name| FOLDERS.map(|folder| Path::new(folder).join(name.file())));
            let found = paths.into_iter().find(|path| self.path(path).symlink_metadata().is_ok());
            let Some(found) = found else { break };
            let target = fs::read_link(self.path(&found)).ok();
            let target_name = target.as_deref().and_then(Path::file_name).and_then(|name| name.to_str());
            if let Some(real) = target_name.and_then(|target| name.alias_of(target)) {
                name = real;
                continue;
            }
            // The target of a link is to be found below the root directory.
            let file = match &target {
                Some(target) if target.is_absolute() => self.path(target),
                _ => self.path(&found),
            };
            let text = read(&file).with_context(|| format!("unit '{}' cannot be read; check it", found.display()))?;
            if target.is_some_and(|target| target == Path::new("/dev/null")) || text.is_empty() {
                let short = name.short();
                let what = format!("service '{short}' is masked by {}; systemctl unmask {short}", found.display());
                return Err(WrongUse::of(what).into());
            }
            return Ok((name, found, text));
        }
        let (short, folder) = (given.short(), FOLDERS[3]);
        let what = "no unit file of this name in any folder such as";
        let remedy = "install the package, or find the name with systemctl list-unit-files";
        Err(WrongUse::of(format!("service '{short}': {what} {folder}; {remedy}")).into())
    }

    /// Returns the service's own name, if the given one is an alias.
    pub fn own_name(&self, given: &ServiceName) -> Result<ServiceName> {
        Ok(self.find(given)?.0)
    }

    /// Loads a service. A drop-in that has the name of the new one is left out, and the new one's text read in its
    /// place.
    ///
    /// # Errors
    /// Wrong use as above, and files that cannot be read.
    pub fn load(&self, given: &ServiceName, new: NewDropIn<'_>) -> Result<Unit> {
        let (name, file, text) = self.find(given)?;
        let mut unit = Unit { settings: Vec::new(), name };
        unit.add(&text, &file);
        let mut drop_ins = self.drop_ins(&[given, &unit.name]);
        let new_path = Path::new(ADMINISTRATOR_FOLDER).join(unit.name.drop_in_folder()).join(new.file_name);
        drop_ins.insert(new.file_name.to_owned(), new_path.clone());
        for path in drop_ins.into_values().take(DROP_INS_MAX) {
            if path == new_path {
                unit.add(new.text, &path);
                continue;
            }
            let shown = path.display();
            let text =
                read(&self.path(&path)).with_context(|| format!("drop-in '{shown}' cannot be read; check it"))?;
            unit.add(&text, &path);
        }
        Ok(unit)
    }

    /// Returns the drop-ins of a service by their names. Of two with one name, the one in the more important folder
    /// counts.
    fn drop_ins(&self, names: &[&ServiceName]) -> BTreeMap<String, PathBuf> {
        let own = FOLDERS.iter().flat_map(|folder| {
            names.iter().flat_map(|name| name.drop_in_folders()).map(|own| Path::new(folder).join(own))
        });
        let all = FOLDERS.iter().map(|folder| Path::new(folder).join(FOLDER_OF_ALL));
        let mut drop_ins = BTreeMap::new();
        for folder in own.chain(all) {
            let entries = fs::read_dir(self.path(&folder)).into_iter().flatten().flatten();
            for name in entries.filter_map(|entry| entry.file_name().into_string().ok()) {
                if name.ends_with(".conf") {
                    drop_ins.entry(name.clone()).or_insert_with(|| folder.join(name));
                }
            }
        }
        drop_ins
    }
}

/// Reads a regular file, or `/dev/null`, which masks a file: it is empty.
fn read(path: &Path) -> io::Result<String> {
    if path.ends_with("dev/null") || fs::canonicalize(path)? == Path::new("/dev/null") {
        return Ok(String::new());
    }
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl Unit {
    fn add(&mut self, text: &str, file: &Path) {
        let settings = unit_file::settings(text).into_iter();
        self.settings.extend(settings.map(|(key, value)| Setting { key, value, file: file.to_owned() }));
    }

    /// Returns a unit with the settings of one text, for tests.
    #[cfg(test)]
    pub fn of(name: &str, text: &str) -> Self {
        let mut unit = Self { name: ServiceName::parse(name).unwrap(), settings: Vec::new() };
        unit.add(text, Path::new("/usr/lib/systemd/system/a.service"));
        unit
    }

    /// Returns a setting that has one value: the last one.
    pub fn last(&self, key: &str) -> Option<&str> {
        let last = self.settings.iter().rfind(|setting| setting.key == key)?;
        Some(last.value.as_str()).filter(|value| !value.is_empty())
    }

    /// Returns whether a setting is there and does not mean "no".
    pub fn is_on(&self, key: &str) -> bool {
        self.last(key).is_some_and(unit_file::is_on)
    }

    /// Returns the values of a list, whose key may have several names. An empty value removes those before it.
    pub fn values(&self, keys: &[&str]) -> Vec<&str> {
        let mut values = Vec::new();
        for setting in self.settings.iter().filter(|setting| keys.contains(&setting.key.as_str())) {
            match setting.value.as_str() {
                "" => values.clear(),
                value => values.push(value),
            }
        }
        values
    }

    /// Returns the words of a list.
    pub fn words(&self, keys: &[&str]) -> Vec<String> {
        self.values(keys).into_iter().flat_map(unit_file::words).collect()
    }

    /// Returns what `Environment=` gives a variable, as it is written.
    pub fn variable(&self, name: &str) -> Option<String> {
        let words = self.words(&["Environment"]);
        let mut values = words.iter().filter_map(|word| word.split_once('=').filter(|(key, _)| *key == name));
        values.next_back().map(|(_, value)| value.to_owned())
    }

    /// Returns the file with the last setting of a key to one of the values that `is_one` selects.
    pub fn file_of_last(&self, key: &str, is_one: impl Fn(&str) -> bool) -> Option<&Path> {
        let last = self.settings.iter().rfind(|setting| setting.key == key && is_one(&setting.value))?;
        Some(&last.file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: NewDropIn<'_> = NewDropIn { file_name: "50-new.conf", text: "[Service]\nUser=new\n" };

    /// Writes files below a root directory.
    fn files(of: &[(&str, &str)]) -> (tempfile::TempDir, UnitFiles) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in of {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let files = UnitFiles::below(root.path());
        (root, files)
    }

    fn name(given: &str) -> ServiceName {
        ServiceName::parse(given).unwrap()
    }

    #[test]
    fn drop_ins_are_read_in_the_order_of_their_names_and_hide_those_of_lower_folders() {
        let (_root, files) = files(&[
            ("usr/lib/systemd/system/a-b.service", "[Service]\nEnvironment=A=unit\nUser=unit\n"),
            ("etc/systemd/system/a-b.service.d/90-z.conf", "[Service]\nEnvironment=B=90\n"),
            ("etc/systemd/system/a-b.service.d/notes.txt", "[Service]\nEnvironment=B=text\n"),
            ("usr/lib/systemd/system/a-b.service.d/90-z.conf", "[Service]\nEnvironment=B=hidden\n"),
            ("usr/lib/systemd/system/a-.service.d/10-a.conf", "[Service]\nEnvironment=A=10\nEnvironment=B=10\n"),
            ("run/systemd/system/service.d/60-all.conf", "[Service]\nEnvironment=\nEnvironment=C=60\n"),
            ("etc/systemd/system/a-b.service.d/50-new.conf", "[Service]\nUser=old\n"),
        ]);
        let unit = files.load(&name("a-b"), NEW).unwrap();
        assert_eq!(unit.words(&["Environment"]), ["C=60", "B=90"], "60-all.conf has emptied the list");
        assert_eq!((unit.last("User"), unit.variable("A")), (Some("new"), None));
        assert!(unit.file_of_last("User", |_| true).unwrap().ends_with("a-b.service.d/50-new.conf"));
        assert_eq!(unit.file_of_last("Environment", |_| true).unwrap().file_name().unwrap(), "90-z.conf");
    }

    #[test]
    fn an_instance_has_the_unit_file_and_the_drop_ins_of_its_template() {
        let (_root, files) = files(&[
            ("usr/lib/systemd/system/postgresql@.service", "[Service]\nType=forking\nUser=a\n"),
            ("etc/systemd/system/postgresql@.service.d/a.conf", "[Service]\nUser=b\n"),
            ("etc/systemd/system/postgresql@16-main.service.d/b.conf", "[Service]\nGroup=c\n"),
        ]);
        let unit = files.load(&name("postgresql@16-main"), NEW).unwrap();
        assert_eq!((unit.last("User"), unit.last("Group"), unit.last("Type")), (Some("b"), Some("c"), Some("forking")));
        assert!(files.load(&name("postgresql@"), NEW).is_ok() && files.load(&name("postgresql"), NEW).is_err());
    }

    #[test]
    fn an_alias_leads_to_the_service_and_a_masked_one_is_wrong_use() {
        let (root, files) = files(&[
            ("lib/systemd/system/redis-server.service", "[Service]\nUser=redis\n"),
            ("opt/linked.service", "[Service]\nUser=linked\n"),
            ("etc/systemd/system/empty.service", ""),
        ]);
        let etc = root.path().join("etc/systemd/system");
        for (link, target) in [
            ("redis.service", "/lib/systemd/system/redis-server.service"),
            ("linked.service", "/opt/linked.service"),
            ("masked.service", "/dev/null"),
            ("a.service", "b.service"),
            ("b.service", "a.service"),
        ] {
            std::os::unix::fs::symlink(target, etc.join(link)).unwrap();
        }
        let unit = files.load(&name("redis"), NEW).unwrap();
        assert_eq!(unit.name, name("redis-server"));
        assert_eq!(files.load(&name("linked"), NEW).unwrap().values(&["User"]), ["linked", "new"]);
        for masked in ["masked", "empty"] {
            let error = files.own_name(&name(masked)).unwrap_err();
            assert!(error.is::<WrongUse>() && error.to_string().contains("; systemctl unmask"), "{error}");
        }
        for missing in ["a", "none"] {
            let error = files.own_name(&name(missing)).unwrap_err();
            assert!(error.is::<WrongUse>() && error.to_string().contains("no unit file"), "{error}");
        }
    }
}
