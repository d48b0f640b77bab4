//! Checks of Rust, over tokens: what stands in a comment or a string is nobody's business.

use std::str::FromStr;

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

use crate::{FUNCTION_LINES_MAX, Offence, Source};

/// Crates that may say `unsafe`: memory another party can write, raw spans of callers, the C boundary, and what
/// measures or attacks them.
pub const UNSAFE_CRATES: [&str; 14] = [
    "volmem",
    "fabric",
    "lane",
    "lane-c",
    "wait",
    "segment",
    "socket",
    "preload",
    "stats-page",
    "fib",
    "bench",
    "pcie-bench",
    "router-ports",
    "system-tests",
];

/// Crates whose atomics come from volmem's facade, so that a model checker can take their place.
pub const MODELLED_CRATES: [&str; 1] = ["lane"];

/// Crates that must not call libc's `syscall`, because it would be the one that they stand behind.
pub const RAW_CALL_CRATES: [&str; 1] = ["socket"];

/// Macros that mark a program as unfinished.
const UNFINISHED_MACROS: [&str; 3] = ["todo", "unimplemented", "dbg"];

/// All checks of Rust.
pub fn check(source: &Source) -> Vec<Offence> {
    let mut visitor = Visitor { source, offences: Vec::new() };
    match TokenStream::from_str(&source.text) {
        Ok(tokens) => visitor.stream(tokens, ""),
        Err(error) => visitor.offend(error.span().start().line, format!("not Rust: {error}")),
    }
    visitor.offences
}

struct Visitor<'a> {
    source: &'a Source,
    offences: Vec<Offence>,
}

impl Visitor<'_> {
    fn offend(&mut self, line: usize, what: impl Into<String>) {
        self.offences.push(self.source.offence(line, what));
    }

    /// Looks at every token; `path_outer` is the path that a brace of a `use` continues, such as `std::sync`.
    fn stream(&mut self, stream: TokenStream, path_outer: &str) {
        let tokens: Vec<TokenTree> = stream.into_iter().collect();
        let mut path = String::new();
        for (index, token) in tokens.iter().enumerate() {
            let rest = &tokens[index..];
            match token {
                TokenTree::Ident(ident) => {
                    path = path_extended(&path, path_outer, &ident.to_string());
                    self.word(rest, &path);
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => path.push(':'),
                TokenTree::Group(group) => {
                    let continues = group.delimiter() == Delimiter::Brace && path.ends_with("::");
                    self.stream(group.stream(), if continues { &path } else { "" });
                    path.clear();
                }
                _ => {
                    self.attribute(rest);
                    path.clear();
                }
            }
        }
    }

    /// `rest` begins with an identifier, the end of `path`.
    fn word(&mut self, rest: &[TokenTree], path: &str) {
        let line = rest[0].span().start().line;
        let word = rest[0].to_string();
        let krate = self.source.crate_name();
        if word == "unsafe" && !UNSAFE_CRATES.contains(&krate) {
            self.offend(line, format!("unsafe in crate {krate}: only in {}", UNSAFE_CRATES.join(", ")));
        }
        if MODELLED_CRATES.contains(&krate) && is_std_atomic(path) {
            self.offend(line, format!("{path} in crate {krate}: take volmem's, which loom can model"));
        }
        if RAW_CALL_CRATES.contains(&krate) && path == "libc::syscall" {
            self.offend(line, format!("{path} in crate {krate}: it may be our own; take system::call!"));
        }
        if UNFINISHED_MACROS.contains(&word.as_str()) && is_macro_call(rest) {
            self.offend(line, format!("{word}! is not a finished program: write it, or return an error"));
        }
        if word == "fn" {
            self.function(rest, line);
        }
    }

    /// `rest` begins with `fn`: measures it when it has a name and a body.
    fn function(&mut self, rest: &[TokenTree], line: usize) {
        let Some(TokenTree::Ident(name)) = rest.get(1) else {
            return;
        };
        let body = rest.iter().find_map(|token| match token {
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => Some(Some(group)),
            TokenTree::Punct(punct) if punct.as_char() == ';' => Some(None),
            _ => None,
        });
        let Some(Some(body)) = body else { return };
        let lines = body.span_close().end().line - line + 1;
        if lines > FUNCTION_LINES_MAX {
            self.offend(line, format!("{name} has {lines} lines, at most {FUNCTION_LINES_MAX}: split it"));
        }
    }

    /// When `rest` begins with `#[ignore]`, also inside `cfg_attr`, there must be a reason.
    fn attribute(&mut self, rest: &[TokenTree]) {
        let [TokenTree::Punct(hash), TokenTree::Group(group), ..] = rest else {
            return;
        };
        if hash.as_char() == '#' && group.delimiter() == Delimiter::Bracket && ignores_without_reason(group) {
            let line = group.span_open().start().line;
            self.offend(line, "a test is ignored without a reason: #[ignore = \"why\"]");
        }
    }
}

