//! Tests of `crosslane bench windows`.

use std::process::Command;

fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_crosslane")).args(["bench", "windows"]).args(arguments).output();
    let output = output.expect("the command runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_same_seed_gives_the_same_modelled_report() {
    let (code, first, _) = run(&["--sim", "--quick", "--json", "--seed", "5"]);
    assert_eq!(code, Some(0));
    assert_eq!(run(&["--sim", "--quick", "--json", "--seed", "5"]).1, first);
    let report: serde_json::Value = serde_json::from_str(&first).expect("JSON");
    assert_eq!((&report["provenance"], &report["seed"]), (&"modelled".into(), &5.into()));
    assert!(report["scaling"].as_array().expect("rows").len() > 4);
    assert_eq!(report["isolation"].as_array().expect("rows").len(), 4);
}

#[test]
fn wrong_use_is_one_line_with_a_remedy() {
    for arguments in [
        &["--measure"][..],
        &["--sim", "--plot", "x"],
        &["--sim", "--message-bytes", "0"],
        &["--sim", "--message-bytes", "99999"],
    ] {
        let (code, _, error) = run(arguments);
        assert_eq!((code, error.lines().count()), (Some(2), 1), "{error}");
        assert!(error.contains(';'), "{error}");
    }
}
