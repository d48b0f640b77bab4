use std::collections::HashSet;

use proptest::prelude::*;

use super::*;
use crate::verbs::{AccessFlags, LKey, Sge};
use crate::wire::{QpNumber, RKey};

const ALL: AccessFlags = AccessFlags::all();
const QP: QpNumber = QpNumber(17);

struct Fixture {
    table: MemoryTable,
    domain: ProtectionDomain,
}

impl Fixture {
    fn new() -> Self {
        let mut table = MemoryTable::new(100);
        let domain = table.allocate_domain().unwrap();
        Self { table, domain }
    }

    fn accessor(&self) -> ProtectionContext {
        ProtectionContext { domain: self.domain, qp: QP }
    }

    fn register(&mut self, access: AccessFlags) -> RegionKeys {
        let Self { domain, .. } = *self;
        let at = 0x1000;
        self.table.register(&Registration { domain, host_address: at, address: at, bytes: 100, access }).unwrap()
    }

    fn remote(&self, key: RKey, address: u64, bytes: u64, access: AccessFlags) -> Result<u64, MemoryError> {
        self.table.check_remote(self.accessor(), key, address, bytes, access)
    }

    fn local(&self, key: LKey, address: u64, bytes: u32, access: AccessFlags) -> Result<u64, MemoryError> {
        self.table.check_local(self.domain, &Sge { address, bytes, key }, access)
    }
}

fn bind_of(region: RegionKeys, access: AccessFlags) -> BindInfo {
    BindInfo { region: region.local, address: 0x1010, bytes: 16, access, is_zero_based: false }
}

#[test]
fn bounds_are_enforced_to_the_byte() {
    let mut fixture = Fixture::new();
    let keys = fixture.register(ALL);
    let read = |address, bytes| fixture.remote(keys.remote, address, bytes, AccessFlags::REMOTE_READ).is_ok();
    assert!(read(0x1000, 100) && read(0x1063, 1));
    assert!(!read(0xfff, 2) && !read(0x1000, 101) && !read(0x1064, 1));
    assert!(!read(u64::MAX, 1) && !read(u64::MAX, u64::MAX) && !read(0x1001, u64::MAX));
    assert!(fixture.local(keys.local, 0x1000, 100, AccessFlags::LOCAL_WRITE).is_ok());
    assert!(fixture.local(keys.local, 0x1000, 101, AccessFlags::LOCAL_WRITE).is_err());
    assert!(read(u64::MAX, 0), "an access of 0 bytes is not checked");
}

#[test]
fn access_rights_and_protection_domains_are_enforced() {
    let mut fixture = Fixture::new();
    let keys = fixture.register(AccessFlags::REMOTE_READ);
    assert_eq!(fixture.remote(keys.remote, 0x1000, 1, AccessFlags::REMOTE_READ), Ok(0x1000));
    for missing in [AccessFlags::REMOTE_WRITE, AccessFlags::REMOTE_ATOMIC] {
        let forbidden = Err(MemoryError::Forbidden { key: keys.remote.0, missing });
        assert_eq!(fixture.remote(keys.remote, 0x1000, 8, missing), forbidden);
    }
    let missing = AccessFlags::LOCAL_WRITE;
    let forbidden = Err(MemoryError::Forbidden { key: keys.local.0, missing });
    assert_eq!(fixture.local(keys.local, 0x1000, 1, missing), forbidden);
    assert_eq!(fixture.local(keys.local, 0x1000, 1, AccessFlags::empty()), Ok(0x1000), "reading is always allowed");
    let other = fixture.table.allocate_domain().unwrap();
    let accessor = ProtectionContext { domain: other, qp: QP };
    let error = MemoryError::OtherDomain { key: keys.remote.0, owner: 0, accessor: 1 };
    assert_eq!(fixture.table.check_remote(accessor, keys.remote, 0x1000, 1, AccessFlags::REMOTE_READ), Err(error));
}

