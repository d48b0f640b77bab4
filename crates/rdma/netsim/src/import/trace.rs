//! Traces: one flow per line as `start_us,from,to,bytes`, after an optional header line with these names.

use sim::{Span, Time};

use super::{HostNumbers, ImportError, Source, shown};
use crate::endpoint::Flow;

const COLUMNS: &str = "start_us,from,to,bytes";
const REMEDY: &str = "write start_us,from,to,bytes as in 1.5,0,7,64000";
/// Latest start of a flow, in microseconds: about eleven days.
const START_US_MAX: f64 = 1e12;

pub(super) fn flows(source: &Source<'_>, hosts: &HostNumbers) -> Result<Vec<Flow>, ImportError> {
    let mut lines = source.lines().peekable();
    if let Some((number, line)) = lines.peek().copied()
        && is_header(line)
    {
        let names: Vec<&str> = line.split(',').map(str::trim).collect();
        if names.join(",").to_ascii_lowercase() != COLUMNS {
            let what = format!("the header '{}' has other columns; write {COLUMNS}, or no header", shown(line));
            return Err(source.wrong(number, what));
        }
        lines.next();
    }
    lines.map(|(number, line)| flow(source, number, line, hosts)).collect()
}

/// Returns whether a line has only names: four or more fields, none of which begins like a number.
fn is_header(line: &str) -> bool {
    let is_name = |field: &str| field.trim().starts_with(|first: char| first.is_alphabetic() || first == '_');
    line.split(',').count() > 1 && line.split(',').all(is_name)
}

fn flow(source: &Source<'_>, line: usize, text: &str, hosts: &HostNumbers) -> Result<Flow, ImportError> {
    let fields: Vec<&str> = text.split(',').map(str::trim).collect();
    let &[start, from, to, bytes] = fields.as_slice() else {
        return Err(source.wrong(line, format!("'{}' is not a flow; {REMEDY}", shown(text))));
    };
    let refuse = |text, what| source.wrong(line, format!("'{}' is not a {what}; {REMEDY}", shown(text)));
    let us: f64 = source.value(line, start, "time in microseconds", REMEDY)?;
    if !(0.0..START_US_MAX).contains(&us) {
        return Err(refuse(start, "time in microseconds"));
    }
    let number = |text| source.value::<u32>(line, text, "host number", REMEDY);
    let [from, to] = source.hosts(line, [number(from)?, number(to)?], hosts)?;
    let bytes: u64 = bytes.parse().ok().filter(|bytes| *bytes > 0).ok_or_else(|| refuse(bytes, "positive size"))?;
    Ok(Flow::new(Time::ZERO + Span::from_ns(us * 1000.0), from, to, bytes))
}
