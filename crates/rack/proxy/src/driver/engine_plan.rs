//! Which partitions each engine of a link uses, and which thread runs it.

use crate::placement::Class;
use control::proxy::Configuration;
use std::collections::BTreeMap;

/// The partitions of one engine, by number, and the CPU of its thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EnginePlan {
    pub(super) latency: usize,
    pub(super) bulk: Option<usize>,
    pub(super) cpu: Option<u16>,
}

/// Returns the engines of every link: one for each latency partition, with the bulk partition of the same rank.
pub(super) fn engine_plans(setup: &Configuration) -> Vec<EnginePlan> {
    let of_class = |class| move |partition: &(usize, &control::proxy::Partition)| class_of(partition.1) == class;
    let numbered = || setup.partitions.iter().enumerate();
    let bulk: Vec<usize> = numbered().filter(of_class(Class::Bulk)).map(|(index, _)| index).collect();
    numbered()
        .filter(of_class(Class::Latency))
        .enumerate()
        .map(|(rank, (latency, partition))| EnginePlan { latency, bulk: bulk.get(rank).copied(), cpu: partition.core })
        .collect()
}

fn class_of(partition: &control::proxy::Partition) -> Class {
    match partition.class {
        control::proxy::Class::Latency => Class::Latency,
        control::proxy::Class::Bulk => Class::Bulk,
    }
}

/// Returns the indexes of the plans by thread. Engines with the same CPU share a thread, and so do those without a CPU.
/// Both nodes compute the same order.
pub(super) fn threads_of(plans: &[EnginePlan]) -> Vec<(Option<u16>, Vec<usize>)> {
    let mut threads = BTreeMap::<Option<u16>, Vec<usize>>::new();
    for (index, plan) in plans.iter().enumerate() {
        threads.entry(plan.cpu).or_default().push(index);
    }
    threads.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::proxy::{Access, Partition, VERSION};

    fn setup(partitions: &[(control::proxy::Class, Option<u16>)]) -> Configuration {
        Configuration {
            version: VERSION,
            own_slot: 0,
            slots: 0,
            nodes: Vec::new(),
            rack_directory: "/nowhere".into(),
            control_partition_bytes: 65_536,
            partitions: partitions.iter().map(|&(class, core)| Partition { class, core }).collect(),
            slice_bytes: None,
            data_bytes: u64::MAX,
            spans: None,
            return_ns: 0,
            successor_socket: None,
            keeps_partitions: true,
            is_failover: false,
            failover_port: None,
            publish: None,
            timing: None,
            access: Access { rules: Vec::new(), allows_others: true },
        }
    }

    #[test]
    fn partitions_are_paired_by_rank_and_threads_own_those_of_their_cpu() {
        use control::proxy::Class::{Bulk, Latency};
        let setup = setup(&[(Latency, Some(1)), (Bulk, None), (Latency, Some(0)), (Latency, Some(1)), (Bulk, None)]);
        let plans = engine_plans(&setup);
        let plan = |latency, bulk, cpu| EnginePlan { latency, bulk, cpu: Some(cpu) };
        assert_eq!(plans, [plan(0, Some(1), 1), plan(2, Some(4), 0), plan(3, None, 1)]);
        assert_eq!(threads_of(&plans), [(Some(0), vec![1]), (Some(1), vec![0, 2])]);
    }
}