#[test]
fn a_region_can_have_other_addresses_for_its_users() {
    let mut fixture = Fixture::new();
    let domain = fixture.domain;
    let registration = Registration { domain, host_address: 0x5000, address: 0, bytes: 64, access: ALL };
    let keys = fixture.table.register(&registration).unwrap();
    assert_eq!(fixture.remote(keys.remote, 8, 8, AccessFlags::REMOTE_READ), Ok(0x5008));
    assert!(fixture.remote(keys.remote, 0x5000, 8, AccessFlags::REMOTE_READ).is_err());
}

#[test]
fn invalid_ranges_and_rights_are_not_registered() {
    let mut fixture = Fixture::new();
    let domain = fixture.domain;
    let mut refuse = |host_address, address, bytes, access| {
        fixture.table.register(&Registration { domain, host_address, address, bytes, access }).unwrap_err()
    };
    assert_eq!(refuse(1, 1, 0, ALL), MemoryError::NoMemory { address: 1, bytes: 0 });
    assert_eq!(refuse(u64::MAX, 0, 2, ALL), MemoryError::NoMemory { address: u64::MAX, bytes: 2 });
    assert_eq!(refuse(0, u64::MAX, 2, ALL), MemoryError::NoMemory { address: u64::MAX, bytes: 2 });
    let error = refuse(0, 0, 2, AccessFlags::REMOTE_WRITE).to_string();
    assert_eq!(error, "remote write cannot be given on memory without local write; add local write");
}

#[test]
fn a_window_of_type_1_grants_only_its_latest_binding() {
    let mut fixture = Fixture::new();
    let region = fixture.register(ALL);
    let window = fixture.table.allocate_window(fixture.domain, WindowKind::Type1).unwrap();
    assert_eq!(fixture.remote(window, 0x1010, 1, AccessFlags::REMOTE_READ), Err(MemoryError::UnknownKey(window.0)));
    let accessor = ProtectionContext { qp: QpNumber(99), ..fixture.accessor() };
    let first = fixture.table.bind_type_1(accessor, window, &bind_of(region, AccessFlags::REMOTE_READ)).unwrap();
    assert_eq!(fixture.remote(first, 0x1010, 16, AccessFlags::REMOTE_READ), Ok(0x1010));
    assert!(fixture.remote(first, 0x100f, 1, AccessFlags::REMOTE_READ).is_err());
    assert!(fixture.remote(first, 0x1020, 1, AccessFlags::REMOTE_READ).is_err());
    assert!(fixture.remote(first, 0x1010, 8, AccessFlags::REMOTE_WRITE).is_err());
    let left = MemoryError::WindowsLeft { key: region.local.0, windows: 1 };
    assert_eq!(fixture.table.deregister(region.local), Err(left));
    let nothing = BindInfo { bytes: 0, ..bind_of(region, AccessFlags::empty()) };
    let second = fixture.table.bind_type_1(accessor, first, &nothing).unwrap();
    for key in [window, first, second] {
        assert_eq!(fixture.remote(key, 0x1010, 1, AccessFlags::REMOTE_READ), Err(MemoryError::UnknownKey(key.0)));
    }
    fixture.table.deregister(region.local).unwrap();
    fixture.table.free_window(second).unwrap();
    fixture.table.free_domain(fixture.domain).unwrap();
}

#[test]
fn keys_of_a_window_that_is_rebound_are_never_reused() {
    let mut fixture = Fixture::new();
    let region = fixture.register(ALL);
    let mut window = fixture.table.allocate_window(fixture.domain, WindowKind::Type1).unwrap();
    let mut seen = HashSet::from([window]);
    for _ in 0..2000 {
        let bound =
            fixture.table.bind_type_1(fixture.accessor(), window, &bind_of(region, AccessFlags::REMOTE_READ)).unwrap();
        assert!(seen.insert(bound), "{bound:?}");
        assert!(fixture.remote(window, 0x1010, 1, AccessFlags::REMOTE_READ).is_err());
        window = bound;
    }
    fixture.table.free_window(window).unwrap();
    fixture.table.deregister(region.local).unwrap();
    assert_eq!(fixture.table.entries(), 0);
}

