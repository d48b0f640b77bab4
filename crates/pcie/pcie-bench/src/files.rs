//! Reads and writes files of results: one object, or a list of them.

use std::fs;
use std::path::Path;

use pcie::result::{SCHEMA, TestResult};
use serde::Deserialize;
use serde_json::Value;

use crate::error::{Error, Result};

/// Reads the text of a file.
///
/// # Errors
/// Names the file that cannot be read.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|source| Error::File { path: path.to_owned(), source })
}

/// Reads the results in a file.
///
/// # Errors
/// Names the file, and the number of the invalid result.
pub fn read(path: &Path) -> Result<Vec<TestResult>> {
    let text = read_text(path)?;
    let bad = |why: String| Error::WrongUse(format!("{}: {why}", path.display()));
    let value: Value = serde_json::from_str(&text).map_err(|error| bad(format!("not JSON: {error}")))?;
    let rows = if let Value::Array(rows) = value { rows } else { vec![value] };
    if rows.is_empty() {
        return Err(bad("holds no result".to_owned()));
    }
    rows.into_iter()
        .enumerate()
        .map(|(index, row)| one(row).map_err(|why| bad(format!("result {}: {why}", index + 1))))
        .collect()
}

fn one(row: Value) -> std::result::Result<TestResult, String> {
    match row.get("schema").and_then(Value::as_str) {
        Some(SCHEMA) => TestResult::deserialize(row).map_err(|error| format!("not of the form {SCHEMA}: {error}")),
        Some(other) => Err(format!("is of the form '{other}'; this program reads {SCHEMA}")),
        None => Err(format!("has no field 'schema'; this program reads {SCHEMA}, as crosslane pcie bench writes it")),
    }
}

/// Returns results as a JSON list with one result a line.
///
/// # Errors
/// A number that JSON cannot represent.
pub fn json(results: &[TestResult]) -> Result<String> {
    let line = |result| serde_json::to_string(result).map_err(|error| Error::Failed(format!("writing JSON: {error}")));
    let lines = results.iter().map(line).collect::<Result<Vec<_>>>()?;
    Ok(format!("[\n{}\n]\n", lines.join(",\n")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::bandwidth;

    fn read_text(text: &str) -> Result<Vec<TestResult>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        fs::write(&path, text).unwrap();
        read(&path)
    }

    #[test]
    fn a_result_is_read_alone_or_in_a_list() {
        let results = vec![bandwidth("sim:a", 64, 10.0), bandwidth("sim:a", 128, 20.0)];
        assert_eq!(read_text(&json(&results).unwrap()).unwrap(), results);
        assert_eq!(read_text(&serde_json::to_string(&results[1]).unwrap()).unwrap(), results[1..]);
    }

    #[test]
    fn an_invalid_result_is_named_with_its_file_and_number() {
        let good = serde_json::to_string(&bandwidth("sim:a", 64, 10.0)).unwrap();
        for (text, words) in [
            ("", "not JSON"),
            ("[]", "holds no result"),
            ("{}", "result 1: has no field 'schema'"),
            ("{\"schema\": \"crosslane-pcie/9\"}", "'crosslane-pcie/9'"),
            (&format!("[{good}, {{\"schema\": \"crosslane-pcie/1\"}}]"), "result 2: not of the form"),
        ] {
            let error = read_text(text).unwrap_err();
            assert!(error.is_wrong_use(), "{error}");
            assert!(error.to_string().contains(words) && error.to_string().contains("a.json"), "{error}");
        }
        assert!(read(Path::new("/nowhere/a.json")).unwrap_err().is_wrong_use());
    }
}
