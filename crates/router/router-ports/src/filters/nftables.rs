//! Chains of nftables (`linux/netfilter/nf_tables.h`).

use std::collections::{BTreeMap, BTreeSet};

use super::{attribute, attributes, text};
use crate::InterfaceIndex;
use crate::netlink::NetlinkError;
use crate::netlink::socket::Socket;

const SUBSYSTEM: u16 = 10 << 8;
const GET_TABLE: u16 = SUBSYSTEM | 1;
const GET_CHAIN: u16 = SUBSYSTEM | 4;
const GET_RULE: u16 = SUBSYSTEM | 7;
/// `struct nfgenmsg`: all families, version 0, no resource.
const ALL_FAMILIES: [u8; 4] = [0; 4];
const HEADER_BYTES: usize = ALL_FAMILIES.len();

const FAMILY_INET: u8 = 1;
const FAMILY_IP: u8 = 2;
const FAMILY_ARP: u8 = 3;
const FAMILY_NETDEV: u8 = 5;
const FAMILY_IP6: u8 = 10;

const TABLE_NAME: u16 = 1;
const TABLE_FLAGS: u16 = 2;
const DORMANT: i32 = 1;
const CHAIN_TABLE: u16 = 1;
const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const CHAIN_POLICY: u16 = 5;
const HOOK_NUMBER: u16 = 1;
const HOOK_DEVICE: u16 = 3;
const HOOK_DEVICES: u16 = 4;
const DEVICE_NAME: u16 = 1;
const DEVICE_PREFIX: u16 = 2;
const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
const RULE_EXPRESSIONS: u16 = 4;
const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;
const IMMEDIATE_DATA: u16 = 2;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
/// Source registers of expressions that change a packet, or its state.
const META_SOURCE: u16 = 3;
const CT_SOURCE: u16 = 4;
const PAYLOAD_SOURCE: u16 = 5;

const ACCEPT: i32 = 1;
const CONTINUE: i32 = -1;
const BREAK: i32 = -2;
const JUMP: i32 = -3;
const GOTO: i32 = -4;
const RETURN: i32 = -5;

/// A table, by family and name.
type Table = (u8, String);

/// A chain with a hook that packets between interfaces pass.
struct BaseChain {
    hook: &'static str,
    drops: bool,
}

/// What the rules of a chain may do with a packet.
#[derive(Clone, Copy, Default)]
struct Effects {
    /// Drop, change or redirect it, or keep state about it.
    touches: bool,
    /// Pass it to other chains of the table.
    jumps: bool,
}

/// Returns a description of each chain that may touch packets between these interfaces.
pub(super) fn find(socket: &mut Socket, interfaces: &[(InterfaceIndex, String)]) -> Result<Vec<String>, NetlinkError> {
    let mut chains: BTreeMap<(Table, String), BaseChain> = BTreeMap::new();
    socket.dump_raw(GET_CHAIN, &ALL_FAMILIES, &mut chains, BTreeMap::clear, |chains, message| {
        chains.extend(base_chain(message, interfaces));
    })?;
    if !chains.is_empty() {
        let dormant = dormant_tables(socket)?;
        chains.retain(|(table, _), _| !dormant.contains(table));
    }
    if chains.is_empty() {
        return Ok(Vec::new());
    }
    let mut rules: BTreeMap<(Table, String), Effects> = BTreeMap::new();
    socket.dump_raw(GET_RULE, &ALL_FAMILIES, &mut rules, BTreeMap::clear, |rules, message| {
        let Some((chain, effects)) = rule(message) else { return };
        let all = rules.entry(chain).or_default();
        (all.touches, all.jumps) = (all.touches || effects.touches, all.jumps || effects.jumps);
    })?;
    let others = rules.iter().filter(|(chain, effects)| effects.touches && !chains.contains_key(*chain));
    let tables: BTreeSet<&Table> = others.map(|((table, _), _)| table).collect();
    let is_touching = |(chain, base): &(&(Table, String), &BaseChain)| {
        let effects = rules.get(*chain).copied().unwrap_or_default();
        base.drops || effects.touches || effects.jumps && tables.contains(&chain.0)
    };
    let describe = |(((family, table), chain), base): (&(Table, String), &BaseChain)| {
        format!("nftables {} table {table}, chain {chain}, hook {}", family_name(*family), base.hook)
    };
    Ok(chains.iter().filter(is_touching).map(describe).collect())
}

/// Returns the tables whose chains do not apply.
fn dormant_tables(socket: &mut Socket) -> Result<BTreeSet<Table>, NetlinkError> {
    let mut dormant = BTreeSet::new();
    socket.dump_raw(GET_TABLE, &ALL_FAMILIES, &mut dormant, BTreeSet::clear, |dormant, message| {
        let (Some(family), Some(message)) = (message.first(), message.get(HEADER_BYTES..)) else { return };
        let is_dormant = attribute(message, TABLE_FLAGS).and_then(word).is_some_and(|flags| flags & DORMANT != 0);
        dormant.extend(attribute(message, TABLE_NAME).filter(|_| is_dormant).map(|name| (*family, text(name))));
    })?;
    Ok(dormant)
}

