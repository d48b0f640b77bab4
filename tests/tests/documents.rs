//! The commands of README.md and docs/deploy.md: each block is run as it would be copied, in order, on a machine with
//! an installed Crosslane. What a page does to files, processes and networks is in namespaces that end with the test.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use pulldown_cmark::{CodeBlockKind, Event, Parser, Tag, TagEnd};
use system_tests::paths::{self, package_file, repository, tool};
use system_tests::{Finished, Process, WAIT_MAX, is_root};
use tempfile::TempDir;

/// All commands of a page take seconds; some wait until a server answers.
const PAGE_LIMIT: Duration = Duration::from_secs(120);

/// Commands that are not run, and why. Every other command is.
const NOT_RUN: [(&str, &str); 4] = [
    ("./x demo", "it measures for minutes"),
    ("./x test", "it runs this test"),
    ("./x install", "tests/tests/install.rs installs"),
    ("./x package", "./x exam builds, installs and removes the packages"),
];
/// The languages of blocks. A file of language `yaml` is for a cluster, which no test has: the commands of docker on
/// the page run the same.
const LANGUAGES: [&str; 4] = ["sh", "ini", "yaml", "text"];

/// A code block of a page.
struct Block {
    /// `sh`: commands; `ini`: a file, whose first line names it.
    language: String,
    text: String,
}

/// Returns the code blocks of a page and its code spans. Blocks must name their language.
fn read(page: &str) -> (Vec<Block>, Vec<String>) {
    let markdown = fs::read_to_string(repository().join(page)).expect("a page");
    let (mut blocks, mut spans, mut language): (Vec<Block>, Vec<String>, Option<String>) =
        (Vec::new(), Vec::new(), None);
    let mut options = pulldown_cmark::Options::empty();
    options.insert(pulldown_cmark::Options::ENABLE_TABLES);
    for event in Parser::new_ext(&markdown, options) {
        match event {
            Event::Start(Tag::CodeBlock(kind)) => {
                let CodeBlockKind::Fenced(found) = kind else { panic!("{page}: an indented block: use a fenced one") };
                assert!(LANGUAGES.contains(&&*found), "{page}: a block of language '{found}'");
                language = Some(found.to_string());
                blocks.push(Block { language: found.to_string(), text: String::new() });
            }
            Event::End(TagEnd::CodeBlock) => language = None,
            Event::Text(text) if language.is_some() => blocks.last_mut().expect("a block").text += &text,
            Event::Code(text) => spans.push(text.to_string()),
            _ => {}
        }
    }
    (blocks, spans)
}

/// Returns the commands of a block that are run; `skipped` gets those of [`NOT_RUN`].
fn commands(text: &str, skipped: &mut Vec<&'static str>) -> String {
    let mut run = String::new();
    for line in text.lines() {
        match NOT_RUN.iter().find(|(command, _)| line.starts_with(command)) {
            Some((command, _)) => skipped.push(command),
            None => writeln!(run, "{line}").expect("memory"),
        }
    }
    run
}

/// Returns a script with all commands and files of a page.
fn script(blocks: &[Block], skipped: &mut Vec<&'static str>) -> String {
    let mut script = format!(". {}\nprepare_machine >&2\n", package_file("documents/stand-ins.sh").display());
    for block in blocks {
        match block.language.as_str() {
            "sh" => script += &commands(&block.text, skipped),
            "ini" => {
                let (name, rest) = block.text.split_once('\n').expect("a file");
                let name = name.strip_prefix("# ").expect("the first line of a file names it");
                let folder = format!("mkdir -p \"$(dirname {name})\"");
                script += &format!("{folder}\ncat >{name} <<'END OF FILE'\n{rest}END OF FILE\n");
            }
            _ => {}
        }
    }
    script
}

