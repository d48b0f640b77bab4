//! Words that the project has retired stay retired.
//!
//! Each was a word of the project's own where the field has one, or a turn of phrase that hid what a sentence says. The
//! list grows with the sweeps over the tree; a word enters it when the last use is gone.

use tidy::{Source, tree};

/// A retired word or phrase in lower case, and what to write instead.
const RETIRED: &[(&str, &str)] = &[
    ("hogs", "CPU-bound threads, CPU contention"),
    ("berth", "CPU affinity, owner CPU"),
    ("roster", "ready list"),
    ("loans", "leases"),
    ("be it", "whether ... or ..."),
    ("crowd", "group, oversubscription"),
    ("crowds", "groups"),
    ("deaf", "stalled, not reading"),
    ("farewell", "cleanup command"),
    ("garble", "corrupt"),
    ("garbles", "corrupts"),
    ("interest set", "epoll set"),
    ("kernelless", "without the kernel"),
    ("knock", "connect, or a connection attempt"),
    ("goes by", "uses, follows, depends on"),
    ("make no sense", "are invalid"),
    ("makes no sense", "is invalid"),
    ("meddle", "change, replace, interfere"),
    ("mended", "fixed, repaired"),
    ("plugs", "open ports"),
    ("somebody's", "another user's, another process's"),
    ("senseless", "invalid"),
    ("spoilt", "corrupted"),
    ("tenure", "the term of the field: ownership, lease"),
    ("untaken", "rejected"),
    ("went no further", "was dropped"),
    ("whose turn", "which thread, which connection"),
    ("befall", "happen to"),
    ("befalls", "happens to"),
    ("as it were", "nothing: say it directly"),
    ("of its own accord", "by itself"),
    ("doors", "acceptors, remote listeners"),
    ("knocks", "connects, probes"),
    ("manners", "spin mode, yielding"),
    ("lost patience", "timed out"),
    ("let go of", "release"),
    ("all there is to it", "nothing: say what there is"),
    ("who finds nothing sleeps", "a waiter that finds nothing blocks"),
    ("struck", "removed, cancelled, interrupted"),
    ("strangers", "other users, unrelated processes, unknown peers"),
    ("sent away", "rejected"),
    ("puts off", "defers"),
    ("put off", "defer, deferred"),
    ("lets go", "releases"),
    ("its kin", "similar errors"),
    ("dear", "costly, expensive"),
    ("luck", "chance"),
    ("lucky", "biased, by chance"),
    ("at the mercy of", "determined by"),
    ("heirs", "successors"),
];

/// Returns the lines of a source that use a retired word.
fn uses(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    for (index, line) in source.text.lines().enumerate() {
        let line = line.to_lowercase();
        for (word, instead) in RETIRED {
            if contains_word(&line, word) {
                found.push(format!("{}:{}: '{word}' is retired; write: {instead}", source.path, index + 1));
            }
        }
    }
    found
}

/// Returns whether `word` occurs in `line` with no letter, digit or underscore beside it.
fn contains_word(line: &str, word: &str) -> bool {
    let is_part = |letter: Option<char>| letter.is_some_and(|letter| letter.is_alphanumeric() || letter == '_');
    line.match_indices(word)
        .any(|(at, _)| !is_part(line[..at].chars().next_back()) && !is_part(line[at + word.len()..].chars().next()))
}

#[test]
fn no_source_or_document_uses_a_retired_word() {
    let root = tree::root();
    let sources = tree::sources(&root).expect("the repository is readable");
    let is_checked = |source: &&Source| !source.path.ends_with("tidy/tests/words.rs");
    let found: Vec<String> = sources.iter().filter(is_checked).flat_map(uses).collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn a_word_is_found_whole_and_in_any_case() {
    assert!(contains_word("a berth, of sorts", "berth"));
    assert!(!contains_word("berthing", "berth") && !contains_word("my_berth", "berth"));
    assert_eq!(uses(&Source::new("a.rs", "// Hogs\n")).len(), 1);
}
