//! Forwarding between virtual Ethernet on this machine, as root: `cargo bench -p router-bench --bench ethernet [full]`.

use router_bench::ethernet::{Options, measure};

fn main() {
    let is_full = std::env::args().any(|argument| argument == "full");
    let options = if is_full { Options::full() } else { Options::quick() };
    let results = match measure(&options) {
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
            "{:>4} B {:<14} {:.3} Mpps (best {:5.3}), {:5.3} offered; us: p50 {:5.1}, p99 {:5.1}, most {:6.1}; lost {}",
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
}
