//! Decisions that need no GPU: which tests a GPU supports, and how many warps saturate its link.

use pcie::test::{Iommu, Numa, Test};

use crate::error::{Error, Result};

/// Size of one load or store of a GPU thread.
pub(super) const WORD_BYTES: u32 = 8;
/// Fewest units of a bandwidth test. Each launch visits a unit once, and a launch must last longer than its overhead.
pub(super) const TRANSFERS_MIN: u64 = 4096;
/// Share of the best rate at the knee, beyond which more warps add little.
const KNEE_SHARE: f64 = 0.95;

/// The rate that a number of warps in flight reached.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    pub warps: u32,
    pub transfers_per_ns: f64,
}

/// Checks whether a GPU supports a test.
pub(super) fn check(test: &Test) -> Result<()> {
    if !test.size_bytes.is_multiple_of(WORD_BYTES) || !test.host_offset_bytes.is_multiple_of(WORD_BYTES) {
        return Error::wrong_use(
            "cuda: threads load words of 8 bytes; choose multiples of 8 for --size and --host-offset",
        );
    }
    if !test.window_bytes.is_multiple_of(u64::from(WORD_BYTES)) {
        return Error::wrong_use("cuda: a window is filled by words of 8 bytes; choose a multiple of 8 for --window");
    }
    if test.device_offset_bytes != 0 {
        return Error::wrong_use("cuda: --device-offset does not apply, because transfers end in registers; omit it");
    }
    if test.iommu != Iommu::Off || test.numa != Numa::Local {
        return Error::wrong_use(
            "cuda: --iommu and --numa do not apply: the IOMMU is configured at boot, and memory is pinned on the \
             node to which numactl binds this program; omit them",
        );
    }
    if !test.test.is_latency() && test.units() < TRANSFERS_MIN {
        return Error::wrong_use(format!(
            "cuda: a window of {} transfers is too short for a bandwidth test, because caches would serve repeats; \
             choose --window {} or more",
            test.units(),
            TRANSFERS_MIN * test.unit_bytes()
        ));
    }
    Ok(())
}

/// Returns the numbers of warps to try: powers of two up to `held`, the number that the GPU holds at once.
pub(super) fn warps(held: u32) -> Vec<u32> {
    std::iter::successors(Some(1_u32), |warps| warps.checked_mul(2)).take_while(|warps| *warps <= held.max(1)).collect()
}

/// Returns the number of warps with the best rate, and the knee: the smallest number that reaches nearly that rate,
/// because tags or credits are exhausted.
pub(super) fn best_and_knee(rates: &[Rate]) -> Result<(u32, u32)> {
    let best = rates.iter().max_by(|one, other| one.transfers_per_ns.total_cmp(&other.transfers_per_ns));
    let Some(best) = best else { return Error::failed("cuda: no number of warps was tried") };
    let enough = best.transfers_per_ns * KNEE_SHARE;
    let knee = rates.iter().find(|rate| rate.transfers_per_ns >= enough).unwrap_or(best);
    Ok((best.warps, knee.warps))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test;
    use pcie::test::Kind;

    #[test]
    fn the_knee_is_where_more_warps_add_little() {
        let rates = [(1, 1.0), (2, 2.0), (4, 3.9), (8, 5.8), (16, 6.0), (32, 5.9)]
            .map(|(warps, transfers_per_ns)| Rate { warps, transfers_per_ns });
        assert_eq!(best_and_knee(&rates).unwrap(), (16, 8));
        assert_eq!(best_and_knee(&rates[..1]).unwrap(), (1, 1));
        assert!(best_and_knee(&[]).is_err());
    }

    #[test]
    fn warps_double_up_to_the_number_that_the_gpu_holds() {
        assert_eq!(warps(32), [1, 2, 4, 8, 16, 32]);
        assert_eq!(warps(132 * 64).last(), Some(&8192));
        assert_eq!(warps(0), [1]);
    }

    #[test]
    fn an_unsupported_test_is_refused_with_an_alternative() {
        let large = Test { window_bytes: 1 << 20, ..test(Kind::BwRd) };
        assert!(check(&large).is_ok() && check(&test(Kind::LatRd)).is_ok());
        for (test, words) in [
            (test(Kind::BwRd), "--window 262144"),
            (Test { size_bytes: 63, ..large.clone() }, "multiples of 8"),
            (Test { window_bytes: (1 << 20) + 4, ..large.clone() }, "--window"),
            (Test { iommu: Iommu::Pages4K, ..large.clone() }, "--iommu"),
            (Test { numa: Numa::Remote, ..large.clone() }, "numactl"),
            (Test { device_offset_bytes: 8, ..large }, "--device-offset"),
        ] {
            let error = check(&test).unwrap_err();
            assert!(error.is_wrong_use() && error.to_string().contains(words), "{error}");
        }
    }
}