/// `ident` after `path` when a `::` joins them, else a path that begins at `path_outer`. `::std` is `std`.
fn path_extended(path: &str, path_outer: &str, ident: &str) -> String {
    let stem = if path.ends_with("::") { path.trim_start_matches(':') } else { path_outer };
    format!("{stem}{ident}")
}

fn is_std_atomic(path: &str) -> bool {
    ["std::sync::atomic", "core::sync::atomic", "sync::atomic"].contains(&path)
}

/// `name!(...)`, with any of the three brackets.
fn is_macro_call(rest: &[TokenTree]) -> bool {
    let bang = matches!(rest.get(1), Some(TokenTree::Punct(punct)) if punct.as_char() == '!');
    bang && matches!(rest.get(2), Some(TokenTree::Group(_)))
}

fn ignores_without_reason(attribute: &Group) -> bool {
    let tokens: Vec<TokenTree> = attribute.stream().into_iter().collect();
    if matches!(&tokens[..], [TokenTree::Ident(name)] if name == "ignore") {
        return true;
    }
    let [TokenTree::Ident(name), TokenTree::Group(group)] = &tokens[..] else {
        return false;
    };
    name == "cfg_attr" && is_last_word(group.stream(), "ignore")
}

fn is_last_word(stream: TokenStream, word: &str) -> bool {
    stream.into_iter().last().is_some_and(|token| token.to_string() == word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report;

    fn check_in(path: &str, text: &str) -> String {
        report(&check(&Source::new(path, text)))
    }

    fn check_text(text: &str) -> String {
        check_in("crates/tools/cli/src/a.rs", text).replace("crates/tools/cli/src/", "")
    }

    fn function_of(lines: usize) -> String {
        format!(
            "impl A {{\n    pub async fn long_one<T>(t: [T; 2]) -> T {{\n{}    }}\n}}\n",
            "work();\n".repeat(lines - 2)
        )
    }

    #[test]
    fn a_function_has_70_lines_at_most() {
        assert_eq!(check_text(&function_of(70)), "");
        assert_eq!(check_text(&function_of(71)), "a.rs:2: long_one has 71 lines, at most 70: split it\n");
    }

    #[test]
    fn a_function_inside_a_macro_is_measured_too() {
        let text = format!("proptest! {{\n{}}}\n", function_of(80));
        assert_eq!(check_text(&text), "a.rs:3: long_one has 80 lines, at most 70: split it\n");
    }

    #[test]
    fn a_declaration_or_a_function_pointer_has_no_length() {
        let text = format!(
            "extern \"C\" {{ fn close(fd: i32) -> i32; }}\nstruct S {{ f: fn(i32) -> i32 }}\n{}",
            "\n".repeat(90)
        );
        assert_eq!(check_text(&text), "");
    }

    #[test]
    fn unsafe_is_found_only_outside_the_crates_that_may_say_it() {
        let text = "//! unsafe\n#[unsafe(no_mangle)]\nfn f() { let s = \"unsafe\"; unsafe { g() } }\n";
        let only = "only in volmem, fabric, lane, lane-c, wait, segment, socket, preload, stats-page, fib, bench, \
                    pcie-bench, router-ports, system-tests";
        assert_eq!(
            check_text(text),
            format!("a.rs:2: unsafe in crate cli: {only}\na.rs:3: unsafe in crate cli: {only}\n")
        );
        assert_eq!(check_in("crates/base/volmem/src/a.rs", text), "");
        assert_eq!(check_in("tests/tests/a.rs", text), "");
    }

    #[test]
    fn atomics_of_the_standard_library_are_found_in_the_lane_in_every_spelling() {
        let text = "use std::sync::atomic::AtomicU64;\n\
                    use std::sync::{Arc, atomic::{AtomicU32, Ordering}};\n\
                    use core::{sync::atomic, mem};\n\
                    fn f() { ::std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst) }\n";
        let at = |line, root| {
            format!(
                "crates/any/lane/a.rs:{line}: {root}::sync::atomic in crate lane: take volmem's, which loom can model\n"
            )
        };
        let expected = at(1, "std") + &at(2, "std") + &at(3, "core") + &at(4, "std") + &at(4, "std");
        assert_eq!(check_in("crates/any/lane/a.rs", text), expected);
        assert_eq!(check_in("crates/base/volmem/a.rs", text), "");
    }

    #[test]
    fn the_facade_and_loom_are_fine_in_the_lane() {
        let text = "use volmem::sync::{AtomicU64, atomic};\nuse loom::sync::atomic::AtomicBool;\n\
                    use std::sync::Arc;\n";
        assert_eq!(check_in("crates/any/lane/a.rs", text), "");
    }

    #[test]
    fn calls_by_the_name_of_syscall_are_found_in_the_socket_crate() {
        let text = "use libc::syscall;\nuse libc::{c_int, syscall};\n\
                    fn f() { unsafe { libc::syscall(libc::SYS_getpid); call!(libc::SYS_getpid); syscall_of(1) } }\n";
        let at = |line| {
            format!(
                "crates/any/socket/a.rs:{line}: libc::syscall in crate socket: it may be our own; take system::call!\n"
            )
        };
        assert_eq!(check_in("crates/any/socket/a.rs", text), at(1) + &at(2) + &at(3));
        assert_eq!(check_in("crates/any/stats-page/a.rs", text), "");
    }

    #[test]
    fn unfinished_code_is_found_and_words_like_it_are_not() {
        let text =
            "fn f(todo: bool) {\n    // todo!()\n    if todo != true { dbg![todo]; }\n    unimplemented! {}\n}\n";
        let remedy = "is not a finished program: write it, or return an error";
        assert_eq!(check_text(text), format!("a.rs:3: dbg! {remedy}\na.rs:4: unimplemented! {remedy}\n"));
    }

    #[test]
    fn an_ignored_test_says_why() {
        let text = "#[test]\n#[ignore]\nfn a() {}\n\
                    #[cfg_attr(miri, ignore)]\nfn b() {}\n\
                    #[ignore = \"an hour\"]\nfn c() {}\n\
                    #[cfg_attr(miri, ignore = \"a system call\")]\nfn d() {}\n\
                    #[serde(ignore)]\nfn e() {}\n";
        let remedy = "a test is ignored without a reason: #[ignore = \"why\"]";
        assert_eq!(check_text(text), format!("a.rs:2: {remedy}\na.rs:4: {remedy}\n"));
    }

    #[test]
    fn a_file_that_is_not_rust_is_an_offence_not_a_panic() {
        assert_eq!(check_text("fn f() {\n    (\n}\n").lines().count(), 1);
    }
}
