//! `crosslane run`: sets the environment that the library reads, and executes the program.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, anyhow, bail};
use rack::PortList;
use socket::process::settings;
use stats_page::{RULES, VARIABLES};

use crate::rack_choice::{LoadedRack, RackChoice};
use crate::wrong_use::WrongUse;
use crate::{library, program, rack_dir};

/// A server and its client.
pub const EXAMPLE: &str = "\
crosslane run --node a -- redis-server --port 6379 --protected-mode no
crosslane run --node b -- redis-cli -h 127.77.0.1 -p 6379 ping";

/// The exit codes; sentences.
pub const EXIT_STATUS: &str = "The program replaces this command, so its exit code is that of the program. Before \
                               that: 1 if it cannot be run, or --require-lane rules it out; 2 after wrong use.";

/// Columns of the long help.
const HELP_COLUMNS: usize = 98;

/// Returns what the long help says behind the options: variables, exit codes, an example.
fn long_help() -> String {
    let mut text = String::from("Environment of the program:\n");
    for variable in VARIABLES {
        text += &format!("  {}={}\n{}", variable.name, variable.value, paragraph(variable.meaning, 10));
    }
    text +=
        &format!("\n{}\nExit codes:\n{}\nExample, in two terminals:\n", paragraph(RULES, 2), paragraph(EXIT_STATUS, 2));
    EXAMPLE.lines().for_each(|line| text += &format!("  {line}\n"));
    text
}

/// Returns a text as lines with an indentation.
fn paragraph(text: &str, indentation: usize) -> String {
    let (mut lines, mut line) = (String::new(), String::new());
    for word in text.split_whitespace() {
        if indentation + line.len() + 1 + word.len() > HELP_COLUMNS && !line.is_empty() {
            lines += &format!("{:indentation$}{line}\n", "");
            line.clear();
        }
        line += if line.is_empty() { "" } else { " " };
        line += word;
    }
    lines + &format!("{:indentation$}{line}\n", "")
}

/// What a program joins, and by which library.
#[derive(clap::Args, Default)]
pub struct Joining {
    /// Node of the program: a to z for 127.77.0.1 to 127.77.0.26, an address in 127.77.0.0/16, or a node of the rack
    /// file
    #[arg(long, value_name = "NODE")]
    node: Option<String>,
    /// Rack file, its address in etcd, or directory where programs meet [default: $CROSSLANE_RACK, else under
    /// $XDG_RUNTIME_DIR or /dev/shm]
    #[arg(long, value_name = "FILE|ETCD|DIR")]
    rack: Option<PathBuf>,
    /// Library to preload [default: libcrosslane.so beside this command or under /usr/lib/crosslane]
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
}

/// Options of `crosslane run`.
#[derive(clap::Args)]
#[command(after_long_help = long_help())]
pub struct Options {
    #[command(flatten)]
    joining: Joining,
    /// Server ports whose connections may use lanes, as in 80,443,6000-6100; all others stay on kernel TCP
    #[arg(long, value_name = "PORTS", conflicts_with = "except")]
    only: Option<PortList>,
    /// Server ports that stay on kernel TCP
    #[arg(long, value_name = "PORTS")]
    except: Option<PortList>,
    /// Whether packet filters of the loopback interface apply to connections between programs of one machine: 'honour'
    /// leaves such connections to kernel TCP
    #[arg(long, value_name = "ignore|honour", value_enum)]
    filters: Option<Filters>,
    /// Reset connections that have not got a lane within a second of their first transfer, by the next transfer, with a
    /// line on standard error that says why; one that ends within a second is not reset. Of a pause between two
    /// transfers, a quarter of a second counts
    #[arg(long)]
    require_lane: bool,
    /// Program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM ARGS")]
    command: Vec<OsString>,
}

/// How packet filters of the loopback interface apply to connections that could use a lane.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Filters {
    Ignore,
    Honour,
}

/// The rack directory and the node of the program.
struct Membership {
    rack: PathBuf,
    node: Option<String>,
    /// An error if the program cannot reach other nodes.
    reachability: Result<()>,
}