#[test]
fn a_window_of_type_2_serves_one_queue_pair_until_it_is_invalidated() {
    let mut fixture = Fixture::new();
    let region = fixture.register(ALL);
    let window = fixture.table.allocate_window(fixture.domain, WindowKind::Type2).unwrap();
    let chosen = RKey(window.0 ^ 0xa5);
    let (accessor, bind) =
        (fixture.accessor(), BindInfo { is_zero_based: true, ..bind_of(region, AccessFlags::REMOTE_WRITE) });
    let foreign = RKey(window.0 ^ 0x100);
    let error = MemoryError::KeyOfOther { key: foreign.0, window: window.0 };
    assert_eq!(fixture.table.bind_type_2(accessor, window, foreign, &bind), Err(error));
    fixture.table.bind_type_2(accessor, window, chosen, &bind).unwrap();
    assert_eq!(fixture.remote(chosen, 0, 16, AccessFlags::REMOTE_WRITE), Ok(0x1010));
    assert!(fixture.remote(window, 0, 16, AccessFlags::REMOTE_WRITE).is_err());
    let stranger = ProtectionContext { qp: QpNumber(18), ..accessor };
    let error = MemoryError::OtherQueuePair { key: chosen.0, owner: 17, accessor: 18 };
    assert_eq!(fixture.table.check_remote(stranger, chosen, 0, 1, AccessFlags::REMOTE_WRITE), Err(error));
    assert_eq!(fixture.table.invalidate(stranger, chosen), Err(error));
    assert_eq!(
        fixture.table.bind_type_2(accessor, chosen, chosen, &bind),
        Err(MemoryError::WindowBound(chosen.0)),
        "it must be invalidated first"
    );
    fixture.table.invalidate(accessor, chosen).unwrap();
    assert!(fixture.remote(chosen, 0, 1, AccessFlags::REMOTE_WRITE).is_err());
    assert_eq!(fixture.table.invalidate(accessor, chosen), Err(MemoryError::UnknownKey(chosen.0)));
    fixture.table.bind_type_2(accessor, chosen, window, &bind).unwrap();
    assert!(fixture.remote(window, 0, 1, AccessFlags::REMOTE_WRITE).is_ok());
}

#[test]
fn windows_of_a_destroyed_queue_pair_are_unbound() {
    let mut fixture = Fixture::new();
    let region = fixture.register(ALL);
    let window = fixture.table.allocate_window(fixture.domain, WindowKind::Type2).unwrap();
    let bind = bind_of(region, AccessFlags::REMOTE_READ);
    fixture.table.bind_type_2(fixture.accessor(), window, window, &bind).unwrap();
    fixture.table.unbind_queue_pair(QpNumber(18));
    assert!(fixture.remote(window, 0x1010, 1, AccessFlags::REMOTE_READ).is_ok());
    fixture.table.unbind_queue_pair(QP);
    assert!(fixture.remote(window, 0x1010, 1, AccessFlags::REMOTE_READ).is_err());
    fixture.table.deregister(region.local).unwrap();
}

#[test]
fn a_window_gets_no_more_rights_than_its_region() {
    let mut fixture = Fixture::new();
    let accessor = fixture.accessor();
    let window = fixture.table.allocate_window(fixture.domain, WindowKind::Type1).unwrap();
    let closed = fixture.register(AccessFlags::LOCAL_WRITE);
    let missing = AccessFlags::WINDOW_BIND;
    let forbidden = MemoryError::Forbidden { key: closed.local.0, missing };
    let mut bind = |bind: &BindInfo| fixture.table.bind_type_1(accessor, window, bind);
    assert_eq!(bind(&bind_of(closed, AccessFlags::REMOTE_READ)), Err(forbidden));
    let read_only = fixture.register(AccessFlags::WINDOW_BIND);
    let mut bind = |bind: &BindInfo| fixture.table.bind_type_1(accessor, window, bind);
    for access in
        [AccessFlags::REMOTE_WRITE, AccessFlags::REMOTE_ATOMIC, AccessFlags::LOCAL_WRITE, AccessFlags::WINDOW_BIND]
    {
        assert!(matches!(bind(&bind_of(read_only, access)), Err(MemoryError::Rights { .. })), "{access}");
    }
    let beyond = BindInfo { bytes: 85, ..bind_of(read_only, AccessFlags::REMOTE_READ) };
    assert!(matches!(bind(&beyond), Err(MemoryError::Bounds { .. })));
    assert!(bind(&bind_of(read_only, AccessFlags::REMOTE_READ)).is_ok());
}

