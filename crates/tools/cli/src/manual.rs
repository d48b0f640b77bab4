//! Shell completions and manual pages, generated from the definitions of the command line, and for file formats from
//! the project's documents.

mod formats;
mod markdown;
mod schema;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, italic, roman};
use stats_page::{RULES, VARIABLES};

use self::formats::FORMATS;
use crate::{output, run};

/// Options of `crosslane completions`.
#[derive(clap::Args)]
pub struct CompletionOptions {
    /// The shell
    shell: Shell,
}

/// Options of `crosslane manual`.
#[derive(clap::Args)]
pub struct ManualOptions {
    /// The directory of the pages, such as PREFIX/share/man
    directory: PathBuf,
}

/// Prints the completions of a shell.
pub fn completions(options: &CompletionOptions, mut command: Command) -> Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(options.shell, &mut command, "crosslane", &mut text);
    output::print(&String::from_utf8_lossy(&text))
}

/// Writes a manual page for each command, for each file format, for the environment and for troubleshooting, into a
/// directory.
pub fn manual(options: &ManualOptions, mut command: Command) -> Result<()> {
    let directory = &options.directory;
    command.build();
    write_commands(directory, &command)?;
    for format in FORMATS {
        let mut page = Vec::new();
        format.page(&mut page)?;
        write_page(directory, 5, format.name, &page)?;
    }
    let mut page = Vec::new();
    environment_page(&mut page)?;
    write_page(directory, 7, "crosslane-environment", &page)?;
    let mut page = Vec::new();
    troubleshooting_page(&mut page)?;
    write_page(directory, 7, "crosslane-troubleshooting", &page)
}

/// Writes the page of a command and of all commands below it.
fn write_commands(directory: &Path, command: &Command) -> Result<()> {
    let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
    let mut page = Vec::new();
    command_page(command, &name, &mut page)?;
    write_page(directory, 1, &name, &page)?;
    for below in command.get_subcommands().filter(|below| !below.is_hide_set() && below.get_name() != "help") {
        write_commands(directory, below)?;
    }
    Ok(())
}

fn write_page(directory: &Path, section: u8, name: &str, page: &[u8]) -> Result<()> {
    let folder = directory.join(format!("man{section}"));
    fs::create_dir_all(&folder).with_context(|| format!("directory '{}'", folder.display()))?;
    let path = folder.join(format!("{name}.{section}"));
    // No date and no commit, so that a page changes only when its text does. Lines end at words, and names stay whole.
    let source = format!("crosslane {}", env!("CARGO_PKG_VERSION"));
    let title = format!(".TH {} {section} \"\" \"{source}\" Crosslane\n.ad l\n.nh\n", name.to_uppercase());
    fs::write(&path, [title.as_bytes(), page].concat()).with_context(|| format!("page '{}'", path.display()))
}

fn command_page(command: &Command, name: &str, page: &mut Vec<u8>) -> Result<()> {
    let man = Man::new(command.clone());
    man.render_name_section(page)?;
    man.render_synopsis_section(page)?;
    man.render_description_section(page)?;
    if command.get_arguments().any(|argument| !argument.is_hide_set()) {
        man.render_options_section(page)?;
    }
    if command.get_subcommands().any(|below| !below.is_hide_set()) {
        man.render_subcommands_section(page)?;
    }
    let mut rest = Roff::new();
    if name == "crosslane-run" {
        variables(&mut rest);
        rest.control("SH", ["EXAMPLE"]).text([roman("In one terminal a server, in another one its client:")]);
        rest.control("PP", []).control("EX", []);
        run::EXAMPLE.lines().for_each(|line| _ = rest.text([roman(line)]));
        rest.control("EE", []);
    }
    rest.control("SH", ["EXIT STATUS"]).text([roman(EXIT_STATUS)]);
    if name == "crosslane-run" {
        rest.text([roman(run::EXIT_STATUS)]);
    }
    rest.control("SH", ["SEE ALSO"]).text(see_also(command, name));
    rest.to_writer(page)?;
    Ok(())
}

const EXIT_STATUS: &str = "0: success. 1: failure. 2: wrong use. An error is one line that names the thing, the value \
                           and the remedy.";

fn see_also(command: &Command, name: &str) -> Vec<clap_mangen::roff::Inline> {
    let parent = name.rsplit_once('-').map(|(parent, _)| parent.to_owned());
    let below = command.get_subcommands().filter(|below| !below.is_hide_set() && below.get_name() != "help");
    let below = below.map(|below| below.get_display_name().unwrap_or(below.get_name()).to_owned());
    let commands = parent.into_iter().chain(below).map(|name| (name, "(1)"));
    let formats = FORMATS.iter().filter(|format| format.is_of(name)).map(|format| (format.name.to_owned(), "(5)"));
    let guides = ["crosslane-environment", "crosslane-troubleshooting"].map(|name| (name.to_owned(), "(7)"));
    let pages = commands.chain(formats).chain(guides);
    let mut inlines = Vec::new();
    for (name, section) in pages {
        if !inlines.is_empty() {
            inlines.push(roman(", "));
        }
        inlines.extend([bold(name), roman(section)]);
    }
    inlines
}

fn troubleshooting_page(page: &mut Vec<u8>) -> Result<()> {
    let mut roff = Roff::new();
    roff.control("SH", ["NAME"])
        .text([roman("crosslane-troubleshooting - why a connection is not on a lane, and what to do")]);
    roff.control("SH", ["DESCRIPTION"]);
    let (introduction, sections) = markdown::chapters(include_str!("../../../../docs/troubleshooting.md"));
    markdown::render(&mut roff, introduction);
    for (heading, section) in sections {
        roff.control("SH", [heading.to_uppercase().as_str()]);
        markdown::render(&mut roff, section);
    }
    let pages = ["crosslane-explain", "crosslane-stat", "crosslane-doctor", "crosslane-run"];
    let pages = pages.iter().flat_map(|name| [bold(*name), roman("(1), ")]);
    let pages = pages.chain([bold("crosslane-environment"), roman("(7)")]);
    roff.control("SH", ["SEE ALSO"]).text(pages.collect::<Vec<_>>());
    roff.to_writer(page)?;
    Ok(())
}

fn environment_page(page: &mut Vec<u8>) -> Result<()> {
    let mut roff = Roff::new();
    roff.control("SH", ["NAME"])
        .text([roman("crosslane-environment - environment variables of the Crosslane library")]);
    roff.control("SH", ["DESCRIPTION"]).text([roman(
        "A program uses lanes if the dynamic linker loads libcrosslane.so into it, which crosslane run arranges by \
         LD_PRELOAD. The library reads these variables once, when it is loaded.",
    )]);
    variables(&mut roff);
    roff.control("SH", ["SEE ALSO"]).text([bold("crosslane-run"), roman("(1), "), bold("ld.so"), roman("(8)")]);
    roff.to_writer(page)?;
    Ok(())
}

/// Appends the section on the variables.
fn variables(roff: &mut Roff) {
    roff.control("SH", ["ENVIRONMENT"]);
    for variable in VARIABLES {
        roff.control("TP", []).text([bold(variable.name), roman("="), italic(variable.value)]);
        roff.text([roman(variable.meaning)]);
    }
    roff.control("PP", []).text([roman(RULES)]);
}
