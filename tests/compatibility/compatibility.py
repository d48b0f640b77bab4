#!/usr/bin/env python3
"""Runs unmodified programs over kernel TCP and over lanes in alternating rounds and prints a page of documentation.

usage: compatibility.py CROSSLANE [--rounds N] [PROGRAM...]

Each program's own client or benchmark loads it. A program that is not installed is a line that says so. Servers are on
loopback, and each round has a rack directory of its own."""

import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

# The first four register their programs, in the order of the page.
import stores  # noqa: F401
import web  # noqa: F401
import files  # noqa: F401
import tools  # noqa: F401
from trial import ENTRIES, Failed, Missing, Trial


def measure(crosslane, function, by_lane):
    with tempfile.TemporaryDirectory(prefix="compatibility-") as folder:
        trial = Trial(crosslane, by_lane, folder)
        try:
            rate = function(trial)
            if by_lane:
                trial.note_paths()
            return rate, trial.path()
        finally:
            trial.end()


def row(crosslane, name, client, unit, function, rounds):
    rates = {False: [], True: []}
    paths = []
    try:
        for _ in range(rounds):
            for by_lane in (False, True):
                rate, path = measure(crosslane, function, by_lane)
                rates[by_lane].append(rate)
                if by_lane:
                    paths.append(path)
    except Missing as missing:
        return f"| {name} | {client} | not tried: no {missing} | | | |"
    except Failed as failed:
        path = "lanes" if len(rates[False]) > len(rates[True]) else "kernel TCP"
        return f"| {name} | {client} | **fails over {path}**: {failed} | | | |"
    kernel, lane = (statistics.median(rates[by_lane]) for by_lane in (False, True))
    figures = [f"{rate:,.0f}" if rate >= 1000 else f"{rate:.3g}" for rate in (kernel, lane)]
    return f"| {name} | {client} | {paths[-1]} | {figures[0]} {unit} | {figures[1]} {unit} | {lane / kernel:.2f} |"


HEAD = """\
# Programs over lanes

Made by `./x exam` (tests/compatibility/compatibility.py): unmodified programs, each under load from its own client or
benchmark on loopback, server and client with `crosslane run --`. An error or a wrong answer is a failure.

{origin}

- **Path**: the path of the bytes, as `crosslane stat` reports it while the client runs. `kernel TCP`: no byte over a
  lane; the reason is below the table.
- **Kernel TCP**, **Lanes**: medians of {rounds} alternating rounds. **Ratio**: lanes to kernel TCP. With two noisy
  cores, rounds differ by a fifth and more: ratios from 0.8 to 1.25 are not distinguishable from 1.

| Server | Client | Path | Kernel TCP | Lanes | Ratio |
|---|---|---|---:|---:|---:|"""

FOOT = """
Reasons for kernel TCP; accelerated programs fall back when they connect to these:

- busybox is a static program, into which no library can be loaded.
- etcd is a Go program, which makes system calls without libc.
- gRPC sets `SO_ZEROCOPY` on its listener, whose completions arrive on an error queue that lanes do not have. A listener
  with options that lanes do not support uses kernel TCP.
- vsftpd listens for its data connections as user `ftp` in a `chroot`: there is no rack directory, and it would belong
  to another user. Its control connection, accepted by root, has a lane.

Notes:

- Lanes join programs of one user. Servers that have their own user (PostgreSQL, MariaDB, Squid, RabbitMQ) run as that
  user here, as with `User=` of a systemd unit, and so do their clients; nginx runs as root. The
  workers of Apache and PHP-FPM run as `www-data`, so that their connections stay on kernel TCP.
- nginx starts the program that replaces it with a new environment. Here its configuration has `env LD_PRELOAD;` and
  `env CROSSLANE_RACK;`, without which clients of the new program use kernel TCP; none is lost in that case either.
- The program on tokio is mini-redis, the server of its tutorial. Open MPI is told to use its TCP transport between
  processes of one machine (`--mca btl tcp,self`); by default it uses its own shared memory.
- Over kernel TCP, 8 connections to Java's own HTTP server take about 45 ms a request: most likely Nagle's algorithm and
  a delayed acknowledgement, which lanes do not have (not traced).

A row with **fails** reports a wrong answer, an error of a client or a server that ended.
"""


def origin():
    """Returns the commit, date and machine of the figures."""
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    here = pathlib.Path(__file__).parent
    commit = subprocess.run(["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    machine = model[1] if model else os.uname().machine
    return (
        f"Commit {commit.stdout.strip() or 'unknown'}, {time.strftime('%Y-%m-%d')}, "
        f"Linux {os.uname().release.split('-')[0]}, {os.cpu_count()} cores ({machine})."
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crosslane", metavar="CROSSLANE")
    parser.add_argument("programs", metavar="PROGRAM", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_intermixed_args()
    chosen = [
        entry
        for entry in ENTRIES
        if not arguments.programs or any(word.lower() in entry[0].lower() for word in arguments.programs)
    ]
    if not chosen:
        parser.error(f"no program is named {' or '.join(arguments.programs)}")
    rows = []
    crosslane = str(pathlib.Path(arguments.crosslane).resolve())
    print(HEAD.format(origin=origin(), rounds=arguments.rounds))
    for entry in chosen:
        rows.append(row(crosslane, *entry, arguments.rounds))
        print(rows[-1], flush=True)
    print(FOOT, end="")
    return 1 if any("**fails over lanes**" in line for line in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