#[test]
fn operations_refuse_keys_of_the_wrong_kind() {
    let mut fixture = Fixture::new();
    let accessor = fixture.accessor();
    let region = fixture.register(ALL);
    let bind = bind_of(region, AccessFlags::REMOTE_READ);
    let [first, second] =
        [WindowKind::Type1, WindowKind::Type2].map(|kind| fixture.table.allocate_window(fixture.domain, kind).unwrap());
    let wrong = |done: Result<(), MemoryError>| matches!(done, Err(MemoryError::WrongKind { .. }));
    assert!(wrong(fixture.table.bind_type_1(accessor, second, &bind).map(drop)));
    assert!(wrong(fixture.table.bind_type_2(accessor, first, first, &bind)));
    assert!(wrong(fixture.table.invalidate(accessor, first)));
    assert!(wrong(fixture.table.invalidate(accessor, region.remote)), "a region is not invalidated by a peer");
    assert!(wrong(fixture.table.deregister(LKey(first.0))));
    assert!(wrong(fixture.table.free_window(region.remote)));
    assert!(wrong(fixture.local(LKey(first.0), 0x1010, 1, AccessFlags::empty()).map(drop)));
}

#[test]
fn keys_of_deregistered_regions_are_never_reused() {
    let mut fixture = Fixture::new();
    let mut seen = HashSet::new();
    for _ in 0..2000 {
        let keys = fixture.register(ALL);
        assert!(seen.insert(keys.local), "{keys:?}");
        fixture.table.deregister(keys.local).unwrap();
        assert!(fixture.remote(keys.remote, 0x1000, 1, AccessFlags::REMOTE_READ).is_err());
    }
    assert_eq!(fixture.table.entries(), 0);
}

#[test]
fn a_protection_domain_in_use_cannot_be_freed() {
    let mut fixture = Fixture::new();
    let keys = fixture.register(ALL);
    fixture.table.hold_domain(fixture.domain).unwrap();
    let busy = |users| Err(MemoryError::DomainBusy { domain: 0, users });
    assert_eq!(fixture.table.free_domain(fixture.domain), busy(2));
    fixture.table.deregister(keys.local).unwrap();
    assert_eq!(fixture.table.free_domain(fixture.domain), busy(1));
    fixture.table.release_domain(fixture.domain);
    fixture.table.free_domain(fixture.domain).unwrap();
    let unknown = Err(MemoryError::UnknownDomain(0));
    assert_eq!(fixture.table.free_domain(fixture.domain), unknown);
    assert_eq!(fixture.table.allocate_window(fixture.domain, WindowKind::Type1).map(drop), unknown);
    assert_ne!(fixture.table.allocate_domain().unwrap(), fixture.domain);
}

#[test]
fn a_full_table_is_an_error_and_key_zero_is_invalid() {
    let mut table = MemoryTable::new(2);
    let domain = table.allocate_domain().unwrap();
    for _ in 0..2 {
        assert_ne!(table.allocate_window(domain, WindowKind::Type1).unwrap(), RKey(0));
    }
    assert_eq!(table.allocate_window(domain, WindowKind::Type1), Err(MemoryError::Full(2)));
    let accessor = ProtectionContext { domain, qp: QP };
    assert_eq!(table.check_remote(accessor, RKey(0), 0, 1, AccessFlags::empty()), Err(MemoryError::UnknownKey(0)));
}

