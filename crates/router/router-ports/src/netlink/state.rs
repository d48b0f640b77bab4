//! What the kernel has, as far as it has told, and what is different from before.
//!
//! The kernel does not tell all: IPv4 routes that go with their interface, its carrier, an address or a next-hop object
//! go in silence, and what a changed route was before is not said. Where an event leaves a doubt, the state says so
//! ([`State::is_doubtful`]), and is to be read anew; [`State::differences`] then are the changes that were missed.

use std::collections::hash_map::{Entry, HashMap};
use std::collections::{BTreeMap, btree_map};
use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_APPEND, NLM_F_REPLACE};
use netlink_packet_route::RouteNetlinkMessage as Message;

use super::convert;
use super::model::{Address, Change, Link, Neighbour, Route, RouteHop, RouteKey, RouteKind};
use crate::InterfaceIndex;

/// One of the routes under a key, first the one that the kernel uses.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Variant {
    protocol: u8,
    kind: RouteKind,
    hops: Vec<RouteHop>,
    mtu_bytes: Option<u32>,
    object: Option<u32>,
}

impl Variant {
    fn new(route: Route, object: Option<u32>) -> Variant {
        let Route { protocol, kind, hops, mtu_bytes, .. } = route;
        Variant { protocol, kind, hops, mtu_bytes, object }
    }

    fn route(&self, key: RouteKey) -> Route {
        let Variant { protocol, kind, mtu_bytes, .. } = *self;
        Route { key, protocol, kind, hops: self.hops.clone(), mtu_bytes }
    }

    /// Of the table that is looked in before the main one.
    fn is_local(&self) -> bool {
        self.kind == RouteKind::Local
    }

    fn has_gateways(&self) -> bool {
        !self.hops.is_empty() && self.hops.iter().all(|hop| hop.gateway.is_some())
    }

    fn is_told_as(&self, other: &Variant) -> bool {
        let told = |of: &Variant| (of.protocol, of.kind, of.mtu_bytes);
        told(self) == told(other) && self.hops == other.hops
    }
}

#[derive(Default)]
pub(super) struct State {
    links: BTreeMap<InterfaceIndex, Link>,
    addresses: BTreeMap<(InterfaceIndex, IpNet), Address>,
    neighbours: BTreeMap<(InterfaceIndex, IpAddr), Neighbour>,
    routes: HashMap<RouteKey, Vec<Variant>>,
    is_doubtful: bool,
    may_hide: bool,
}

impl State {
    /// Whether something may have happened that was not told.
    pub fn is_doubtful(&self) -> bool {
        self.is_doubtful
    }

    /// Whether there may be a route that the kernel did not tell of: of IPv6 it passes over what lies among the ways of
    /// a route with several, and they have gone.
    pub fn may_hide(&self) -> bool {
        self.may_hide
    }

    /// How many destinations have routes.
    pub fn routes(&self) -> usize {
        self.routes.len()
    }

    pub fn clear_links(&mut self) {
        self.links.clear();
    }

    pub fn clear_addresses(&mut self) {
        self.addresses.clear();
    }

    pub fn clear_neighbours(&mut self) {
        self.neighbours.clear();
    }

    pub fn clear_routes(&mut self, are_v6: bool) {
        self.routes.retain(|key, _| key.prefix.addr().is_ipv6() != are_v6);
    }

    /// Routes that were read later than those that are there; what they do not tell of was read before.
    pub fn add_routes(&mut self, later: State) {
        self.routes.extend(later.routes);
    }

    /// An entry of a dump: routes of one key come in the order in which the kernel uses them.
    pub fn learn(&mut self, message: Message) {
        match message {
            Message::NewRoute(message) => {
                let Some((route, object)) = convert::route(&message) else { return };
                let variants = self.routes.entry(route.key).or_default();
                let new = Variant::new(route, object);
                let place = if new.is_local() { 0 } else { variants.len() };
                variants.insert(place, new);
            }
            other => self.apply(other, 0, &mut Vec::new()),
        }
    }

