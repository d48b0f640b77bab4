//! A rack as keys of etcd: one for what all nodes share, one for access rules, one for the link model, and one for each
//! node. Each value is TOML with the keys of a rack file.
//!
//! ```text
//!   rack          version, name, trust, failover, failover_port, publish, [device], [proxy], [timeouts],
//!                 [[partitions]]
//!   access        access_default, [[access]]; if absent, all nodes may connect to all
//!   link          the table [link] of a file; if absent, links are as fast as the memory
//!   nodes/NAME    slot, and an entry of [[nodes]] in a file without its name
//!   leases/NAME   the monitors that run; not part of the description of a rack
//! ```

use std::net::{IpAddr, SocketAddr};

use serde::Deserialize;

use crate::description::{name_default, partitions_default};
use crate::parse::{RackError, check_version, error_at, parse};
use crate::publish::Publish;
use crate::text::RackPart;
use crate::{
    Access, AccessRule, Backend, Device, LinkTiming, NODES_MAX, Node, Partitions, Proxy, Rack, Timeouts, Trust, address,
};

/// Prefix of the keys of nodes.
const NODE_PREFIX: &str = "nodes/";
/// Prefix of the keys of leases; the name of the node follows it.
pub const LEASE_PREFIX: &str = "leases/";
const COMMON: &str = "rack";
const ACCESS: &str = "access";
const LINK: &str = "link";

/// The value of the key `rack`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RackValue {
    version: u32,
    #[serde(default = "name_default")]
    name: String,
    #[serde(default)]
    trust: Trust,
    #[serde(default)]
    failover: bool,
    #[serde(default)]
    failover_port: Option<u16>,
    #[serde(default)]
    publish: Publish,
    device: Device,
    #[serde(default)]
    proxy: Proxy,
    #[serde(default)]
    timeouts: Timeouts,
    #[serde(default = "partitions_default")]
    partitions: Vec<Partitions>,
}

/// The value of the key `access`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AccessValue {
    #[serde(default)]
    access_default: Access,
    #[serde(default)]
    access: Vec<AccessRule>,
}

/// The value of a key `nodes/NAME`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeValue {
    slot: usize,
    #[serde(deserialize_with = "address::ip")]
    address: IpAddr,
    #[serde(default)]
    backend: Option<Backend>,
    #[serde(default)]
    device: Option<String>,
    #[serde(default, deserialize_with = "address::loopback_port")]
    metrics: Option<SocketAddr>,
    #[serde(default)]
    publish: Option<Publish>,
}

/// Returns whether `name` is a key of a rack's description. Keys of leases are not.
pub fn is_rack_key(name: &str) -> bool {
    [COMMON, ACCESS, LINK].contains(&name) || name.starts_with(NODE_PREFIX)
}

/// The keys of a rack and their texts.
#[derive(Clone, Debug)]
pub(crate) struct Keys(Vec<(String, String)>);

impl Keys {
    /// Parses the keys at `address`. Dependencies between keys are not checked here.
    pub fn parse(address: &str, keys: &[(String, Vec<u8>)]) -> Result<(Rack, Self), RackError> {
        let bytes: usize = keys.iter().map(|(_, value)| value.len()).sum();
        if bytes as u64 > config::FILE_BYTES_MAX {
            return Err(RackError(format!("{address}: {bytes} bytes, more than a rack has; check --rack")));
        }
        let texts = keys.iter().map(|(name, value)| {
            let text = config::utf8(&format!("{address}/{name}"), value).map_err(RackError)?;
            Ok((name.clone(), text.to_owned()))
        });
        let keys = Self(texts.collect::<Result<_, RackError>>()?);
        if let Some((name, _)) = keys.0.iter().find(|(name, _)| !is_rack_key(name)) {
            let what =
                format!("not a key of a rack, which has {COMMON}, {ACCESS}, {LINK} and {NODE_PREFIX}NAME; remove it");
            return Err(RackError(format!("{address}/{}: {what}", name.escape_debug())));
        }
        let rack = keys.rack(address)?;
        Ok((rack, keys))
    }

    fn rack(&self, address: &str) -> Result<Rack, RackError> {
        let text = self.text(COMMON).ok_or_else(|| {
            RackError(format!("{address}/{COMMON}: no such key; put a rack there with 'crosslane rack push'"))
        })?;
        check_version(&format!("{address}/{COMMON}"), text)?;
        let RackValue { version, name, trust, failover, failover_port, publish, device, proxy, timeouts, partitions } =
            self.value(address, COMMON)?.expect("the key exists, as checked above");
        let rules = self.value::<AccessValue>(address, ACCESS)?;
        let AccessValue { access_default, access } =
            rules.unwrap_or(AccessValue { access_default: Access::default(), access: vec![] });
        let link = self.value::<LinkTiming>(address, LINK)?;
        let nodes = self.nodes(address)?;
        Ok(Rack {
            version,
            name,
            trust,
            failover,
            failover_port,
            publish,
            access_default,
            device,
            link,
            proxy,
            timeouts,
            partitions,
            nodes,
            access,
        })
    }

