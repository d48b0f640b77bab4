//! The syntax of unit files (systemd.syntax(7)), as far as the section `[Service]` needs it.
//!
//! Lists are divided at blanks; quotes and a backslash before a blank, a quote or a backslash are understood. Other
//! escapes (`\x20`) and specifiers (`%i`) stay as they are written.

/// Returns the settings of the section `[Service]` in their order, each a key and its value.
pub fn settings(text: &str) -> Vec<(String, String)> {
    let (mut settings, mut section) = (Vec::new(), String::new());
    for line in logical_lines(text) {
        let line = line.trim();
        if let Some(name) = line.strip_prefix('[') {
            section = name.strip_suffix(']').unwrap_or(name).to_owned();
        } else if let (true, Some((key, value))) = (section == "Service", line.split_once('=')) {
            settings.push((key.trim().to_owned(), value.trim().to_owned()));
        }
    }
    settings
}

/// Returns the lines without comments, those that end with a backslash joined with the next one.
fn logical_lines(text: &str) -> Vec<String> {
    let (mut lines, mut begun) = (Vec::new(), String::new());
    for line in text.lines() {
        if line.trim_start().starts_with(['#', ';']) {
            continue;
        }
        begun += line.trim_start();
        let backslashes = begun.bytes().rev().take_while(|byte| *byte == b'\\').count();
        if backslashes % 2 == 1 {
            begun.pop();
            begun.push(' ');
            continue;
        }
        lines.push(std::mem::take(&mut begun));
    }
    lines.push(begun);
    lines
}

/// Returns the words of a list.
pub fn words(value: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    let mut letters = value.chars().peekable();
    while let Some(letter) = letters.next() {
        let is_escape = letter == '\\'
            && letters.peek().is_some_and(|next| next.is_whitespace() || ['"', '\'', '\\'].contains(next));
        match letter {
            _ if is_escape => word.get_or_insert_default().extend(letters.next()),
            '"' | '\'' if quote == Some(letter) => quote = None,
            '"' | '\'' if quote.is_none() => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            _ if letter.is_whitespace() && quote.is_none() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    words
}

/// Returns an assignment of a variable as a word of `Environment=`.
pub fn quoted(assignment: &str) -> String {
    let needs_quotes =
        assignment.contains(|letter: char| letter.is_whitespace() || ['"', '\'', '\\'].contains(&letter));
    match needs_quotes {
        true => format!("\"{}\"", assignment.replace('\\', "\\\\").replace('"', "\\\"")),
        false => assignment.to_owned(),
    }
}

/// Returns a text in which systemd finds no specifier.
pub fn without_specifiers(text: &str) -> String {
    text.replace('%', "%%")
}

/// Returns whether a value is not one of those that mean "no".
pub fn is_on(value: &str) -> bool {
    !["0", "no", "n", "false", "f", "off"].iter().any(|off| value.eq_ignore_ascii_case(off))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> Vec<String> {
        settings(text).into_iter().map(|(key, value)| format!("{key}={value}")).collect()
    }

    #[test]
    fn only_settings_of_the_service_are_read() {
        let text = "[Unit]\nDescription=PostgreSQL Cluster %i\n\n# a comment\n[Service]\nType=forking\n; another\n\
                    ExecStart=-/usr/bin/pg_ctlcluster --skip-systemctl-redirect %i start\n  User = postgres \n\
                    no setting\n[Install]\nWantedBy=multi-user.target\n";
        let exec = "ExecStart=-/usr/bin/pg_ctlcluster --skip-systemctl-redirect %i start";
        assert_eq!(shown(text), ["Type=forking", exec, "User=postgres"]);
        assert_eq!(shown("Type=simple\n"), [""; 0], "no section");
    }

    #[test]
    fn a_backslash_continues_a_line_beyond_comments() {
        let text = "[Service]\nExecStart=/bin/a \\\n# no end\n  b \\\n  c\nUser=x\\\\\nGroup=y \\";
        assert_eq!(shown(text), ["ExecStart=/bin/a  b  c", r"User=x\\", "Group=y"]);
    }

    #[test]
    fn words_are_divided_at_blanks_outside_of_quotes() {
        assert_eq!(words("AF_INET  AF_UNIX\t"), ["AF_INET", "AF_UNIX"]);
        let haproxy = r#""CONFIG=/etc/haproxy/haproxy.cfg" "PIDFILE=/run/haproxy.pid" "EXTRAOPTS=-S /run/m.sock""#;
        let expected = ["CONFIG=/etc/haproxy/haproxy.cfg", "PIDFILE=/run/haproxy.pid", "EXTRAOPTS=-S /run/m.sock"];
        assert_eq!(words(haproxy), expected);
        assert_eq!(words(r#"A='b "c"' a\ b \x20 "" "open"#), [r#"A=b "c""#, "a b", r"\x20", "", "open"]);
        assert_eq!(words(""), [""; 0]);
    }

    #[test]
    fn quoted_words_are_read_as_they_were() {
        for text in ["LD_PRELOAD=/usr/$LIB/a.so", "A=b c", r#"A="b" 'c' \d"#] {
            assert_eq!(words(&quoted(text)), [text]);
        }
        assert_eq!(quoted("A=$LIB"), "A=$LIB");
        assert_eq!(without_specifiers("/a%b"), "/a%%b");
    }
}