    /// An event, with the flags of its header. What it changed is appended to `changes`.
    pub fn apply(&mut self, message: Message, flags: u16, changes: &mut Vec<Change>) {
        match message {
            Message::NewLink(message) => convert::link(&message).into_iter().for_each(|it| self.link(it, changes)),
            Message::DelLink(message) => convert::link(&message).into_iter().for_each(|it| {
                self.is_doubtful = true;
                changes.extend(self.links.remove(&it.index).map(|_| Change::LinkGone(it.index)));
            }),
            Message::NewAddress(message) => convert::address(&message).into_iter().for_each(|it| {
                let changed = put(&mut self.addresses, (it.interface, it.network), &it);
                changes.extend(changed.then_some(Change::Address(it)));
            }),
            Message::DelAddress(message) => convert::address(&message).into_iter().for_each(|it| {
                self.is_doubtful = true;
                let (interface, network) = (it.interface, it.network);
                let gone = self.addresses.remove(&(interface, network));
                changes.extend(gone.map(|_| Change::AddressGone { interface, network }));
            }),
            Message::NewNeighbour(message) => convert::neighbour(&message).into_iter().for_each(|it| {
                let changed = put(&mut self.neighbours, (it.interface, it.address), &it);
                changes.extend(changed.then_some(Change::Neighbour(it)));
            }),
            Message::DelNeighbour(message) => convert::neighbour(&message).into_iter().for_each(|it| {
                let (interface, address) = (it.interface, it.address);
                let gone = self.neighbours.remove(&(interface, address));
                changes.extend(gone.map(|_| Change::NeighbourGone { interface, address }));
            }),
            Message::NewRoute(message) => convert::route(&message).into_iter().for_each(|(route, object)| {
                self.change_route(route, object, changes, |state, key, new| state.add_variant(key, new, flags));
            }),
            Message::DelRoute(message) => convert::route(&message).into_iter().for_each(|(route, object)| {
                self.change_route(route, object, changes, |state, key, old| state.remove_variant(key, &old));
            }),
            _ => {}
        }
    }

    /// Something has happened that is not told as a change: a next-hop object went, and routes with it; or what was
    /// told cannot be read.
    pub fn doubt(&mut self) {
        self.is_doubtful = true;
    }

    fn link(&mut self, link: Link, changes: &mut Vec<Change>) {
        let before = self.links.get(&link.index);
        self.is_doubtful |= before.is_some_and(|old| old.is_up && !link.is_up);
        // Next-hop objects go with the carrier already, and routes with them.
        self.is_doubtful |= before.is_some_and(|old| old.has_carrier && !link.has_carrier) && self.has_objects();
        if put(&mut self.links, link.index, &link) {
            changes.push(Change::Link(link));
        }
    }

    fn has_objects(&self) -> bool {
        self.routes.values().flatten().any(|variant| variant.object.is_some())
    }

    fn change_route(
        &mut self,
        route: Route,
        object: Option<u32>,
        changes: &mut Vec<Change>,
        change: impl FnOnce(&mut State, RouteKey, Variant),
    ) {
        let key = route.key;
        let before = self.used(&key).cloned();
        change(self, key, Variant::new(route, object));
        match (before, self.used(&key)) {
            (Some(before), Some(now)) if before.is_told_as(now) => {}
            (_, Some(now)) => changes.push(Change::Route(now.route(key))),
            (Some(_), None) => changes.push(Change::RouteGone(key)),
            (None, None) => {}
        }
    }

    fn used(&self, key: &RouteKey) -> Option<&Variant> {
        self.routes.get(key).and_then(|variants| variants.first())
    }

