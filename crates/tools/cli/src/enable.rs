//! `crosslane enable` and `crosslane disable`: a systemd drop-in by which a service runs with lanes.

mod drop_in;
mod filters;
mod name;
mod paths;
mod plan;
mod unit;
mod unit_file;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use socket::rack::shared::SharedRack;

use self::drop_in::{DropIn, FILE_NAME, Found};
use self::name::ServiceName;
use self::plan::{Plan, Wanted};
use self::unit::{NewDropIn, Unit, UnitFiles};
use crate::wrong_use::WrongUse;
use crate::{library, output, rack_dir};

/// The rack without `--rack` and `CROSSLANE_RACK`.
const RACK_DEFAULT: &str = "/var/lib/crosslane";
/// A directory that exists while systemd is the first process (sd_booted(3)).
const SYSTEMD_RUNS: &str = "/run/systemd/system";

/// Options of `crosslane enable`.
#[derive(clap::Args)]
pub struct Options {
    /// The service, such as redis-server, or an instance of a template, such as redis-server@second
    #[arg(value_name = "SERVICE")]
    service: String,
    /// Write nothing: print what would be written and what stands in the way, and exit with 1 if anything does
    #[arg(long)]
    check: bool,
    /// The shared rack [default: $CROSSLANE_RACK, else /var/lib/crosslane]
    #[arg(long, value_name = "DIR")]
    rack: Option<PathBuf>,
    /// Reset connections that have not got a lane within a second, as 'crosslane run --require-lane' does
    #[arg(long)]
    require_lane: bool,
    /// Library to preload [default: libcrosslane.so beside this command or under /usr/lib/crosslane]
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// Directory below which the unit files and the programs of services are, such as an image
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
}

/// Options of `crosslane disable`.
#[derive(clap::Args)]
pub struct DisableOptions {
    /// The service
    #[arg(value_name = "SERVICE")]
    service: String,
    /// Directory below which the unit files are, such as an image
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
}

/// Writes the drop-in, or only says what it would contain.
pub fn enable(options: &Options) -> Result<()> {
    require_root("enable")?;
    let name = ServiceName::parse(&options.service)?;
    let files = unit_files(&options.root)?;
    let own_name = files.own_name(&name)?;
    let drop_in = DropIn::of(&own_name, &files);
    let rack = shared_rack(options.rack.as_deref())?;
    let library = library::find_for_units(options.library.as_deref())?;
    let rules = rack.read_rules().map_err(|error| rack_dir::unusable(rack.path(), &error))?;
    let wanted = Wanted {
        rack: rack.path(),
        rules: &rules,
        library: &library,
        requires_lane: options.require_lane,
        files: &files,
        number_of,
    };

    let load = |text| -> Result<Unit> { files.load(&name, NewDropIn { file_name: FILE_NAME, text }) };
    let mut plan = Plan::new(&load("")?, &wanted);
    let text = DropIn::text(&own_name, &plan.lines());
    if plan.obstacles.is_empty() {
        plan.obstacles.extend(plan.overridden(&load(&text)?, &wanted));
    }
    let found = drop_in.found()?;
    let shown = drop_in.path().display();
    if found == Found::Foreign {
        plan.obstacles.push(format!("'{shown}' was not written by crosslane enable; remove or rename it"));
    }

    let is_written = found == Found::Own(text.clone());
    let is_fine = plan.obstacles.is_empty();
    if is_fine && !options.check && !is_written {
        drop_in.write(&text)?;
    }
    output::print(&report(&plan, &text, &heading(options, &drop_in, is_fine, is_written)))?;
    match plan.obstacles.len() {
        0 => {}
        1 => bail!("service '{}': 1 obstacle; follow the remedy above", own_name.short()),
        count => bail!("service '{}': {count} obstacles; follow the remedies above", own_name.short()),
    }
    if options.check { Ok(()) } else { go_on(&own_name, &options.root) }
}

/// Removes the drop-in, if there is one.
pub fn disable(options: &DisableOptions) -> Result<()> {
    require_root("disable")?;
    let name = ServiceName::parse(&options.service)?;
    let files = unit_files(&options.root)?;
    // The unit may have been removed meanwhile.
    let name = files.own_name(&name).unwrap_or(name);
    let drop_in = DropIn::of(&name, &files);
    let (shown, short) = (drop_in.path().display(), name.short());
    match drop_in.found()? {
        Found::Nothing => output::print(&format!("Service {short} has no drop-in {shown}: nothing to do.\n")),
        Found::Foreign => bail!("'{shown}' was not written by crosslane enable; remove it yourself"),
        Found::Own(_) => {
            drop_in.remove()?;
            output::print(&format!("Removed {shown}.\n"))?;
            go_on(&name, &options.root)
        }
    }
}