    /// Returns the nodes by slot.
    fn nodes(&self, address: &str) -> Result<Vec<Node>, RackError> {
        let names: Vec<&str> = self.0.iter().filter_map(|(name, _)| name.strip_prefix(NODE_PREFIX)).collect();
        let count = names.len();
        if count > NODES_MAX {
            let what = format!("{count} nodes are not a rack; describe 2 to {NODES_MAX} of them");
            return Err(RackError(format!("{address}/nodes: {what}")));
        }
        let mut nodes: Vec<Option<Node>> = vec![None; count];
        for name in names {
            let key = format!("{NODE_PREFIX}{name}");
            let value: NodeValue = self.value(address, &key)?.expect("the name is one of them");
            let refuse =
                |what: String| error_at(&format!("{address}/{key}"), self.text(&key).unwrap_or(""), "slot", &what);
            let NodeValue { slot, address, backend, device, metrics, publish } = value;
            let Some(free) = nodes.get_mut(slot) else {
                return Err(refuse(format!("{slot} of {count} nodes; number them from 0, without a gap")));
            };
            if let Some(other) = free {
                return Err(refuse(format!("{slot} is already that of node '{}'; give each its own", other.name)));
            }
            *free = Some(Node { name: name.to_owned(), address, backend, device, metrics, publish });
        }
        // There are as many nodes as slots, and no two in one slot, so none is empty.
        Ok(nodes.into_iter().flatten().collect())
    }

    fn text(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| name == key).map(|(_, text)| text.as_str())
    }

    fn value<T: serde::de::DeserializeOwned>(&self, address: &str, key: &str) -> Result<Option<T>, RackError> {
        self.text(key).map(|text| parse(&format!("{address}/{key}"), text)).transpose()
    }

    /// Returns the error for an invalid value at `path` in a rack file.
    pub fn error_at(&self, address: &str, rack: &Rack, path: &str, what: &str) -> RackError {
        let (key, rest) = key_of(rack, path);
        match rest {
            Some(rest) => error_at(&format!("{address}/{key}"), self.text(&key).unwrap_or(""), rest, what),
            None => RackError(format!("{address}/{key}: {what}")),
        }
    }
}

/// Returns the key in etcd that contains `path` of a rack file, and the path within its value.
fn key_of<'a>(rack: &Rack, path: &'a str) -> (String, Option<&'a str>) {
    let (first, rest) = path.split_once('.').map_or((path, None), |(first, rest)| (first, Some(rest)));
    if let Some(slot) = first.strip_prefix("nodes[").and_then(|slot| slot.strip_suffix(']')) {
        let name = slot.parse().ok().and_then(|slot: usize| rack.nodes.get(slot)).map_or("", |node| &node.name);
        // The name is part of the key and not in its value.
        return (format!("{NODE_PREFIX}{}", name.escape_debug()), rest.filter(|rest| *rest != "name"));
    }
    match first {
        "nodes" => (NODE_PREFIX.trim_end_matches('/').to_owned(), None),
        LINK => (LINK.to_owned(), rest),
        _ if first.starts_with(ACCESS) => (ACCESS.to_owned(), Some(path)),
        _ => (COMMON.to_owned(), Some(path)),
    }
}

impl Rack {
    /// Returns the keys that describe this rack, and the text of each.
    pub fn keys(&self) -> Vec<(String, String)> {
        let mut keys = vec![
            (COMMON.to_owned(), RackPart::Common(self).to_string()),
            (ACCESS.to_owned(), RackPart::Access(self).to_string()),
        ];
        keys.extend(self.link.as_ref().map(|link| (LINK.to_owned(), RackPart::Link(link).to_string())));
        let node = |(slot, node): (usize, &Node)| {
            (format!("{NODE_PREFIX}{}", node.name), RackPart::Node(slot, node).to_string())
        };
        keys.extend(self.nodes.iter().enumerate().map(node));
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RackFile, Timing};

    const AT: &str = "etcd://127.0.0.1:2379/r1";

    fn rack() -> Rack {
        let mut rack = Rack::example(3, Backend::Shm, Some(Timing::Ntb), Trust::Proxy);
        rack.timeouts.lease_ns = 3e9;
        rack.access_default = Access::Deny;
        let text = "[[access]]\nto='b'\nports='80,90-99'\naction='allow'\n";
        rack.access = parse::<AccessValue>("x", text).unwrap().access;
        rack
    }

