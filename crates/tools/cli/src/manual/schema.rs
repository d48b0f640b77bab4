//! The manual page part of a JSON schema: the keys of each of its objects.

use clap_mangen::roff::{Roff, bold, roman};
use serde_json::Value;

/// Appends the keys of these definitions of a schema, each with a heading.
pub(super) fn render(roff: &mut Roff, schema: &Value, definitions: &[(&str, &str)]) {
    for (name, heading) in definitions {
        let definition = &schema["$defs"][name];
        roff.control("SS", [*heading]);
        let required: Vec<&str> =
            definition["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        keys(roff, schema, definition, &required, "");
    }
}

/// Appends the keys of an object, and those of objects in it with their path.
fn keys(roff: &mut Roff, schema: &Value, object: &Value, required: &[&str], prefix: &str) {
    for (key, value) in object["properties"].as_object().into_iter().flatten() {
        let mut text: Vec<String> = value["description"].as_str().map(|text| format!("{text}.")).into_iter().collect();
        text.extend(kind(schema, value).map(|kind| format!("{kind}.")));
        text.extend(required.contains(&key.as_str()).then(|| "Required.".to_owned()));
        roff.control("TP", []).text([bold(format!("{prefix}{key}"))]).text([roman(text.join(" "))]);
        keys(roff, schema, value, &[], &format!("{prefix}{key}."));
    }
}

/// Describes the values that a schema allows.
fn kind(schema: &Value, value: &Value) -> Option<String> {
    if let Some(name) = value["$ref"].as_str().and_then(|path| path.strip_prefix("#/$defs/")) {
        return match &schema["$defs"][name] {
            object if object["type"] == "object" => Some(format!("Object: see {name}")),
            other => kind(schema, other),
        };
    }
    if !value["const"].is_null() {
        return Some(format!("Always {}", value["const"]));
    }
    if let Some(words) = value["enum"].as_array() {
        let words: Vec<String> = words.iter().map(Value::to_string).collect();
        return Some(format!("One of {}", words.join(", ")));
    }
    let name = value["type"].as_str()?;
    let name = name[..1].to_uppercase() + &name[1..];
    Some(match (&value["minimum"], &value["maximum"]) {
        (Value::Null, _) => name,
        (min, Value::Null) => format!("{name}, at least {min}"),
        (min, max) => format!("{name} from {min} to {max}"),
    })
}
