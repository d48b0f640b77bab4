//! What the demo tries.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::Step;
use super::host::{PAGE_BYTES, PORT, page};
use super::lab::{CommandOutput, Lab};

/// How long a node may take to be seen dead, or alive again, before that counts as failure.
const PATIENCE: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// How much iperf3 sends: for so long, or so many bytes.
const IPERF_LOAD: [&str; 2] = ["-t", "2"];
const IPERF_LOAD_QUICK: [&str; 2] = ["-n", "8M"];

/// All steps, each shown when it is done.
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
    done(death(lab)?)?;
    done(return_of_the_dead(lab)?)?;
    Ok(steps)
}

fn step(what: String, said: &CommandOutput, is_fine: bool, result: String) -> Step {
    Step { what, command: Some(said.command.clone()), is_fine, result }
}

/// Returns the last line that a program printed.
fn last_line(said: &CommandOutput) -> String {
    said.text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing").to_owned()
}

fn ping(lab: &Lab<'_>, from: &str, to: &str, address: &str) -> Result<Step> {
    let said = lab.run_at(from, &["ping", "-n", "-c", "5", "-i", "0.1", "-w", "5", address])?;
    let result = ping_result(&said).unwrap_or_else(|| last_line(&said));
    Ok(step(format!("ping {from} -> {to}, {address}"), &said, said.status.success(), result))
}

/// From `5 packets transmitted, 5 received, ...` and `rtt min/avg/max/mdev = 0.1/0.2/0.3/0.1 ms`.
fn ping_result(said: &CommandOutput) -> Option<String> {
    let counts = said.text.lines().find(|line| line.contains(" packets transmitted"))?;
    let mut counts = counts.split(", ").filter_map(|part| part.split(' ').next());
    let (sent, received) = (counts.next()?, counts.next()?);
    let times = said.text.lines().find_map(|line| line.strip_prefix("rtt min/avg/max/mdev = "))?;
    let (min, max) = (times.split('/').next()?, times.split('/').nth(2)?);
    Some(format!("{received} of {sent} came back, in {min} to {max} ms"))
}

fn traceroute(lab: &Lab<'_>, from: &str, to: &str, first: &str, last: &str) -> Result<Step> {
    let said = lab.run_at(from, &["traceroute", "-n", "-q", "1", "-w", "2", "-N", "1", "-m", "8", last])?;
    let hops: Vec<&str> = said.text.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1)).collect();
    let is_fine = hops == [first, last];
    let result = format!("by way of {}", hops.join(", "));
    Ok(step(format!("traceroute {from} -> {to}, {last}"), &said, is_fine, result))
}

fn curl(lab: &Lab<'_>, address: &str) -> Result<Step> {
    let (url, file) = (format!("http://{address}:{PORT}/"), lab.cluster().with_file_name("page"));
    let file_word = file.to_string_lossy().into_owned();
    let said = lab.run_at("h1", &["curl", "-g", "-s", "-S", "-m", "20", "-o", &file_word, &url])?;
    let is_fine = said.status.success() && std::fs::read(&file).is_ok_and(|read| read == page());
    let result = if is_fine { format!("{PAGE_BYTES} bytes, all as they were sent") } else { last_line(&said) };
    Ok(step(format!("curl h1 -> h3, {address}"), &said, is_fine, result))
}

fn iperf(lab: &Lab<'_>, address: &str, load: [&str; 2]) -> Result<Step> {
    let mut server = lab.start_at("h1", &["iperf3", "-s", "-1"])?;
    let deadline = Instant::now() + PATIENCE;
    // The server needs a moment until it listens.
    let said = loop {
        let words =
            ["timeout", "20", "iperf3", "-c", address, "-f", "m", "--connect-timeout", "2000", load[0], load[1]];
        let said = lab.run_at("h2", &words);
        let has_failed = said.as_ref().is_ok_and(|said| !said.status.success());
        if !has_failed || Instant::now() >= deadline {
            break said;
        }
        std::thread::sleep(20 * LOOK_EVERY);
    };
    let _ = server.kill();
    let _ = server.wait();
    let said = said?;
    let received = said.text.lines().find(|line| line.ends_with("receiver"));
    let rate = received.and_then(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let unit = words.iter().position(|word| *word == "Mbits/sec")?;
        words.get(unit.checked_sub(1)?).copied()
    });
    let result = match rate {
        Some(rate) => format!("{rate} Mbit/s of TCP, measured here and now"),
        None => last_line(&said),
    };
    Ok(step(format!("iperf3 h2 -> h1, {address}"), &said, said.status.success() && rate.is_some(), result))
}

/// Node c is killed: the others send nothing to it any more, and say so to who asks.
fn death(lab: &Lab<'_>) -> Result<Step> {
    let begun = Instant::now();
    lab.kill("c")?;
    let mut known = None;
    while known.is_none() && begun.elapsed() < PATIENCE {
        let status = lab.status("a")?.context("node a is not up any more")?;
        let is_gone = status.peers.iter().any(|peer| peer.node == "c" && peer.state == "down" && peer.routes == 0);
        known = is_gone.then(|| begun.elapsed());
        std::thread::sleep(LOOK_EVERY);
    }
    let said = lab.run_at("h1", &["ping", "-n", "-c", "2", "-i", "0.2", "-w", "2", "10.77.3.2"])?;
    let is_answered = said.text.contains("Unreachable");
    let others = lab.run_at("h1", &["ping", "-n", "-c", "1", "-w", "2", "10.77.2.2"])?;
    let answer =
        if is_answered { "who pings h3 is told that it is unreachable" } else { "who pings h3 is told nothing" };
    let result = match known {
        Some(known) => format!("gone from node a's tables {:.1} ms after; {answer}", known.as_secs_f64() * 1e3),
        None => "still in node a's tables".to_owned(),
    };
    let is_fine = known.is_some() && is_answered && others.status.success();
    Ok(Step { what: "node c is killed".to_owned(), command: None, is_fine, result })
}

fn return_of_the_dead(lab: &Lab<'_>) -> Result<Step> {
    let begun = Instant::now();
    lab.up(Some("c"))?;
    loop {
        let said = lab.run_at("h1", &["ping", "-n", "-c", "1", "-w", "1", "10.77.3.2"])?;
        if said.status.success() || begun.elapsed() > PATIENCE {
            let seconds = begun.elapsed().as_secs_f64();
            let result = match said.status.success() {
                true => format!("h3 is reached again {seconds:.1} s after"),
                false => last_line(&said),
            };
            let what = "node c is started again".to_owned();
            return Ok(step(what, &said, said.status.success(), result));
        }
    }
}
