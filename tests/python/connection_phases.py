"""Runs scenarios on connections of every age and prints a line for each run; lanes and kernel TCP must print the same.

Usage: connection_phases.py [--seed N] [--age AGE]... [--brief] [--only WORD]... [--list] [--jobs N] [--against FILE]

    python3 connection_phases.py > tcp
    crosslane run -- python3 connection_phases.py --against tcp

With `--against`, only the runs that differ are printed, and the exit code is 1 if there are any.

A line is `SCENARIO AGE DIRECTION PROCESSES: STEP=RESULT ...`. The acting endpoint is `a` and its peer is `b`; the
direction says whether `a` is the endpoint of the server or of the client. The steps do not depend on age, direction,
processes and seed; over kernel TCP their results do not either.

Ages, and the traffic before the scenario:
    unaccepted  connected, not accepted
    fresh       accepted, no byte has moved
    one         one exchange of small messages
    twenty      twenty exchanges
    middle      two to eight exchanges, whose sizes, order and way of waiting depend on the seed
    oneway      twenty messages in one direction
    full        one endpoint has filled the connection, and the other one has drained it
"""

import argparse
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import zlib

sys.dont_write_bytecode = True
import phases.accepting  # noqa: E402
import phases.buffers  # noqa: E402
import phases.bulk  # noqa: E402
import phases.endings  # noqa: E402
import phases.epolls  # noqa: E402
import phases.options  # noqa: E402
import phases.processes  # noqa: E402
import phases.shutdowns  # noqa: E402
import phases.threads  # noqa: E402, F401
from phases.conductor import Hang, Scene  # noqa: E402
from phases.scenario import SCENARIOS, grow  # noqa: E402
from phases.worker import read_message, write_message  # noqa: E402

BRIEF_AGES = ["one", "middle", "oneway", "full"]
LINE_BYTES_MAX = 60_000
# With small buffers, the bytes that TCP accepts vary by a quarter between runs.
TCP_VARIES_BY = 0.25


def name_of(run):
    return " ".join(run)


def print_line(run, line):
    print(f"{name_of(run)}: {line}", flush=True)


class AcceptedBytes:
    """Judges the bytes accepted until there was no room: at least as many as by kernel TCP, at most twice as many."""

    def __init__(self, runs):
        """Starts to fill connections of kernel TCP, in parallel to the runs."""
        self.process = self.figures = None
        if any("fill" in run[0] for run in runs):
            environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
            command = [sys.executable, os.path.abspath(__file__), "--figures", "--only", "fill", "--age", "unaccepted"]
            self.process = subprocess.Popen([*command, "--age", "fresh"], env=environment, stdout=subprocess.PIPE)

    def by_tcp(self, scenario):
        if self.figures is None:
            lines = self.process.communicate()[0].decode().splitlines()
            self.figures = {line.split()[0]: figures_of(line.split()) for line in lines}
        return self.figures[scenario]

    def judge(self, scenario, line):
        """Replaces each number by a verdict."""
        if ".fill=" not in line:
            return line
        steps, figures = line.split(), iter(self.by_tcp(scenario))
        for place, step in enumerate(steps):
            for accepted, size in figures_of([step]):
                by_tcp, _ = next(figures)
                # The last send may be partial.
                least, most = by_tcp * (1 - TCP_VARIES_BY) - size, by_tcp * (2 + TCP_VARIES_BY) + size
                verdict = "ok" if least <= accepted <= most else f"{accepted}_where_TCP_accepts_{by_tcp}"
                steps[place] = step.split("=")[0] + "=" + verdict
        return " ".join(steps)


def figures_of(steps):
    """Returns the accepted bytes and the size of a send for each connection that was filled without an error."""
    results = [step.split("=")[1] for step in steps if ".fill=" in step]
    return [tuple(map(int, result.split("/"))) for result in results if "/" in result]


