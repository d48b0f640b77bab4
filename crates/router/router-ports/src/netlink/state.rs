//! The kernel's state as far as it has been reported, and differences between two states.
//!
//! The kernel does not report everything: IPv4 routes that disappear with their interface, its carrier, an address or a
//! next-hop object are removed silently, and a change of a route does not say what the route was before. If an event is
//! ambiguous, the state is marked as possibly incomplete ([`State::may_be_incomplete`]) and must be dumped again;
//! [`State::differences`] then returns the missed changes.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_APPEND, NLM_F_REPLACE};
use netlink_packet_route::RouteNetlinkMessage as Message;
use router::interner::{InternedId, Interner};
use router::sparse_map::shrink_if_sparse;

use super::convert;
use super::model::{Address, Change, Link, Neighbour, Route, RouteHop, RouteKey, RouteKind};
use crate::InterfaceIndex;

/// One of the routes with the same key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
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

    /// Returns whether the route is of table local, which is searched before the main table.
    fn is_local(&self) -> bool {
        self.kind == RouteKind::Local
    }

    fn has_gateways(&self) -> bool {
        !self.hops.is_empty() && self.hops.iter().all(|hop| hop.gateway.is_some())
    }

    fn is_reported_as(&self, other: &Variant) -> bool {
        let reported = |of: &Variant| (of.protocol, of.kind, of.mtu_bytes);
        reported(self) == reported(other) && self.hops == other.hops
    }
}

/// The routes with the same key; the first is the one that the kernel uses. Nearly all keys have one.
enum Variants {
    One(InternedId),
    /// At least two; boxed, because there may be millions of keys.
    Many(Box<[InternedId]>),
}

impl Variants {
    fn of(ids: &[InternedId]) -> Option<Self> {
        match ids {
            [] => None,
            [id] => Some(Self::One(*id)),
            ids => Some(Self::Many(ids.into())),
        }
    }

    fn ids(&self) -> &[InternedId] {
        match self {
            Self::One(id) => std::slice::from_ref(id),
            Self::Many(ids) => ids,
        }
    }
}

#[derive(Default)]
pub(super) struct State {
    links: BTreeMap<InterfaceIndex, Link>,
    addresses: BTreeMap<(InterfaceIndex, IpNet), Address>,
    neighbours: BTreeMap<(InterfaceIndex, IpAddr), Neighbour>,
    routes: HashMap<RouteKey, Variants>,
    /// What the routes are without their keys: those of a routing daemon differ in few things.
    variants: Interner<Variant>,
    may_be_incomplete: bool,
    may_hide_routes: bool,
}

impl State {
    /// Returns whether something may have changed without an event.
    pub fn may_be_incomplete(&self) -> bool {
        self.may_be_incomplete
    }

    /// Returns whether there may be an unreported route: the kernel does not report an IPv6 route among the next hops
    /// of a multipath route, and these have been removed.
    pub fn may_hide_routes(&self) -> bool {
        self.may_hide_routes
    }

