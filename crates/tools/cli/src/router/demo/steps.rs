//! The steps of the demo.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::Step;
use super::host::{PAGE_BYTES, PORT, page};
use super::lab::{CommandOutput, Lab};

/// Time limit for the other nodes to detect that a node has died or is up again.
const DETECTION_LIMIT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Amount of data that iperf3 sends: for 2 s, or 8 MB.
const IPERF_LOAD: [&str; 2] = ["-t", "2"];
const IPERF_LOAD_QUICK: [&str; 2] = ["-n", "8M"];

/// Runs all steps, and calls `show` after each.
pub fn all(lab: &Lab<'_>, is_quick: bool, show: &mut dyn FnMut(&Step) -> Result<()>) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    let mut done = |step: Step| -> Result<()> {
        show(&step)?;
        steps.push(step);
        Ok(())
    };
    for (from, to, address) in [
        ("h1", "h3", "10.77.3.2"),
        ("h2", "h1", "10.77.1.2"),
        ("h1", "h3", "fd77:3::2"),
        ("h3", "h2", "fd77:2::2"),
        ("a", "h3", "10.77.3.2"),
    ] {
        done(ping(lab, from, to, address)?)?;
    }
    for (from, to, first, last) in [("h1", "h3", "10.77.1.1", "10.77.3.2"), ("h2", "h1", "fd77:2::1", "fd77:1::2")] {
        done(traceroute(lab, from, to, first, last)?)?;
    }
    for address in ["10.77.3.2", "[fd77:3::2]"] {
        done(curl(lab, address)?)?;
    }
    for address in ["10.77.1.2", "fd77:1::2"] {
        done(iperf(lab, address, if is_quick { IPERF_LOAD_QUICK } else { IPERF_LOAD })?)?;
    }
    done(kill_node(lab)?)?;
    done(restart_node(lab)?)?;
    Ok(steps)
}

fn step(what: String, output: &CommandOutput, is_fine: bool, result: String) -> Step {
    Step { what, command: Some(output.command.clone()), is_fine, result }
}

/// Returns the last line that a program printed.
fn last_line(output: &CommandOutput) -> String {
    output.text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it printed nothing").to_owned()
}

fn ping(lab: &Lab<'_>, from: &str, to: &str, address: &str) -> Result<Step> {
    let output = lab.run_at(from, &["ping", "-n", "-c", "5", "-i", "0.1", "-w", "5", address])?;
    let result = ping_result(&output).unwrap_or_else(|| last_line(&output));
    Ok(step(format!("ping {from} -> {to}, {address}"), &output, output.status.success(), result))
}

/// Parses `5 packets transmitted, 5 received, ...` and `rtt min/avg/max/mdev = 0.1/0.2/0.3/0.1 ms`.
fn ping_result(output: &CommandOutput) -> Option<String> {
    let counts = output.text.lines().find(|line| line.contains(" packets transmitted"))?;
    let mut counts = counts.split(", ").filter_map(|part| part.split(' ').next());
    let (sent, received) = (counts.next()?, counts.next()?);
    let times = output.text.lines().find_map(|line| line.strip_prefix("rtt min/avg/max/mdev = "))?;
    let (min, max) = (times.split('/').next()?, times.split('/').nth(2)?);
    Some(format!("{received} of {sent} answered, in {min} to {max} ms"))
}

fn traceroute(lab: &Lab<'_>, from: &str, to: &str, first: &str, last: &str) -> Result<Step> {
    let output = lab.run_at(from, &["traceroute", "-n", "-q", "1", "-w", "2", "-N", "1", "-m", "8", last])?;
    let hops: Vec<&str> = output.text.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1)).collect();
    let is_fine = hops == [first, last];
    let result = format!("via {}", hops.join(", "));
    Ok(step(format!("traceroute {from} -> {to}, {last}"), &output, is_fine, result))
}

