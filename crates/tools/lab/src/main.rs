//! `lab [OPTIONS] SCRIPT`: runs a script in guests; see `docs/lab.md`.
//!
//! The exit code is that of the script; 124 after the time limit, 130 when interrupted, 1 if the lab cannot be started,
//! 2 for wrong use.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Result;
use lab::{Options, Report};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let parsed = Options::parse(&arguments);
    let (options, script) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => return wrong_use(&error),
    };
    match run(&options, &script) {
        Ok(report) => {
            if let Some(failure) = &report.failure {
                eprintln!("lab: {failure}");
            }
            ExitCode::from(u8::try_from(report.code()).unwrap_or(1))
        }
        Err(error) => {
            eprintln!("lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn wrong_use(error: &anyhow::Error) -> ExitCode {
    match error.downcast_ref::<clap::Error>() {
        Some(error) if !error.use_stderr() => {
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        Some(error) => {
            let text = error.to_string();
            let line = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
            eprintln!("lab: {line}; see --help");
        }
        None => eprintln!("lab: {error:#}"),
    }
    ExitCode::from(2)
}

fn run(options: &Options, script: &str) -> Result<Report> {
    let interrupt = Arc::new(AtomicBool::new(false));
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, interrupt.clone())?;
    }
    options.lab(script).echo().interrupted_by(interrupt).run()
}
