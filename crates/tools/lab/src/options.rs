//! The command line of a lab. Options may also be in the script.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;

use crate::device::Device;
use crate::spec::{CROSSLANE_FILES, GUESTS_MAX, Lab};

/// Prefix of a script's lines with options.
const HEADER: &str = "# lab:";

/// Boots guests without a network that share one device, and runs a script in them
#[derive(Clone, Debug, Parser)]
#[command(name = "lab", args_override_self = true, max_term_width = 100)]
#[command(after_help = "A script's first lines may hold options: # lab: --guests 3 --program redis-server")]
pub struct Options {
    /// Number of guests: a, b, ...
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = parse_guests)]
    guests: u8,
    /// Shared device
    #[arg(long, default_value = "plain")]
    device: Device,
    /// Size of the shared memory, a power of two
    #[arg(long, value_name = "BYTES", default_value = "64M", value_parser = parse_size)]
    memory: u64,
    /// Doorbells of each guest
    #[arg(long, value_name = "N", default_value_t = 4)]
    vectors: u32,
    /// Private memory of each guest
    #[arg(long, value_name = "BYTES", default_value = "512M", value_parser = parse_size)]
    ram: u64,
    /// Connect two guests by a network, with one network device each
    #[arg(long)]
    network: bool,
    /// Copy this program of the host with its libraries into the guests (repeatable)
    #[arg(long = "program", value_name = "NAME")]
    programs: Vec<String>,
    /// Copy this file of the host into the guests (repeatable)
    #[arg(long = "file", value_name = "HERE:THERE", value_parser = parse_file)]
    files: Vec<(PathBuf, String)>,
    /// Folder of crosslane, libcrosslane.so and the lab's helpers [default: that of this command]
    #[arg(long, value_name = "DIR")]
    crosslane: Option<PathBuf>,
    /// Time limit of the whole lab
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
    /// Script that every guest runs with the shell of busybox
    script: PathBuf,
}

impl Options {
    /// Parses a command line and the header of its script. The command line has priority.
    pub fn parse(arguments: &[String]) -> Result<(Self, String)> {
        let given = Self::try_parse_from(["lab".to_owned()].iter().chain(arguments))?;
        let script = read(&given.script)?;
        let header = script.lines().filter_map(|line| line.strip_prefix(HEADER)).flat_map(str::split_whitespace);
        let words = std::iter::once("lab").chain(header).map(str::to_owned).chain(arguments.iter().cloned());
        Ok((Self::try_parse_from(words)?, script))
    }

    /// Returns the lab that the options describe.
    pub fn lab(&self, script: &str) -> Lab {
        let mut lab = Lab::new().guests(self.guests).device(self.device).script(script);
        lab = lab.memory_bytes(self.memory).vectors(self.vectors).ram_bytes(self.ram);
        lab = lab.limit(Duration::from_secs(self.timeout));
        if self.network {
            lab = lab.network();
        }
        for program in &self.programs {
            lab = lab.program(program);
        }
        for (from, to) in &self.files {
            lab = lab.file(from, to);
        }
        match self.crosslane.clone().or_else(own_folder) {
            Some(folder) => lab.crosslane(&folder),
            None => lab,
        }
    }
}

/// Returns the folder of this command, if it contains the other files of the build.
fn own_folder() -> Option<PathBuf> {
    let folder = std::env::current_exe().ok()?.parent()?.to_owned();
    CROSSLANE_FILES.iter().all(|name| folder.join(name).is_file()).then_some(folder)
}

impl Lab {
    /// Returns the lab of a script file with the options in its header.
    pub fn of_script(path: &Path) -> Result<Self> {
        let (options, script) = Options::parse(&[path.display().to_string()])?;
        Ok(options.lab(&script))
    }
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("script '{}' cannot be read; check the path", path.display()))
}

fn parse_guests(text: &str) -> Result<u8, String> {
    let count = text.parse().ok().filter(|count| (1..=GUESTS_MAX).contains(count));
    count.ok_or_else(|| format!("1 to {GUESTS_MAX} guests are possible"))
}

fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = || format!("'{text}' is not a size; write bytes as in 64M or 1G");
    let digits = text.trim_end_matches(['K', 'M', 'G']);
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return Err(wrong()),
    };
    digits.parse::<u64>().ok().and_then(|count| count.checked_mul(1 << shift)).ok_or_else(wrong)
}

fn parse_file(text: &str) -> Result<(PathBuf, String), String> {
    match text.split_once(':') {
        Some((from, to)) if to.starts_with('/') => Ok((PathBuf::from(from), to.to_owned())),
        _ => Err(format!("'{text}' is not a pair of paths; write HERE:/THERE")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(script: &str, arguments: &[&str]) -> Options {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), script).unwrap();
        let mut arguments: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        arguments.push(file.path().display().to_string());
        Options::parse(&arguments).unwrap().0
    }

    #[test]
    fn a_script_header_has_options_and_the_command_line_has_priority() {
        let script = "# lab: --guests 3 --device vfio\n# lab: --program redis-server\necho\n";
        let options = parse(script, &[]);
        assert_eq!((options.guests, options.device), (3, Device::Vfio));
        assert_eq!(options.programs, ["redis-server"]);
        let options = parse(script, &["--guests", "1", "--memory", "1M", "--program", "nc"]);
        assert_eq!((options.guests, options.device, options.memory), (1, Device::Vfio, 1 << 20));
        assert_eq!(options.programs, ["redis-server", "nc"]);
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [("4096", 4096), ("4K", 4096), ("64M", 64 << 20), ("1G", 1 << 30)] {
            assert_eq!(parse_size(text), Ok(bytes));
        }
        for text in ["", "M", "64Q", "64MM", "-1", "99999999999G"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }
}