    /// Returns the number of keys with routes.
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
        let Self { routes, variants, .. } = self;
        let removed = routes.extract_if(|key, _| key.prefix.addr().is_ipv6() == are_v6);
        removed.for_each(|(_, of_key)| of_key.ids().iter().for_each(|id| _ = variants.release(*id)));
    }

    /// Adds routes of a later dump; routes that it does not contain were read before.
    pub fn add_routes(&mut self, later: State) {
        for (key, of_key) in &later.routes {
            let variants = of_key.ids().iter().map(|id| later.variants.get(*id).clone()).collect();
            self.set_variants(*key, variants);
        }
    }

    /// Applies an entry of a dump, in which routes with the same key are in the order in which the kernel uses them.
    pub fn learn(&mut self, message: Message) {
        match message {
            Message::NewRoute(message) => {
                let Some((route, object)) = convert::route(&message) else { return };
                let key = route.key;
                let new = Variant::new(route, object);
                let mut variants = self.variants_of(&key);
                let position = if new.is_local() { 0 } else { variants.len() };
                variants.insert(position, new);
                self.set_variants(key, variants);
            }
            other => self.apply(other, 0, &mut Vec::new()),
        }
    }

    /// Returns the routes with a key.
    fn variants_of(&self, key: &RouteKey) -> Vec<Variant> {
        let ids = self.routes.get(key).map_or(&[][..], Variants::ids);
        ids.iter().map(|id| self.variants.get(*id).clone()).collect()
    }

    /// Replaces the routes with a key.
    fn set_variants(&mut self, key: RouteKey, variants: Vec<Variant>) {
        let add = |variant: &Variant| self.variants.add(variant, |variant| Arc::new(variant.clone())).0;
        let ids: Vec<InternedId> = variants.iter().map(add).collect();
        let former = match Variants::of(&ids) {
            Some(variants) => self.routes.insert(key, variants),
            None => self.routes.remove(&key),
        };
        former.iter().flat_map(Variants::ids).for_each(|id| _ = self.variants.release(*id));
        shrink_if_sparse(&mut self.routes);
    }

    /// Applies an event with the flags of its header, and appends the resulting changes to `changes`.
    pub fn apply(&mut self, message: Message, flags: u16, changes: &mut Vec<Change>) {
        match message {
            Message::NewLink(message) => convert::link(&message).into_iter().for_each(|it| self.link(it, changes)),
            Message::DelLink(message) => convert::link(&message).into_iter().for_each(|it| {
                self.may_be_incomplete = true;
                changes.extend(self.links.remove(&it.index).map(|_| Change::LinkGone(it.index)));
            }),
            Message::NewAddress(message) => convert::address(&message).into_iter().for_each(|it| {
                let changed = store(&mut self.addresses, (it.interface, it.network), &it);
                changes.extend(changed.then_some(Change::Address(it)));
            }),
            Message::DelAddress(message) => convert::address(&message).into_iter().for_each(|it| {
                self.may_be_incomplete = true;
                let (interface, network) = (it.interface, it.network);
                let removed = self.addresses.remove(&(interface, network));
                changes.extend(removed.map(|_| Change::AddressGone { interface, network }));
            }),
            Message::NewNeighbour(message) => convert::neighbour(&message).into_iter().for_each(|it| {
                let changed = store(&mut self.neighbours, (it.interface, it.address), &it);
                changes.extend(changed.then_some(Change::Neighbour(it)));
            }),
            Message::DelNeighbour(message) => convert::neighbour(&message).into_iter().for_each(|it| {
                let (interface, address) = (it.interface, it.address);
                let removed = self.neighbours.remove(&(interface, address));
                changes.extend(removed.map(|_| Change::NeighbourGone { interface, address }));
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

    /// Records a change without a usable event: a next-hop object was removed, and routes with it; or an event could
    /// not be parsed.
    pub fn mark_incomplete(&mut self) {
        self.may_be_incomplete = true;
    }

    fn link(&mut self, link: Link, changes: &mut Vec<Change>) {
        let before = self.links.get(&link.index);
        self.may_be_incomplete |= before.is_some_and(|old| old.is_up && !link.is_up);
        // Next-hop objects are removed when the carrier is lost, and routes with them.
        self.may_be_incomplete |= before.is_some_and(|old| old.has_carrier && !link.has_carrier) && self.has_objects();
        if store(&mut self.links, link.index, &link) {
            changes.push(Change::Link(link));
        }
    }

    fn has_objects(&self) -> bool {
        self.variants.iter().any(|(_, variant)| variant.object.is_some())
    }

    fn change_route(
        &mut self,
        route: Route,
        object: Option<u32>,
        changes: &mut Vec<Change>,
        change: impl FnOnce(&mut State, RouteKey, Variant),
    ) {
        let key = route.key;
        let before = self.active(&key).cloned();
        change(self, key, Variant::new(route, object));
        match (before, self.active(&key)) {
            (Some(before), Some(now)) if before.is_reported_as(now) => {}
            (_, Some(now)) => changes.push(Change::Route(now.route(key))),
            (Some(_), None) => changes.push(Change::RouteGone(key)),
            (None, None) => {}
        }
    }

    fn active(&self, key: &RouteKey) -> Option<&Variant> {
        self.routes.get(key).and_then(|variants| variants.ids().first()).map(|id| self.variants.get(*id))
    }

    fn add_variant(&mut self, key: RouteKey, new: Variant, flags: u16) {
        let mut variants = self.variants_of(&key);
        if variants.is_empty() {
            variants.push(new);
        } else if variants.contains(&new) {
            // It is known from a dump; its position may have changed.
            self.may_be_incomplete |= variants.len() > 1;
        } else if let [only] = &mut variants[..]
            && only.is_local() == new.is_local()
        {
            let is_same_object = new.object.is_some() && only.object == new.object;
            let is_v6 = key.prefix.addr().is_ipv6();
            let is_grown = is_v6 && only.protocol == new.protocol && is_within(only, &new);
            // An IPv6 route of another kind is not replaced, even if the event says so.
            let is_replaced = flags & NLM_F_REPLACE != 0 && (!is_v6 || (only.has_gateways() && new.has_gateways()));
            if is_replaced || is_same_object || is_grown {
                self.may_hide_routes |= is_v6 && is_replaced && only.hops.len() > 1;
                *only = new;
            } else if flags & NLM_F_APPEND != 0 && !is_v6 {
                variants.push(new);
            } else {
                self.may_be_incomplete = true;
            }
        } else {
            self.may_be_incomplete = true;
        }
        self.set_variants(key, variants);
    }

    fn remove_variant(&mut self, key: RouteKey, old: &Variant) {
        let mut variants = self.variants_of(&key);
        match variants.iter().position(|variant| variant.is_reported_as(old)) {
            Some(index) => {
                let removed = variants.remove(index);
                self.may_hide_routes |= key.prefix.addr().is_ipv6() && removed.hops.len() > 1;
            }
            // One of several hops of an IPv6 route, or a route that was never reported.
            None => self.may_be_incomplete |= !variants.is_empty(),
        }
        self.set_variants(key, variants);
    }

    /// Returns the changes that turn `before` into `self`: of routes only their keys, as there may be millions.
    pub fn differences(&self, before: &State) -> (Vec<Change>, Vec<RouteKey>) {
        let mut changes = Vec::new();
        for (index, link) in changed(&before.links, &self.links) {
            changes.push(link.map_or(Change::LinkGone(*index), |link| Change::Link(link.clone())));
        }
        for (&(interface, network), address) in changed(&before.addresses, &self.addresses) {
            let removed = Change::AddressGone { interface, network };
            changes.push(address.map_or(removed, |address| Change::Address(address.clone())));
        }
        for (&(interface, address), neighbour) in changed(&before.neighbours, &self.neighbours) {
            let removed = Change::NeighbourGone { interface, address };
            changes.push(neighbour.map_or(removed, |neighbour| Change::Neighbour(neighbour.clone())));
        }
        let gone = before.routes.keys().filter(|key| !self.routes.contains_key(key));
        let other = self.routes.keys().filter(|key| {
            let (before, now) = (before.active(key), self.active(key));
            before.zip(now).is_none_or(|(before, now)| !before.is_reported_as(now))
        });
        (changes, gone.chain(other).copied().collect())
    }

    /// Returns the route with a key as a change.
    pub fn route_change(&self, key: RouteKey) -> Change {
        self.active(&key).map_or(Change::RouteGone(key), |active| Change::Route(active.route(key)))
    }
}

/// Returns whether `one` has hops, all of which are hops of `other`.
fn is_within(one: &Variant, other: &Variant) -> bool {
    !one.hops.is_empty() && one.hops.iter().all(|hop| other.hops.contains(hop))
}

/// Stores a value, and returns whether it is new or different.
fn store<K: Ord, V: Clone + PartialEq>(map: &mut BTreeMap<K, V>, key: K, value: &V) -> bool {
    if map.get(&key) == Some(value) {
        return false;
    }
    map.insert(key, value.clone());
    true
}

/// Returns removed keys with `None`, and new or different values.
fn changed<'a, K: Ord, V: PartialEq>(
    before: &'a BTreeMap<K, V>,
    now: &'a BTreeMap<K, V>,
) -> impl Iterator<Item = (&'a K, Option<&'a V>)> {
    let removed = before.keys().filter(|key| !now.contains_key(key)).map(|key| (key, None));
    let new = now.iter().filter(|(key, value)| before.get(key) != Some(value)).map(|(key, value)| (key, Some(value)));
    removed.chain(new)
}