#[derive(Clone, Debug)]
enum Step {
    Register,
    Window(WindowKind),
    Bind(usize),
    Invalidate(usize),
    End(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let kind = prop_oneof![Just(WindowKind::Type1), Just(WindowKind::Type2)];
    let step = prop_oneof![
        Just(Step::Register),
        kind.prop_map(Step::Window),
        any::<usize>().prop_map(Step::Bind),
        any::<usize>().prop_map(Step::Invalidate),
        any::<usize>().prop_map(Step::End),
    ];
    proptest::collection::vec(step, 1..200)
}

/// The reference model: the valid keys, and all keys that ceased to be valid.
struct Oracle {
    fixture: Fixture,
    region: RegionKeys,
    regions: Vec<RegionKeys>,
    /// Current key, type, and whether the window is bound.
    windows: Vec<(RKey, WindowKind, bool)>,
    stale: HashSet<u32>,
}

impl Oracle {
    fn new() -> Self {
        let mut fixture = Fixture::new();
        let region = fixture.register(ALL);
        Self { fixture, region, regions: Vec::new(), windows: Vec::new(), stale: HashSet::new() }
    }

    fn fresh(&self, key: u32) {
        assert!(!self.stale.contains(&key), "key {key:#x} was valid before");
    }

    fn step(&mut self, step: &Step) {
        let accessor = self.fixture.accessor();
        match *step {
            Step::Register => {
                if self.fixture.table.entries() < 100 {
                    let keys = self.fixture.register(ALL);
                    self.fresh(keys.local.0);
                    self.regions.push(keys);
                }
            }
            Step::Window(kind) => {
                if let Ok(key) = self.fixture.table.allocate_window(self.fixture.domain, kind) {
                    self.fresh(key.0);
                    self.windows.push((key, kind, false));
                }
            }
            Step::Bind(pick) if !self.windows.is_empty() => {
                let pick = pick % self.windows.len();
                let (key, kind, is_bound) = self.windows[pick];
                let bind = bind_of(self.region, AccessFlags::REMOTE_READ);
                if kind == WindowKind::Type1 {
                    let bound = self.fixture.table.bind_type_1(accessor, key, &bind).unwrap();
                    self.fresh(bound.0);
                    self.stale.insert(key.0);
                    self.windows[pick] = (bound, kind, true);
                } else if !is_bound && key.0 as u8 != u8::MAX {
                    // As programs do (`ibv_inc_rkey`): increment the key.
                    let chosen = RKey(key.0 + 1);
                    self.fresh(chosen.0);
                    self.fixture.table.bind_type_2(accessor, key, chosen, &bind).unwrap();
                    self.stale.insert(key.0);
                    self.windows[pick] = (chosen, kind, true);
                }
            }
            Step::Invalidate(pick) if !self.windows.is_empty() => {
                let pick = pick % self.windows.len();
                let (key, kind, is_bound) = self.windows[pick];
                let done = self.fixture.table.invalidate(accessor, key);
                assert_eq!(done.is_ok(), kind == WindowKind::Type2 && is_bound);
                if done.is_ok() {
                    self.windows[pick].2 = false;
                }
            }
            Step::End(pick) => self.end(pick),
            Step::Bind(_) | Step::Invalidate(_) => {}
        }
    }

    fn end(&mut self, pick: usize) {
        if pick.is_multiple_of(2) && !self.regions.is_empty() {
            let keys = self.regions.remove(pick % self.regions.len());
            self.fixture.table.deregister(keys.local).unwrap();
            self.stale.insert(keys.local.0);
        } else if !self.windows.is_empty() {
            let (key, ..) = self.windows.remove(pick % self.windows.len());
            self.fixture.table.free_window(key).unwrap();
            self.stale.insert(key.0);
        }
    }

    fn check(&self) {
        let reads = |key| self.fixture.remote(key, 0x1010, 16, AccessFlags::REMOTE_READ).is_ok();
        for key in &self.stale {
            assert!(!reads(RKey(*key)), "{key:#x} is still valid");
        }
        for keys in &self.regions {
            assert!(reads(keys.remote));
        }
        for (key, _, is_bound) in &self.windows {
            assert_eq!(reads(*key), *is_bound);
        }
        assert_eq!(self.fixture.table.entries(), 1 + self.regions.len() + self.windows.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.min(500)))]

    #[test]
    fn a_stale_key_is_never_valid(steps in steps()) {
        let mut oracle = Oracle::new();
        for step in &steps {
            oracle.step(step);
        }
        oracle.check();
    }
}