def play(run, seed):
    """Plays one run and returns its line without the name."""
    name, age, direction, processes = run
    chosen = SCENARIOS[name]
    # The trace must not depend on the seed, which only varies sizes, counts and orders that are not printed.
    scene = Scene(random.Random(f"{seed} {name_of(run)}"), direction == "server")
    scene.age = age
    try:
        scene.start_both(processes == "together")
        a, b = scene.pair() if chosen.is_accepted else scene.connect()
        grow(scene, a, b, age)
        chosen.play(scene, a, b)
    except Hang as hang:
        scene.trace.append(str(hang))
    except Exception as error:  # a mistake in the scenario, or a result that it does not expect
        scene.trace.append(f"{type(error).__name__}({error})".replace(" ", "_"))
    finally:
        scene.clean_up()
    return " ".join(scene.trace)


class Runs:
    """Concurrent runs, whose lines are reported in order.

    Each job is a process that takes the next run from a pipe and writes its line into its own pipe.
    """

    def __init__(self, runs, seed, jobs):
        self.runs = runs
        self.seed = seed
        self.next_out, self.next_in = os.pipe()
        self.jobs = dict(self.start() for _ in range(min(jobs, len(runs))))
        for index in range(len(runs)):
            os.write(self.next_in, struct.pack("=I", index))
        os.close(self.next_in)

    def start(self):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self.work(writer)
            finally:
                os._exit(0)
        os.close(writer)
        return reader, pid

    def work(self, writer):
        os.close(self.next_in)
        while number := os.read(self.next_out, 4):
            (index,) = struct.unpack("=I", number)
            line = play(self.runs[index], self.seed).replace("\n", " ")[:LINE_BYTES_MAX]
            write_message(writer, (index, line))

    def play(self, report):
        lines, reported = {}, 0
        while self.jobs:
            for reader in select.select(list(self.jobs), [], [])[0]:
                try:
                    index, line = read_message(reader)
                    lines[index] = line
                except EOFError:
                    os.waitpid(self.jobs.pop(reader), 0)
            while reported in lines:
                report(self.runs[reported], lines[reported])
                reported += 1
        assert reported == len(self.runs), f"no line of '{name_of(self.runs[reported])}'"


class Comparison:
    """Finds the runs that differ from those of a file, by scenario: over TCP the result depends on nothing else."""

    def __init__(self, file):
        self.expected = {line.split()[0]: line.split(": ", 1)[1].split() for line in file}
        self.runs = self.differing = 0

    def __call__(self, run, line):
        self.runs += 1
        expected, steps = self.expected.get(run[0], []), line.split()
        if steps == expected:
            return
        self.differing += 1
        print(f"{name_of(run)}:")
        for place, (step, wanted) in enumerate(itertools.zip_longest(steps, expected)):
            if step != wanted:
                print(f"    step {place}, after {' '.join(steps[max(place - 2, 0):place])}: {step}, want {wanted}")
        sys.stdout.flush()


def direction_of(scenario, seed):
    return ["server", "client"][(zlib.crc32(scenario.encode()) + seed) % 2]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--age", action="append")
    parser.add_argument("--brief", action="store_true", help="play most ages in one direction, chosen by the seed")
    parser.add_argument("--only", action="append", help="play only runs whose name contains this word")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=48)
    parser.add_argument("--figures", action="store_true", help="print accepted bytes as numbers instead of verdicts")
    parser.add_argument("--against", type=argparse.FileType(), help="file with the lines of kernel TCP to compare with")
    options = parser.parse_args()
    runs = [run for name, chosen in SCENARIOS.items() for run in chosen.runs(name)]
    if options.age:
        runs = [run for run in runs if run[1] in options.age]
    if options.only:
        runs = [run for run in runs if any(word in name_of(run) for word in options.only)]
    if options.brief:
        runs = [run for run in runs if run[1] not in BRIEF_AGES or run[2] == direction_of(run[0], options.seed)]
    if options.list:
        print("\n".join(map(name_of, runs)))
        return
    accepted_bytes = AcceptedBytes([] if options.figures else runs)
    report = Comparison(options.against) if options.against else print_line
    judge = (lambda scenario, line: line) if options.figures else accepted_bytes.judge
    Runs(runs, options.seed, options.jobs).play(lambda run, line: report(run, judge(run[0], line)))
    if options.against:
        print(f"{report.differing} of {report.runs} runs differ")
        sys.exit(1 if report.differing else 0)


main()
