//! Benchmark of forwarding between virtual Ethernet interfaces, which needs root: `cargo bench -p router-bench --bench
//! ethernet [full]`.

use router_bench::ethernet::{Options, measure};

fn main() {
    let is_full = std::env::args().any(|argument| argument == "full");
    let options = if is_full { Options::full() } else { Options::quick() };
    let results = match measure(&options, &mut |what| eprintln!("{what}")) {
        Ok(results) => results,
        Err(error) => {
            eprintln!("ethernet: {error}");
            std::process::exit(1);
        }
    };
    println!("{} routes, {} processors", results.destinations, results.processors);
    for case in &results.cases {
        let latency = case.latency;
        println!(
            "IPv{} {:>4} B {:<14} {:.3} Mpps (best {:.3}), {:.3} offered; us p50 {:.1}, p99 {:.1}, most {:.1}; lost {}",
            case.version,
            case.size_bytes,
            format!("{:?}", case.subject),
            case.mpps.median,
            case.mpps.best,
            case.offered_mpps,
            latency.p50_us,
            latency.p99_us,
            latency.max_us,
            latency.lost
        );
    }
    for row in &results.zero_loss {
        println!(
            "IPv{} {:>4} B {:<14} no loss: {:.3} Mpps raw, {:.3} undisturbed, ended by {:?}; {} of {} trials disturbed",
            row.version,
            row.size,
            format!("{:?}", row.subject),
            row.mpps,
            row.mpps_undisturbed,
            row.ended_by,
            row.trials_disturbed,
            row.trials
        );
    }
}
