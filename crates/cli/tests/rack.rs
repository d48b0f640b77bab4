//! Racks from outside: the example, and programs as its nodes.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

mod command;

use command::{CROSSLANE, assert_fails, crosslane, error_line, stdout};

/// A folder with a rack file in it, in which everything of the rack lies.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new(arguments: &[&str]) -> Self {
        let place = Self { folder: tempfile::tempdir().unwrap() };
        let example = crosslane(&[&["rack", "example"], arguments].concat());
        assert!(example.status.success(), "{example:?}");
        fs::write(place.file(), example.stdout).unwrap();
        place
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("r.toml")
    }

    /// The command with an environment in which racks lie in this folder.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(CROSSLANE);
        command.args(arguments).env("CROSSLANE_RACK", self.folder.path().join("base")).current_dir(self.folder.path());
        for variable in ["NODE", "ONLY", "EXCEPT", "REQUIRE_LANE", "OFF"] {
            command.env_remove(format!("CROSSLANE_{variable}"));
        }
        command
    }

    fn output(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }
}

#[test]
fn an_example_describes_nodes_by_letter_with_what_was_asked_for() {
    let text = stdout(&crosslane(&["rack", "example", "--nodes", "3", "--link", "gen5x16", "--trust", "direct"]));
    for line in
        ["name = \"c\"", "address = \"127.77.0.3\"", "timing = \"gen5x16\"", "trust = \"direct\"", "backend = \"shm\""]
    {
        assert!(text.contains(line), "{line} in\n{text}");
    }
    assert!(!text.contains("127.77.0.4"));
    assert!(!stdout(&crosslane(&["rack", "example", "--nodes", "2", "--backend", "shm"])).contains("timing"));
}

#[test]
fn an_example_of_something_unknown_is_wrong_use() {
    for (option, value, word) in [
        ("--nodes", "1", "2..=26"),
        ("--nodes", "27", "2..=26"),
        ("--backend", "ib", "choose one of shm, pci, dax"),
        ("--link", "gen2", "ntb"),
        ("--trust", "none", "direct"),
    ] {
        assert_fails(&crosslane(&["rack", "example", option, value]), 2, &[value, word]);
    }
}

#[test]
fn a_bad_rack_file_is_one_line_and_exit_code_2_and_nothing_is_started() {
    let place = Place::new(&[]);
    let good = fs::read_to_string(place.file()).unwrap();
    fs::write(place.file(), good.replace("127.77.0.2", "127.77.0.1")).unwrap();
    let bad = place.output(&["run", "--rack", "r.toml", "--node", "a", "--", "echo"]);
    assert_fails(&bad, 2, &["r.toml, line", "nodes[1].address", "'127.77.0.1'", "its own"]);
    let missing = place.output(&["run", "--rack", "none.toml", "--node", "a", "--", "echo"]);
    assert_fails(&missing, 2, &["none.toml", "--rack"]);
    assert!(!place.folder.path().join("base").exists() && !place.folder.path().join("none.toml").exists());
}

#[test]
fn a_program_must_say_which_node_of_the_rack_it_is() {
    let place = Place::new(&[]);
    let run = |arguments: &[&str]| place.output(&[&["run", "--rack", "r.toml"], arguments].concat());
    assert_fails(&run(&["--", "true"]), 2, &["r.toml", "--node"]);
    assert_fails(&run(&["--node", "q", "--", "true"]), 2, &["'q'", "r.toml", "one of a, b"]);
}

#[test]
fn a_program_of_a_rack_that_is_not_up_is_warned_or_refused() {
    let place = Place::new(&[]);
    let source = std::env::current_exe().unwrap();
    // Any shared library does: this is about what the command says.
    let library = fs::read_dir(source.parent().unwrap())
        .unwrap()
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "so"))
        .expect("a build has shared libraries");
    let library = library.to_str().unwrap();
    let run = |strict: &[&str], program: &[&str]| {
        let head = ["run", "--library", library, "--rack", "r.toml", "--node", "b"];
        place.output(&[&head[..], strict, &["--"], program].concat())
    };
    assert_fails(&run(&["--require-lane"], &["true"]), 1, &["'b'", "not up", "crosslane up --rack r.toml"]);
    let lenient = run(&[], &["env"]);
    assert!(error_line(&lenient).contains("kernel TCP"));
    let variable = |name: &str| {
        let text = stdout(&lenient);
        let line = text.lines().find_map(|line| line.strip_prefix(name).map(str::to_owned));
        line.unwrap_or_else(|| panic!("{name} in {text}"))
    };
    assert_eq!(variable("CROSSLANE_NODE="), "127.77.0.2");
    let rack = PathBuf::from(variable("CROSSLANE_RACK="));
    assert!(rack.is_dir() && rack.ends_with("b") && rack.starts_with(place.folder.path().join("base/racks")));
}