fn heading(options: &Options, drop_in: &DropIn, is_fine: bool, is_written: bool) -> String {
    let shown = drop_in.path().display();
    match (is_fine, options.check) {
        _ if is_written => format!("{shown} is written already:"),
        (true, false) => format!("Wrote {shown}:"),
        (true, true) => format!("Would write {shown}:"),
        (false, _) => format!("Would write {shown}, if nothing stood in the way:"),
    }
}

fn report(plan: &Plan, text: &str, heading: &str) -> String {
    let mut report = format!("{heading}\n\n{text}\n");
    for (what, lines) in [("In the way", &plan.obstacles), ("Note", &plan.notes)] {
        lines.iter().for_each(|line| report += &format!("{what}: {line}\n"));
    }
    report
}

/// Makes a running systemd read its units again, and prints how to go on.
fn go_on(service: &ServiceName, root: &Path) -> Result<()> {
    let quote = if service.is_template() { "'" } else { "" };
    let all = if service.is_template() { "*" } else { "" };
    let restart = format!("systemctl restart {quote}{}{all}{quote}", service.short());
    if root != Path::new("/") {
        return Ok(());
    }
    if !Path::new(SYSTEMD_RUNS).is_dir() {
        return output::print(&format!("Next: systemctl daemon-reload && {restart}\n"));
    }
    let failed = |why: &str| format!("systemctl daemon-reload: {why}; repeat it, then {restart}");
    let output = Command::new("systemctl").arg("daemon-reload").output();
    let output = output.with_context(|| failed("it cannot be started"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let why = text.lines().next().unwrap_or_default();
        bail!(failed(&format!("{} {why}", output.status)));
    }
    output::print(&format!("Next: {restart}\n"))
}

fn require_root(command: &str) -> Result<()> {
    let user = rustix::process::geteuid();
    if user.is_root() {
        return Ok(());
    }
    Err(WrongUse::of(format!("{command}: user {} is not root; run it as root", user.as_raw())).into())
}

/// Returns the number of a user, given by name or number.
fn number_of(user: &str) -> Option<u32> {
    let account = || nix::unistd::User::from_name(user).ok().flatten().map(|account| account.uid.as_raw());
    user.parse().ok().or_else(account)
}

fn unit_files(root: &Path) -> Result<UnitFiles> {
    if !root.is_dir() {
        return Err(WrongUse::of(format!("--root '{}' is not a directory; name one", root.display())).into());
    }
    Ok(UnitFiles::below(root))
}

/// Returns the shared rack that the service is to use, by a path without links.
fn shared_rack(given: Option<&Path>) -> Result<SharedRack> {
    let variable = std::env::var_os("CROSSLANE_RACK").filter(|value| !value.is_empty()).map(PathBuf::from);
    let (path, named) = match (given, variable) {
        (Some(path), _) => (path.to_owned(), "--rack"),
        (None, Some(path)) => (path, "CROSSLANE_RACK"),
        (None, None) => (PathBuf::from(RACK_DEFAULT), "the default without --rack"),
    };
    let shown = path.display();
    let create = format!("crosslane rack-dir create {shown} --group GROUP, or name another with --rack");
    let missing = |error| WrongUse::of(format!("rack '{shown}' ({named}): {error}; {create}"));
    let path = std::fs::canonicalize(&path).map_err(missing)?;
    check_path("rack", &path)?;
    let shared = rack_dir::shared(&path)?;
    Ok(shared.ok_or_else(|| WrongUse::of(format!("rack '{shown}' ({named}) is not shared; {create}")))?)
}

/// Checks that a path can be written to a unit file without quotes, and divided from others by a colon.
fn check_path(what: &str, path: &Path) -> Result<()> {
    let is_special = |letter: char| letter.is_whitespace() || letter.is_control() || "\"'\\:".contains(letter);
    if path.to_str().is_none_or(|path| path.contains(is_special)) {
        let shown = path.to_string_lossy();
        let why = "has a blank, a quote, a backslash or a colon in its path";
        return Err(WrongUse::of(format!("{what} '{}' {why}; move it", shown.escape_debug())).into());
    }
    Ok(())
}