impl Membership {
    fn new(joining: &Joining) -> Result<Self> {
        match RackChoice::new(joining.rack.as_deref())? {
            RackChoice::Directory(rack) => {
                let node = joining.node.as_deref().map(check_node).transpose()?;
                Ok(Self { rack, node, reachability: Ok(()) })
            }
            RackChoice::File(rack) => Self::of_node(&rack, joining.node.as_deref()),
        }
    }

    fn of_node(rack: &LoadedRack, node: Option<&str>) -> Result<Self> {
        let Some(name) = node else {
            bail!(WrongUse::of(format!("{} describes several nodes; choose one with --node", rack.shown())))
        };
        let slot = rack.slot(name)?;
        let address = rack.file.rack.nodes[slot].address.to_string();
        let directory = rack.run_dir.node(name).directory;
        rack.check_clock(name)?;
        Ok(Self { rack: directory, node: Some(address), reachability: rack.check_up(name) })
    }
}

fn check_node(text: &str) -> Result<String> {
    match stats_page::node_address(text) {
        Some(_) => Ok(text.to_owned()),
        None => bail!(WrongUse::of(format!(
            "node '{text}': not a letter a to z nor an address in 127.77.0.0/16; try --node a"
        ))),
    }
}

/// Executes the program; returns only if that fails.
pub fn main(options: &Options) -> Result<()> {
    // Here and not in the library, which each child of the program loads again.
    if let Some(line) = settings::unknown_variables(std::env::vars_os().map(|(name, _)| name)) {
        eprintln!("crosslane: {line}");
    }
    let required = options.require_lane || inherits_require_lane()?;
    let mut command = command(&options.joining, &options.command, required)?;
    set_environment(&mut command, options);
    let error = command.exec();
    Err(anyhow!("running {}: {error}; check that this machine can run it", Path::new(command.get_program()).display()))
}

/// Returns the command that runs a program with the library. What keeps it from lanes is an error if they are required.
pub fn command(joining: &Joining, words: &[OsString], required: bool) -> Result<Command> {
    let Some((name, arguments)) = words.split_first() else {
        return Err(WrongUse::of("no program given; name one after --").into());
    };
    let Membership { rack, node, reachability } = Membership::new(joining)?;
    let search = std::env::var_os("PATH");
    let path = program::resolve(name, search.as_deref())?;
    let library = library::find(joining.library.as_deref())?;
    let obstacle = program::obstacle(&path, search.as_deref());
    require_or_warn(required, obstacle.as_ref().map_or(Ok(()), |obstacle| Err(anyhow!("{obstacle}"))))?;
    require_or_warn(required, rack_dir::prepare(&rack).and(reachability))?;

    let mut command = Command::new(&path);
    command.arg0(name).args(arguments).env("CROSSLANE_RACK", rack);
    if let Some(node) = node {
        command.env("CROSSLANE_NODE", node);
    }
    if !obstacle.is_some_and(|obstacle| obstacle.rejects_library()) {
        command.env("LD_PRELOAD", with_library(std::env::var_os("LD_PRELOAD"), &library));
        command.env("ASAN_OPTIONS", asan_options(std::env::var_os("ASAN_OPTIONS")));
    }
    Ok(command)
}

/// Returns whether the environment requires lanes. A program that cannot load the library would not check this itself.
fn inherits_require_lane() -> Result<bool> {
    let value = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let is_off = value("CROSSLANE_OFF").is_some_and(|value| stats_page::switch(value.as_encoded_bytes()) == Some(true));
    let Some(given) = value("CROSSLANE_REQUIRE_LANE").filter(|_| !is_off) else { return Ok(false) };
    stats_page::switch(given.as_encoded_bytes()).ok_or_else(|| {
        let shown = given.to_string_lossy();
        let what = "neither on nor off; set 1 (true, yes) or 0 (false, no), or unset it";
        WrongUse::of(format!("CROSSLANE_REQUIRE_LANE='{shown}': {what}")).into()
    })
}