/// The machine of a page: a working directory, an installation, and namespaces.
struct Machine {
    folder: TempDir,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("page-").tempdir_in("/tmp").expect("a folder");
        for name in ["work", "layers"] {
            fs::create_dir(folder.path().join(name)).expect("a folder");
        }
        let release = paths::crosslane();
        let release = release.parent().expect("a folder");
        let mut package = Command::new(repository().join("scripts/package"));
        package.arg("tree").arg(release).arg(folder.path().join("tree"));
        Process::start(&mut package).wait(WAIT_MAX).must_succeed();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, script: &str) -> Finished {
        let file = self.path("page.sh");
        fs::write(&file, script).expect("a script");
        let mut command = Command::new(tool("unshare"));
        command.args(["--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]);
        command.args(["bash", "-euxo", "pipefail"]).arg(&file).current_dir(self.path("work")).env_clear();
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", self.path("work"));
        command.env("TREE", self.path("tree")).env("LAYERS", self.path("layers"));
        Process::start(&mut command).wait(PAGE_LIMIT)
    }
}

/// Runs the commands of a page. Returns what they printed, the commands that were not run, and the machine.
fn run_page(page: &str) -> (Finished, Vec<&'static str>, Machine) {
    let (blocks, _) = read(page);
    let (mut skipped, machine) = (Vec::new(), Machine::new());
    let finished = machine.run(&script(&blocks, &mut skipped)).must_succeed();
    (finished, skipped, machine)
}

#[test]
fn the_commands_of_the_readme_run_as_they_are() {
    if !is_root() {
        eprintln!("skipped: only root can make namespaces");
        return;
    }
    let (finished, skipped, _machine) = run_page("README.md");
    assert_eq!(finished.stdout.lines().filter(|line| *line == "PONG").count(), 2, "{finished}");
    assert_eq!(skipped, NOT_RUN.map(|(command, _)| command), "a command of NOT_RUN is not on the page");
    for words in ["LANES", "PROXY OF", "rack.toml is down", "All numbers are modelled", "goodput", "QP contexts"] {
        assert!(finished.stdout.contains(words), "{words:?} is missing: {finished}");
    }
}

#[test]
fn the_commands_of_the_deployment_page_run_as_they_are() {
    if !is_root() {
        eprintln!("skipped: only root can make namespaces");
        return;
    }
    let (finished, skipped, machine) = run_page("docs/deploy.md");
    assert_eq!(skipped, [""; 0]);
    // systemd, docker, supervisord twice, the server that is measured.
    assert_eq!(finished.stdout.lines().filter(|line| *line == "PONG").count(), 5, "{finished}");
    for words in ["wall time", "lane memory", "use kernel TCP", "Shut down"] {
        assert!(finished.stdout.contains(words), "{words:?} is missing: {finished}");
    }
    let result = fs::read_to_string(machine.path("work/result.json")).expect("a result");
    let result: serde_json::Value = serde_json::from_str(&result).expect("JSON");
    assert_eq!(result["connections"]["lane"], 2);
}

#[test]
fn commands_in_running_text_have_the_options_that_they_show() {
    for page in ["README.md", "docs/deploy.md", "docs/limits.md", "SECURITY.md"] {
        let (_, spans) = read(page);
        let commands = spans.iter().filter_map(|span| span.strip_prefix("crosslane "));
        for command in commands.filter(|command| command.starts_with(|letter: char| letter.is_ascii_lowercase())) {
            check_options(page, command);
        }
    }
}

/// Checks that a subcommand exists and that its help has the options that are shown before `--`.
fn check_options(page: &str, command: &str) {
    let words: Vec<&str> = command.split([' ', '=']).take_while(|word| *word != "--").collect();
    let subcommands = words.iter().take_while(|word| !word.starts_with('-') && word.chars().all(is_of_a_name));
    let help = Process::start(Command::new(paths::crosslane()).args(subcommands).arg("--help")).wait(WAIT_MAX);
    assert_eq!(help.code(), Some(0), "{page}: `crosslane {command}`: {help}");
    for option in words.iter().filter(|word| word.starts_with("--")) {
        assert!(help.stdout.contains(option), "{page}: `crosslane {command}` has no {option}:\n{help}");
    }
}

fn is_of_a_name(letter: char) -> bool {
    letter.is_ascii_lowercase() || letter == '-'
}
