//! Every backend passes the one suite. Names begin with `miri_` where Miri can run them: `cargo +nightly miri test
//! miri_`.

use fabric::faulty::{FaultPlan, Faulty};
use fabric::{Link, heap, shm};

fn shm_pair(window_bytes: usize) -> (shm::ShmLink, shm::ShmLink) {
    let (creator, parts) = shm::create_link(window_bytes).expect("a link");
    (creator, shm::open_link(parts, window_bytes).expect("its other end"))
}

fn faulty<L: Link>((a, b): (L, L), plan: fn(u64) -> FaultPlan) -> (Faulty<L>, Faulty<L>) {
    (Faulty::new(a, plan(1)), Faulty::new(b, plan(2)))
}

fabric::conformance_suite!(miri_heap, heap::pair);
fabric::conformance_suite!(real_shm, shm_pair);
fabric::conformance_suite!(miri_faulty_heap, |window_bytes| faulty(heap::pair(window_bytes), FaultPlan::none));
fabric::conformance_suite!(faulty_shm, |window_bytes| faulty(shm_pair(window_bytes), FaultPlan::none));
// Out of order between fences, as write-combined memory may be: still within what a link promises.
fabric::conformance_suite!(miri_combining_heap, |window_bytes| faulty(
    heap::pair(window_bytes),
    FaultPlan::write_combined
));
