//! `crosslane rack-dir show`: the group, the rules and the errors of a shared rack.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use serde::Serialize;
use socket::rack::rules::{FILE_BYTES_MAX, Rules};
use socket::rack::shared::{RULES_FILE, SharedRack, SharedRackError};
use stats::{Align, Table};

use super::absolute;
use super::accounts::Group;
use crate::processes::program::user_name;
use crate::rack_dir::shared::{listed_users, user_map};
use crate::wrong_use::WrongUse;
use crate::{lanes, output};

/// The version of the JSON output, which docs/rack-dir.schema.json describes.
pub const SCHEMA: &str = "crosslane-rack-dir/1";

/// Options of `crosslane rack-dir show`.
#[derive(clap::Args)]
pub struct Options {
    /// The shared rack
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Print JSON (schema crosslane-rack-dir/1)
    #[arg(long)]
    json: bool,
}

/// What a shared rack is.
#[derive(Serialize)]
struct Report {
    schema: &'static str,
    directory: PathBuf,
    /// Whether there are no problems.
    usable: bool,
    /// What is wrong, each with the remedy.
    problems: Vec<String>,
    group: GroupReport,
    lanes_off: bool,
    rules: Vec<RuleReport>,
    users: Vec<DirectoryReport>,
}

#[derive(Serialize)]
struct GroupReport {
    gid: u32,
    name: Option<String>,
}

/// A user, by its number on the machine.
#[derive(Serialize)]
struct UserReport {
    uid: u32,
    user: String,
}

#[derive(Serialize)]
struct RuleReport {
    line: usize,
    from: UserReport,
    to: UserReport,
    /// The list as it is written; all ports without one.
    ports: Option<String>,
}

/// The directory of a user.
#[derive(Serialize)]
struct DirectoryReport {
    #[serde(flatten)]
    user: UserReport,
    /// Whether it is that user's, and nobody else may write to it.
    usable: bool,
}

/// Prints the report. Fails if something is wrong.
pub fn main(options: &Options) -> Result<()> {
    let path = absolute(&options.directory)?;
    let report = Report::of(&path)?;
    match options.json {
        true => output::print_json(&report)?,
        false => output::print(&report.text())?,
    }
    match report.problems.len() {
        0 => Ok(()),
        1 => bail!("rack '{}' has a problem; follow the remedy above", path.display()),
        count => bail!("rack '{}' has {count} problems; follow the remedies above", path.display()),
    }
}

impl Report {
    fn of(path: &Path) -> Result<Self> {
        let shown = path.display();
        let found = std::fs::metadata(path).map_err(|error| {
            WrongUse::of(format!("'{shown}': {error}; check the path, or crosslane rack-dir create it"))
        })?;
        if !found.is_dir() {
            bail!(WrongUse::of(format!("'{shown}' is not a directory; name a shared rack")));
        }
        let mut problems = Vec::new();
        let rack = match SharedRack::of(path) {
            Ok(Some(rack)) => Some(rack),
            Ok(None) => {
                problems.push("it is not shared; crosslane rack-dir create makes a shared rack".to_owned());
                None
            }
            Err(error) => {
                problems.push(error.to_string());
                None
            }
        };
        let (rules, wrong) = rack.as_ref().map(rules).unwrap_or_default();
        problems.extend(wrong);
        let users = rack.as_ref().map(|rack| directories(rack, &mut problems)).unwrap_or_default();
        let Group { gid, name } = Group::of(found.gid());
        Ok(Self {
            schema: SCHEMA,
            directory: path.to_owned(),
            usable: problems.is_empty(),
            problems,
            group: GroupReport { gid, name },
            lanes_off: lanes::are_off(path),
            rules,
            users,
        })
    }

    fn text(&self) -> String {
        let GroupReport { gid, name } = &self.group;
        let (group, shown) = (Group { gid: *gid, name: name.clone() }, self.directory.display());
        let off = if self.lanes_off { ", lanes are switched off" } else { "" };
        let mut text = format!("Rack {shown} of group {group}{off}\n");
        for problem in &self.problems {
            text += &format!("Problem: {problem}\n");
        }
        let mut table = Table::new(&[
            ("LINE", Align::Right),
            ("CLIENTS OF", Align::Left),
            ("SERVERS OF", Align::Left),
            ("PORTS", Align::Left),
        ]);
        for rule in &self.rules {
            let ports = rule.ports.clone().unwrap_or_else(|| "all".to_owned());
            table.row(vec![rule.line.to_string(), rule.from.text(), rule.to.text(), ports]);
        }
        text += &match table.is_empty() {
            true => "Nothing is allowed between users.\n".to_owned(),
            false => format!("\n{}", table.render()),
        };
        let users: Vec<String> = self.users.iter().map(|directory| directory.user.text()).collect();
        if !users.is_empty() {
            text += &format!("\nUsers with a directory: {}\n", users.join(", "));
        }
        text
    }
}

impl UserReport {
    fn of(uid: u32) -> Self {
        let user = user_map().here(uid).map_or_else(|| uid.to_string(), user_name);
        Self { uid, user }
    }

    fn text(&self) -> String {
        let Self { uid, user } = self;
        if *user == uid.to_string() { user.clone() } else { format!("{user} ({uid})") }
    }
}

/// Returns the rules, and all errors in them. With an error, programs follow none of the rules.
fn rules(rack: &SharedRack) -> (Vec<RuleReport>, Vec<String>) {
    match rack.read_rules() {
        Ok(_) | Err(SharedRackError::Rules(_)) => {}
        Err(error) => return (Vec::new(), vec![error.to_string()]),
    }
    let bytes = match std::fs::read(rack.path().join(RULES_FILE)) {
        Ok(bytes) => bytes,
        Err(error) => {
            return (Vec::new(), vec![format!("its file '{RULES_FILE}' cannot be read: {error}; repeat this")]);
        }
    };
    if bytes.len() > FILE_BYTES_MAX {
        let error = Rules::parse(&bytes).err().map(SharedRackError::Rules);
        return (Vec::new(), error.iter().map(ToString::to_string).collect());
    }
    let (mut rules, mut problems) = (Vec::new(), Vec::new());
    for (index, line) in String::from_utf8_lossy(&bytes).lines().enumerate() {
        match Rules::parse(line.as_bytes()) {
            Ok(parsed) => rules.extend(parsed.all().iter().map(|rule| RuleReport {
                line: index + 1,
                from: UserReport::of(rule.from),
                to: UserReport::of(rule.to),
                ports: ports(line),
            })),
            Err(mut error) => {
                error.line = index + 1;
                problems.push(SharedRackError::Rules(error).to_string());
            }
        }
    }
    (rules, problems)
}

/// Returns the list of ports of a valid rule, as it is written.
fn ports(line: &str) -> Option<String> {
    let rule = line.split('#').next()?;
    let list: String = rule.split_whitespace().skip_while(|word| *word != "ports").skip(1).collect();
    Some(list).filter(|list| !list.is_empty())
}

/// Returns the directories of users, and adds those with another owner to the problems.
fn directories(rack: &SharedRack, problems: &mut Vec<String>) -> Vec<DirectoryReport> {
    let map = user_map();
    let directory = |uid: u32| {
        let checked = rack.check_user_directory(uid, &map);
        problems.extend(checked.as_ref().err().map(ToString::to_string));
        DirectoryReport { user: UserReport::of(uid), usable: checked.is_ok() }
    };
    listed_users(rack.path()).into_iter().map(directory).collect()
}
