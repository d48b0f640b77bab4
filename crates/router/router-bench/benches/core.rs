//! Benchmark of the forwarding core: `cargo bench -p router-bench --bench core`.

use router_bench::core::{Options, Parts, instructions, run, work};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [command, version, packets] = &arguments[..]
        && command == "work"
    {
        let (version, packets) = (version.parse().expect("4 or 6"), packets.parse().expect("a number"));
        work(version, packets).expect("all packets are forwarded");
        return;
    }
    let options = if arguments.iter().any(|argument| argument == "full") { Options::full() } else { Options::quick() };
    let results = run(&options, Parts::ALL, &mut |what| eprintln!("{what}")).expect("all packets are forwarded");
    println!("{} and {} routes, built in {:.0} ms", results.routes_v4, results.routes_v6, results.build_ms);
    for case in &results.cases {
        let stages: Vec<String> =
            case.stages.iter().map(|stage| format!("{} {:.1}", stage.stage, stage.ns_per_packet)).collect();
        println!(
            "IPv{} {:>4} B, {:>7} destinations: {:6.2} Mpps (best {:6.2}), {:6.1} Gb/s; ns: {}",
            case.version,
            case.size,
            case.destinations,
            case.mpps.median,
            case.mpps.best,
            case.wire_gbit_per_s,
            stages.join(", ")
        );
    }
    for found in &results.zero_loss {
        println!(
            "zero loss, IPv{} {:>4} B: {:6.2} Mpps raw, {:6.2} undisturbed; stalled {:.2}%, {:.0} us at most",
            found.version,
            found.size,
            found.mpps,
            found.mpps_undisturbed,
            100.0 * found.stalled_share,
            found.stall_us_max
        );
    }
    for churn in &results.churn {
        println!(
            "{:>9.0} route changes a second: {:6.2} Mpps (best {:6.2})",
            churn.changes_per_s, churn.mpps.median, churn.mpps.best
        );
    }
    let program = std::env::current_exe().expect("this program");
    match instructions(&program, &["work"]) {
        Ok(counts) => {
            for count in counts {
                println!("IPv{}: {:7.1} instructions, {}", count.version, count.per_packet, count.stage);
            }
        }
        Err(error) => println!("{error}"),
    }
}