    fn add_variant(&mut self, key: RouteKey, new: Variant, flags: u16) {
        let variants = self.routes.entry(key).or_default();
        if variants.is_empty() {
            variants.push(new);
        } else if variants.contains(&new) {
            // Told before, by a dump; its place may have changed.
            self.is_doubtful |= variants.len() > 1;
        } else if let [only] = &mut variants[..]
            && only.is_local() == new.is_local()
        {
            let is_same_object = new.object.is_some() && only.object == new.object;
            let is_v6 = key.prefix.addr().is_ipv6();
            let is_grown = is_v6 && only.protocol == new.protocol && is_within(only, &new);
            // Of IPv6, a route of another sort is not replaced, even when the kernel says so.
            let is_replaced = flags & NLM_F_REPLACE != 0 && (!is_v6 || (only.has_gateways() && new.has_gateways()));
            if is_replaced || is_same_object || is_grown {
                self.may_hide |= is_v6 && is_replaced && only.hops.len() > 1;
                *only = new;
            } else if flags & NLM_F_APPEND != 0 && !is_v6 {
                variants.push(new);
            } else {
                self.is_doubtful = true;
            }
        } else {
            self.is_doubtful = true;
        }
    }

    fn remove_variant(&mut self, key: RouteKey, old: &Variant) {
        let Entry::Occupied(mut entry) = self.routes.entry(key) else { return };
        let variants = entry.get_mut();
        match variants.iter().position(|variant| variant.is_told_as(old)) {
            Some(index) => {
                let gone = variants.remove(index);
                self.may_hide |= key.prefix.addr().is_ipv6() && gone.hops.len() > 1;
            }
            // One hop of several, of an IPv6 route; or something that we never heard of.
            None => self.is_doubtful = true,
        }
        if variants.is_empty() {
            entry.remove();
        }
    }

    /// What has to happen to make `self` of `before`.
    pub fn differences(&self, before: &State) -> Vec<Change> {
        let mut changes = Vec::new();
        for (index, link) in changed(&before.links, &self.links) {
            changes.push(link.map_or(Change::LinkGone(*index), |link| Change::Link(link.clone())));
        }
        for (&(interface, network), address) in changed(&before.addresses, &self.addresses) {
            let gone = Change::AddressGone { interface, network };
            changes.push(address.map_or(gone, |address| Change::Address(address.clone())));
        }
        for (&(interface, address), neighbour) in changed(&before.neighbours, &self.neighbours) {
            let gone = Change::NeighbourGone { interface, address };
            changes.push(neighbour.map_or(gone, |neighbour| Change::Neighbour(neighbour.clone())));
        }
        for key in before.routes.keys().filter(|key| !self.routes.contains_key(key)) {
            changes.push(Change::RouteGone(*key));
        }
        for (key, variants) in &self.routes {
            let is_known = before.used(key).is_some_and(|old| old.is_told_as(&variants[0]));
            changes.extend((!is_known).then(|| Change::Route(variants[0].route(*key))));
        }
        changes
    }
}

/// Whether the one has hops, and every one of them is a hop of the other.
fn is_within(one: &Variant, other: &Variant) -> bool {
    !one.hops.is_empty() && one.hops.iter().all(|hop| other.hops.contains(hop))
}

/// Whether that is new.
fn put<K: Ord, V: Clone + PartialEq>(map: &mut BTreeMap<K, V>, key: K, value: &V) -> bool {
    match map.entry(key) {
        btree_map::Entry::Occupied(entry) if entry.get() == value => false,
        btree_map::Entry::Occupied(mut entry) => {
            entry.insert(value.clone());
            true
        }
        btree_map::Entry::Vacant(entry) => {
            entry.insert(value.clone());
            true
        }
    }
}

/// What is gone, as `None`, and what is new or different.
fn changed<'a, K: Ord, V: PartialEq>(
    before: &'a BTreeMap<K, V>,
    now: &'a BTreeMap<K, V>,
) -> impl Iterator<Item = (&'a K, Option<&'a V>)> {
    let gone = before.keys().filter(|key| !now.contains_key(key)).map(|key| (key, None));
    let new = now.iter().filter(|(key, value)| before.get(key) != Some(value)).map(|(key, value)| (key, Some(value)));
    gone.chain(new)
}