fn curl(lab: &Lab<'_>, address: &str) -> Result<Step> {
    let (url, file) = (format!("http://{address}:{PORT}/"), lab.cluster().with_file_name("page"));
    let file_word = file.to_string_lossy().into_owned();
    let output = lab.run_at("h1", &["curl", "-g", "-s", "-S", "-m", "20", "-o", &file_word, &url])?;
    let is_fine = output.status.success() && std::fs::read(&file).is_ok_and(|read| read == page());
    let result = if is_fine { format!("{PAGE_BYTES} bytes, all intact") } else { last_line(&output) };
    Ok(step(format!("curl h1 -> h3, {address}"), &output, is_fine, result))
}

fn iperf(lab: &Lab<'_>, address: &str, load: [&str; 2]) -> Result<Step> {
    let mut server = lab.start_at("h1", &["iperf3", "-s", "-1"])?;
    let deadline = Instant::now() + DETECTION_LIMIT;
    // The client is retried until the server listens.
    let output = loop {
        let words =
            ["timeout", "20", "iperf3", "-c", address, "-f", "m", "--connect-timeout", "2000", load[0], load[1]];
        let output = lab.run_at("h2", &words);
        let has_failed = output.as_ref().is_ok_and(|output| !output.status.success());
        if !has_failed || Instant::now() >= deadline {
            break output;
        }
        std::thread::sleep(20 * POLL_INTERVAL);
    };
    let _ = server.kill();
    let _ = server.wait();
    let output = output?;
    let received = output.text.lines().find(|line| line.ends_with("receiver"));
    let rate = received.and_then(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let unit = words.iter().position(|word| *word == "Mbits/sec")?;
        words.get(unit.checked_sub(1)?).copied()
    });
    let result = match rate {
        Some(rate) => format!("{rate} Mbit/s of TCP, measured in this run"),
        None => last_line(&output),
    };
    Ok(step(format!("iperf3 h2 -> h1, {address}"), &output, output.status.success() && rate.is_some(), result))
}

/// Kills node c. The other nodes must remove its routes and answer packets to its host as unreachable.
fn kill_node(lab: &Lab<'_>) -> Result<Step> {
    let begun = Instant::now();
    lab.kill("c")?;
    let mut known = None;
    while known.is_none() && begun.elapsed() < DETECTION_LIMIT {
        let status = lab.status("a")?.context("node a is no longer up")?;
        let is_gone = status.peers.iter().any(|peer| peer.node == "c" && peer.state == "down" && peer.routes == 0);
        known = is_gone.then(|| begun.elapsed());
        std::thread::sleep(POLL_INTERVAL);
    }
    let output = lab.run_at("h1", &["ping", "-n", "-c", "2", "-i", "0.2", "-w", "2", "10.77.3.2"])?;
    let is_answered = output.text.contains("Unreachable");
    let others = lab.run_at("h1", &["ping", "-n", "-c", "1", "-w", "2", "10.77.2.2"])?;
    let answer = if is_answered { "pings to h3 are answered as unreachable" } else { "pings to h3 are not answered" };
    let result = match known {
        Some(known) => format!("removed from node a's tables after {:.1} ms; {answer}", known.as_secs_f64() * 1e3),
        None => "still in node a's tables".to_owned(),
    };
    let is_fine = known.is_some() && is_answered && others.status.success();
    Ok(Step { what: "node c is killed".to_owned(), command: None, is_fine, result })
}

fn restart_node(lab: &Lab<'_>) -> Result<Step> {
    let begun = Instant::now();
    lab.up(Some("c"))?;
    loop {
        let output = lab.run_at("h1", &["ping", "-n", "-c", "1", "-w", "1", "10.77.3.2"])?;
        if output.status.success() || begun.elapsed() > DETECTION_LIMIT {
            let seconds = begun.elapsed().as_secs_f64();
            let result = match output.status.success() {
                true => format!("h3 is reachable again after {seconds:.1} s"),
                false => last_line(&output),
            };
            let what = "node c is restarted".to_owned();
            return Ok(step(what, &output, output.status.success(), result));
        }
    }
}