fn family_name(family: u8) -> &'static str {
    match family {
        FAMILY_INET => "inet",
        FAMILY_IP => "ip",
        FAMILY_IP6 => "ip6",
        FAMILY_ARP => "arp",
        _ => "netdev",
    }
}

/// Parses a chain; returns `None` for one that packets between these interfaces do not pass by a hook.
fn base_chain(message: &[u8], interfaces: &[(InterfaceIndex, String)]) -> Option<((Table, String), BaseChain)> {
    let (family, message) = (*message.first()?, message.get(HEADER_BYTES..)?);
    let hook = attribute(message, CHAIN_HOOK)?;
    let number = word(attribute(hook, HOOK_NUMBER)?)?;
    let (name, is_of_device) = match (family, number) {
        (FAMILY_INET | FAMILY_IP | FAMILY_IP6, 0) => ("prerouting", false),
        (FAMILY_INET | FAMILY_IP | FAMILY_IP6, 2) => ("forward", false),
        (FAMILY_INET | FAMILY_IP | FAMILY_IP6, 4) => ("postrouting", false),
        // The router resolves addresses of hosts itself.
        (FAMILY_ARP, 0) => ("input", false),
        (FAMILY_ARP, 1) => ("output", false),
        (FAMILY_INET, 5) | (FAMILY_NETDEV, 0) => ("ingress", true),
        (FAMILY_NETDEV, 1) => ("egress", true),
        _ => return None,
    };
    if is_of_device && !has_device(hook, interfaces) {
        return None;
    }
    let table = text(attribute(message, CHAIN_TABLE)?);
    let chain = text(attribute(message, CHAIN_NAME)?);
    let drops = attribute(message, CHAIN_POLICY).and_then(word).is_some_and(|policy| policy != ACCEPT);
    Some((((family, table), chain), BaseChain { hook: name, drops }))
}

/// Returns whether a hook of devices has one of these interfaces.
fn has_device(hook: &[u8], interfaces: &[(InterfaceIndex, String)]) -> bool {
    let single = attribute(hook, HOOK_DEVICE).map(|name| (DEVICE_NAME, name));
    let several = attribute(hook, HOOK_DEVICES).into_iter().flat_map(attributes);
    single.into_iter().chain(several).any(|(kind, name)| {
        let name = text(name);
        interfaces.iter().any(|(_, known)| match kind {
            DEVICE_PREFIX => known.starts_with(&name),
            _ => *known == name,
        })
    })
}

/// Parses a rule: its chain, and what it may do.
fn rule(message: &[u8]) -> Option<((Table, String), Effects)> {
    let (family, message) = (*message.first()?, message.get(HEADER_BYTES..)?);
    let table = text(attribute(message, RULE_TABLE)?);
    let chain = text(attribute(message, RULE_CHAIN)?);
    let mut effects = Effects::default();
    for (_, expression) in attribute(message, RULE_EXPRESSIONS).into_iter().flat_map(attributes) {
        add_effects(&mut effects, expression);
    }
    Some((((family, table), chain), effects))
}

/// Adds what an expression may do. An unknown one may do anything.
fn add_effects(effects: &mut Effects, expression: &[u8]) {
    let name = attribute(expression, EXPRESSION_NAME).map(text).unwrap_or_default();
    let data = attribute(expression, EXPRESSION_DATA).unwrap_or_default();
    match name.as_str() {
        "counter" | "cmp" | "bitwise" | "byteorder" | "range" | "fib" | "rt" | "socket" | "numgen" | "hash" => {}
        "meta" => effects.touches |= attribute(data, META_SOURCE).is_some(),
        "payload" => effects.touches |= attribute(data, PAYLOAD_SOURCE).is_some(),
        "ct" => effects.touches |= attribute(data, CT_SOURCE).is_some(),
        "immediate" => {
            let verdict = attribute(data, IMMEDIATE_DATA).and_then(|data| attribute(data, DATA_VERDICT));
            match verdict.map(|verdict| attribute(verdict, VERDICT_CODE).and_then(word)) {
                None | Some(Some(ACCEPT | CONTINUE | BREAK | RETURN)) => {}
                Some(Some(JUMP | GOTO)) => effects.jumps = true,
                Some(_) => effects.touches = true,
            }
        }
        _ => effects.touches = true,
    }
}

/// Reads a number in network byte order.
fn word(contents: &[u8]) -> Option<i32> {
    contents.first_chunk().map(|bytes| i32::from_be_bytes(*bytes))
}