/// Returns an obstacle to lanes as an error if lanes are required, and prints it as a warning otherwise.
fn require_or_warn(required: bool, found: Result<()>) -> Result<()> {
    match found {
        Err(error) if required => Err(error),
        Err(error) => {
            eprintln!("crosslane: {error:#} (runs on kernel TCP)");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

fn set_environment(command: &mut Command, options: &Options) {
    // A port rule given here replaces an inherited rule of either kind.
    for (rule, variable, other) in
        [(&options.only, "CROSSLANE_ONLY", "CROSSLANE_EXCEPT"), (&options.except, "CROSSLANE_EXCEPT", "CROSSLANE_ONLY")]
    {
        if let Some(ports) = rule {
            command.env(variable, ports.to_string()).env_remove(other);
        }
    }
    match options.filters {
        Some(Filters::Honour) => _ = command.env("CROSSLANE_FILTERS", "honour"),
        Some(Filters::Ignore) => _ = command.env_remove("CROSSLANE_FILTERS"),
        None => {}
    }
    if options.require_lane {
        command.env("CROSSLANE_REQUIRE_LANE", "1").env_remove("CROSSLANE_OFF");
    }
}

/// Appends the library to the preloaded libraries, unless it is among them.
fn with_library(loaded: Option<OsString>, library: &Path) -> OsString {
    let name = library::preload_name(library);
    match loaded.filter(|loaded| !loaded.is_empty()) {
        None => name,
        Some(loaded) if names(&loaded).any(|known| known == name || known == library) => loaded,
        Some(mut loaded) => {
            loaded.push(":");
            loaded.push(name);
            loaded
        }
    }
}

/// Returns ASAN_OPTIONS with the check of the library order disabled, unless the user has set that option. The runtime
/// of gcc's AddressSanitizer ends programs in which it is not the first library; it need not be first here, since
/// Crosslane's library finds the runtime's functions after its own.
fn asan_options(given: Option<OsString>) -> OsString {
    const OPTION: &str = "verify_asan_link_order";
    match given.filter(|given| !given.is_empty()) {
        None => format!("{OPTION}=0").into(),
        Some(given) if given.to_string_lossy().contains(OPTION) => given,
        Some(mut given) => {
            given.push(format!(":{OPTION}=0"));
            given
        }
    }
}

fn names(list: &OsStr) -> impl Iterator<Item = &OsStr> {
    use std::os::unix::ffi::OsStrExt;
    list.as_bytes().split(|byte| matches!(byte, b':' | b' ')).map(OsStr::from_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_sanitizer_does_not_check_its_position_unless_the_user_says_so() {
        assert_eq!(asan_options(None), "verify_asan_link_order=0");
        assert_eq!(asan_options(Some("".into())), "verify_asan_link_order=0");
        assert_eq!(asan_options(Some("detect_leaks=0".into())), "detect_leaks=0:verify_asan_link_order=0");
        assert_eq!(asan_options(Some("verify_asan_link_order=1".into())), "verify_asan_link_order=1");
    }

    #[test]
    fn the_library_is_appended_to_the_libraries_that_are_preloaded() {
        let with = |loaded: &str| with_library(Some(loaded.into()), Path::new("/l/libcrosslane.so"));
        let name = library::preload_name(Path::new("/l/libcrosslane.so")).into_string().unwrap();
        assert!(name.ends_with("/l/libcrosslane.so"));
        assert_eq!(with_library(None, Path::new("/l/libcrosslane.so")), *name);
        assert_eq!(with(""), *name);
        assert_eq!(with("/x.so"), *format!("/x.so:{name}"));
        assert_eq!(with(&format!("/x.so:{name}")), *format!("/x.so:{name}"));
        assert_eq!(with("/x.so:/l/libcrosslane.so"), "/x.so:/l/libcrosslane.so");
        assert_eq!(with("/l/libcrosslane.so /y.so"), "/l/libcrosslane.so /y.so");
    }
}
