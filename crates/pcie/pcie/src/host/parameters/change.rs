//! Changes of single parameters on the command line, as in `sim:ice-lake+device.tags=64`.

use std::fmt;

use config::ConfigError;
use toml::{Table, Value};

use super::ParameterError;

/// Sections that are statements about a file, and not parameters.
const STATEMENTS: [&str; 1] = ["prediction"];

/// Another value for one parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    section: String,
    key: String,
    /// The value as it is written in a parameter file.
    text: String,
    value: Value,
}

impl Change {
    /// Parses `section.key=value`; `file` is the name of the changed file in errors.
    ///
    /// # Errors
    /// The text has another form.
    pub fn parse(file: &str, change: &str) -> Result<Self, ParameterError> {
        const EXAMPLE: &str = "write SECTION.KEY=VALUE as in device.tags=64";
        let parts = change.split_once('=').and_then(|(path, value)| Some((path.split_once('.')?, value.trim())));
        let Some(((section, key), text)) = parts else {
            return Err(invalid(file, change, format!("is not a change of a parameter; {EXAMPLE}")));
        };
        let value = value(text).ok_or_else(|| invalid(file, change, format!("has no valid value; {EXAMPLE}")))?;
        Ok(Self { section: section.trim().to_owned(), key: key.trim().to_owned(), text: text.to_owned(), value })
    }
}

impl fmt::Display for Change {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}={}", self.section, self.key, self.text)
    }
}

/// Returns the value that a text on one line stands for; a bare word, such as lru, is text.
fn value(text: &str) -> Option<Value> {
    if text.contains(|letter: char| letter.is_control() || letter == '#') {
        return None;
    }
    let is_word = !text.is_empty() && text.chars().all(|letter| letter.is_alphanumeric() || "_-.".contains(letter));
    let parsed = format!("value = {text}").parse::<Table>().ok().and_then(|mut table| table.remove("value"));
    parsed.or_else(|| is_word.then(|| Value::String(text.to_owned())))
}

/// Makes changes in a merged table; `file` is its name in errors.
///
/// # Errors
/// There is no such section, or a parameter is changed twice.
pub fn apply(file: &str, table: &mut Table, changes: &[Change]) -> Result<(), ParameterError> {
    let is_section = |(name, value): &(&String, &Value)| value.is_table() && !STATEMENTS.contains(&name.as_str());
    let sections: Vec<String> = table.iter().filter(is_section).map(|(name, _)| name.clone()).collect();
    for (index, change) in changes.iter().enumerate() {
        let (section, key) = (&change.section, &change.key);
        if changes[..index].iter().any(|earlier| (&earlier.section, &earlier.key) == (section, key)) {
            let what = format!("changes {section}.{key} a second time; give it once");
            return Err(invalid(file, &change.to_string(), what));
        }
        match table.get_mut(section) {
            Some(Value::Table(entries)) if sections.contains(section) => {
                entries.insert(key.clone(), change.value.clone());
            }
            _ => {
                let what = format!("there is no section '{section}'; choose {}", sections.join(", "));
                return Err(invalid(file, &change.to_string(), what));
            }
        }
    }
    Ok(())
}

fn invalid(file: &str, change: &str, what: String) -> ParameterError {
    let location = format!("'{}'", change.escape_debug());
    ConfigError::Invalid { file: file.to_owned(), location, what }.into()
}
