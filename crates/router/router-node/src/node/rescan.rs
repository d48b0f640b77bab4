//! The search for prefixes whose candidate routes use a port or a gateway that has changed, a bounded part at a time.

use std::collections::{BTreeMap, HashSet};
use std::ops::Bound;

use ipnet::IpNet;
use router::interner::InternedId;

use super::candidate::Candidates;

/// A pass over all prefixes. What changes after its beginning is found by the next one.
#[derive(Debug, Default)]
pub struct Rescan {
    /// The candidate routes that the pass looks for.
    wanted: HashSet<InternedId>,
    /// The last prefix that it has visited.
    visited: Option<IpNet>,
    wanted_next: HashSet<InternedId>,
}

impl Rescan {
    /// Looks for the prefixes with these candidate routes.
    pub fn begin(&mut self, ids: impl IntoIterator<Item = InternedId>) {
        let wanted = if self.visited.is_none() { &mut self.wanted } else { &mut self.wanted_next };
        wanted.extend(ids);
    }

    /// Returns whether nothing is left to visit.
    pub fn is_done(&self) -> bool {
        self.wanted.is_empty()
    }

    /// Visits at most `visits_max` prefixes, and returns those that were looked for.
    pub fn proceed(&mut self, candidates: &BTreeMap<IpNet, Candidates>, visits_max: usize) -> Vec<IpNet> {
        let (mut found, mut visits_left) = (Vec::new(), visits_max);
        while !self.wanted.is_empty() && visits_left > 0 {
            let begin = self.visited.map_or(Bound::Unbounded, Bound::Excluded);
            let mut is_end = true;
            for (prefix, candidates) in candidates.range((begin, Bound::Unbounded)) {
                if visits_left == 0 {
                    is_end = false;
                    break;
                }
                visits_left -= 1;
                self.visited = Some(*prefix);
                if candidates.iter().any(|(_, id)| self.wanted.contains(&id)) {
                    found.push(*prefix);
                }
            }
            if is_end {
                self.wanted = std::mem::take(&mut self.wanted_next);
                self.visited = None;
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidate::LOCAL;
    use super::*;
    use router::interner::Interner;
    use std::sync::Arc;

    fn prefix(number: u8) -> IpNet {
        format!("10.{number}.0.0/16").parse().unwrap()
    }

    #[test]
    fn all_prefixes_are_visited_in_parts_and_later_changes_by_a_later_pass() {
        let mut names: Interner<str> = Interner::default();
        let [even, odd] = ["even", "odd"].map(|name| names.add(name, |name| Arc::from(name)).0);
        let of = |number: u8| if number.is_multiple_of(2) { even } else { odd };
        let candidates: BTreeMap<IpNet, Candidates> =
            (0..10).map(|number| (prefix(number), Candidates::One(LOCAL, of(number)))).collect();
        let mut rescan = Rescan::default();
        assert!(rescan.is_done() && rescan.proceed(&candidates, 10).is_empty());
        rescan.begin([even]);
        assert_eq!(rescan.proceed(&candidates, 3), [prefix(0), prefix(2)]);
        rescan.begin([odd]);
        assert_eq!(rescan.proceed(&candidates, 4), [prefix(4), prefix(6)]);
        // The rest of this pass, and the beginning of the next one.
        assert_eq!(rescan.proceed(&candidates, 7), [prefix(8), prefix(1), prefix(3)]);
        assert!(!rescan.is_done());
        assert_eq!(rescan.proceed(&candidates, usize::MAX), [5, 7, 9].map(prefix));
        assert!(rescan.is_done());
    }
}