    fn bytes(keys: Vec<(String, String)>) -> Vec<(String, Vec<u8>)> {
        keys.into_iter().map(|(name, text)| (name, text.into_bytes())).collect()
    }

    /// Returns the error after replacing `from` by `to` in the value of one key.
    fn refused(key: &str, from: &str, to: &str) -> String {
        let mut keys = rack().keys();
        let (_, text) = keys.iter_mut().find(|(name, _)| name == key).unwrap();
        assert!(text.contains(from), "{from:?} in\n{text}");
        *text = text.replacen(from, to, 1);
        RackFile::parse_keys(AT, &bytes(keys)).unwrap_err().to_string()
    }

    #[test]
    fn a_rack_is_read_back_from_its_keys_in_any_order() {
        let (mut rack, mut keys) = (rack(), rack().keys());
        keys.reverse();
        assert_eq!(RackFile::parse_keys(AT, &bytes(keys)).unwrap().rack, rack);
        (rack.link, rack.access_default, rack.access) = (None, Access::Allow, Vec::new());
        let mut keys = rack.keys();
        keys.retain(|(name, _)| name != ACCESS);
        assert_eq!(RackFile::parse_keys(AT, &bytes(keys)).unwrap().rack, rack);
    }

    #[test]
    fn an_error_is_one_line_with_key_line_value_and_remedy() {
        for (key, from, to, expected) in [
            (
                "nodes/b",
                "127.77.0.2",
                "127.77.0.1",
                "nodes/b, line 2, address: '127.77.0.1' is already that of nodes[0]",
            ),
            ("nodes/c", "slot = 2", "slot = 1", "nodes/c, line 1, slot: 1 is already that of node 'b'"),
            ("nodes/c", "slot = 2", "slot = 3", "nodes/c, line 1, slot: 3 of 3 nodes; number them from 0"),
            ("nodes/a", "slot = 0", "slot = 0\n[device]\nbackend = 1", "nodes/a"),
            ("nodes/a", "slot = 0", "slot = 0\nname = 'x'", "nodes/a, line 2, name: unknown field `name`"),
            ("rack", "version = 1", "version = 7", "rack, line 1, version: 7 belongs to another release"),
            ("rack", "window_bytes = 4194304", "window_bytes = 1", "device.window_bytes: 1 bytes are too few"),
            ("rack", "[device]", "[[nodes]]\n[device]", "rack, line 6, nodes: unknown field `nodes`"),
            ("rack", "lease_ns = 3000000000", "lease_ns = 1", "timeouts.lease_ns: 1 ns; use 2 s to 1 h"),
            ("access", "to = \"b\"", "to = \"q\"", "access, line 5, access[0].to: \"q\" is not a node of this rack"),
            ("link", "ntb", "isa", "link, line 1, timing: unknown variant `isa`"),
        ] {
            let error = refused(key, from, to);
            assert!(error.starts_with(&format!("{AT}/{key}")) && error.contains(expected), "{expected}\n{error}");
            assert!(error.contains(';') && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn keys_that_are_missing_unknown_or_too_many_are_named() {
        let error = |keys: &[(String, Vec<u8>)]| RackFile::parse_keys(AT, keys).unwrap_err().to_string();
        let without = |name: &str| {
            let mut keys = bytes(rack().keys());
            keys.retain(|(found, _)| !found.starts_with(name));
            keys
        };
        let with = |name: &str, value: &[u8]| {
            let mut keys = bytes(rack().keys());
            keys.push((name.to_owned(), value.to_vec()));
            keys
        };
        assert!(error(&without("rack")).starts_with("etcd://127.0.0.1:2379/r1/rack: no such key; put a rack there"));
        assert!(error(&without("nodes/")).starts_with("etcd://127.0.0.1:2379/r1/nodes: 0 nodes are not a rack"));
        assert!(error(&with("nodez", b"")).contains("/r1/nodez: not a key of a rack"));
        assert!(
            error(&with("nodes/A\n", b"slot=3\naddress='127.77.0.9'")).contains(r#"nodes/A\n: "A\n" is not a name"#)
        );
        assert!(error(&with("nodes/d", b"\n\xff")).contains("/r1/nodes/d, line 2: not UTF-8"));
        assert!(error(&with("link", &vec![b'#'; 1 << 20])).contains("more than a rack has"));
        let mut many = bytes(rack().keys());
        many.extend(
            (3..60)
                .map(|slot| (format!("nodes/n{slot}"), format!("slot={slot}\naddress='127.77.1.{slot}'").into_bytes())),
        );
        assert!(error(&many).contains("/r1/nodes: 60 nodes are not a rack"), "{}", error(&many));
    }
}
