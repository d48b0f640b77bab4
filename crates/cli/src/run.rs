//! `crosslane run`: sets the environment that the library reads, and becomes the program.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, anyhow, bail};

use crate::ports::PortList;
use crate::{library, program, rack};

/// What to run, and how.
#[derive(clap::Args)]
pub struct Options {
    /// Node to be: a to z for 127.77.0.1 to 127.77.0.26, or an address in 127.77.0.0/16
    #[arg(long, value_name = "NODE", value_parser = parse_node)]
    node: Option<String>,
    /// Server ports that take lanes, as in 80,443,6000-6100; all others stay on kernel TCP
    #[arg(long, value_name = "PORTS", conflicts_with = "except")]
    only: Option<PortList>,
    /// Server ports that stay on kernel TCP
    #[arg(long, value_name = "PORTS")]
    except: Option<PortList>,
    /// Make a connection that gets no lane an error instead of a kernel TCP connection
    #[arg(long)]
    require_lane: bool,
    /// Directory in which programs meet [default: $CROSSLANE_RACK, else under $XDG_RUNTIME_DIR or /dev/shm]
    #[arg(long, value_name = "DIR")]
    rack: Option<PathBuf>,
    /// The library to load [default: libcrosslane.so beside this command or under /usr/lib/crosslane]
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM ARGS")]
    command: Vec<OsString>,
}

fn parse_node(text: &str) -> Result<String, String> {
    match ledger::node_address(text) {
        Some(_) => Ok(text.to_owned()),
        None => Err("not a letter a to z nor an address in 127.77.0.0/16; try --node a".to_owned()),
    }
}

/// Becomes the program; returns only when that fails.
pub fn main(options: &Options) -> Result<()> {
    let Some((name, arguments)) = options.command.split_first() else { bail!("no program given; name one after --") };
    let search = std::env::var_os("PATH");
    let path = program::resolve(name, search.as_deref())?;
    let library = library::find(options.library.as_deref())?;
    let obstacle = program::obstacle(&path, search.as_deref());
    demand_lane(options.require_lane, obstacle.as_ref().map_or(Ok(()), |obstacle| Err(anyhow!("{obstacle}"))))?;
    let rack = rack::chosen(options.rack.as_deref());
    demand_lane(options.require_lane, rack::prepare(&rack))?;

    let mut command = Command::new(&path);
    command.arg0(name).args(arguments);
    set_environment(&mut command, options, &rack);
    if !obstacle.is_some_and(|obstacle| obstacle.rejects_library()) {
        command.env("LD_PRELOAD", with_library(std::env::var_os("LD_PRELOAD"), &library));
    }
    let error = command.exec();
    Err(anyhow!("running {}: {error}; check that this machine can run it", path.display()))
}

/// What stands in the way of lanes is an error where they are required, and a warning where they are not.
fn demand_lane(required: bool, found: Result<()>) -> Result<()> {
    match found {
        Err(error) if required => Err(error),
        Err(error) => {
            eprintln!("crosslane: {error:#} (runs on kernel TCP)");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

fn set_environment(command: &mut Command, options: &Options, rack: &Path) {
    command.env("CROSSLANE_RACK", rack);
    if let Some(node) = &options.node {
        command.env("CROSSLANE_NODE", node);
    }
    // Of two rules for ports, the one given here replaces the one inherited, whichever kind that was.
    for (rule, variable, other) in
        [(&options.only, "CROSSLANE_ONLY", "CROSSLANE_EXCEPT"), (&options.except, "CROSSLANE_EXCEPT", "CROSSLANE_ONLY")]
    {
        if let Some(ports) = rule {
            command.env(variable, ports.to_string()).env_remove(other);
        }
    }
    if options.require_lane {
        command.env("CROSSLANE_REQUIRE_LANE", "1").env_remove("CROSSLANE_OFF");
    }
}

/// The library behind whatever is loaded already, once.
fn with_library(loaded: Option<OsString>, library: &Path) -> OsString {
    let library = library.as_os_str();
    match loaded.filter(|loaded| !loaded.is_empty()) {
        None => library.to_owned(),
        Some(loaded) if names(&loaded).any(|name| name == library) => loaded,
        Some(mut loaded) => {
            loaded.push(":");
            loaded.push(library);
            loaded
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
    fn the_library_goes_behind_what_is_loaded_already() {
        let with = |loaded: &str| with_library(Some(loaded.into()), Path::new("/l/libcrosslane.so"));
        assert_eq!(with_library(None, Path::new("/l/libcrosslane.so")), "/l/libcrosslane.so");
        assert_eq!(with(""), "/l/libcrosslane.so");
        assert_eq!(with("/x.so"), "/x.so:/l/libcrosslane.so");
        assert_eq!(with("/x.so:/l/libcrosslane.so"), "/x.so:/l/libcrosslane.so");
        assert_eq!(with("/l/libcrosslane.so /y.so"), "/l/libcrosslane.so /y.so");
    }
}
