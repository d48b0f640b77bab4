"""One round of a program over one path: its servers, its clients and the paths of their bytes."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

WAIT_S_MAX = 30
CLIENT_SECONDS = 120
LOOK_EVERY_SECONDS = 0.2
ENTRIES = []


class Missing(Exception):
    """A program is not installed."""


class Failed(Exception):
    """A program behaved differently than over kernel TCP."""


def entry(name, client, unit):
    def register(function):
        ENTRIES.append((name, client, unit, function))
        return function

    return register


def program(name, *folders):
    found = shutil.which(name, path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", *folders]))
    if found is None:
        raise Missing(name)
    return found


def python_with(module):
    """Returns a Python that has the module: the running one, or Debian's."""
    for python in (sys.executable, "/usr/bin/python3"):
        if subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0:
            return python
    raise Missing(f"Python module {module}")


def last_words(text):
    """Returns the last line, shortened for a cell of a table."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return lines[-1].replace("|", "/")[:120] if lines else "no output"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Trial:
    """One round of a program over one path."""

    def __init__(self, crosslane, by_lane, folder):
        self.crosslane = crosslane
        self.by_lane = by_lane
        self.folder = pathlib.Path(folder)
        self.environment = dict(os.environ, CROSSLANE_RACK=str(self.folder / "rack"))
        (self.folder / "rack").mkdir(mode=0o700)
        self.servers = []
        self.user = {}
        self.most = {"lane": 0, "kernel": 0}

    def run_as(self, name):
        """As root, runs all programs as this user, who then also owns the rack: a rack belongs to one user."""
        if os.geteuid() == 0:
            self.user = {"user": name, "group": name, "extra_groups": [], "cwd": "/"}
            for path in (self.folder, self.folder / "rack"):
                shutil.chown(path, name)

    def prepare(self, arguments, **options):
        """Runs a command that creates files, without lanes."""
        done = subprocess.run(arguments, capture_output=True, **(self.user | options))
        if done.returncode != 0:
            raise Failed(f"{arguments[0]}: {last_words((done.stdout + done.stderr).decode(errors='replace'))}")
        return done.stdout.decode(errors="replace")

    def command(self, arguments):
        return [self.crosslane, "run", "--", *arguments] if self.by_lane else list(arguments)

    def serve(self, arguments, port, **options):
        """Starts a server and waits until it listens."""
        log = open(self.folder / f"server-{len(self.servers)}.log", "wb")
        with log:
            server = subprocess.Popen(
                self.command(arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment | options.pop("environment", {}),
                start_new_session=True,
                **(self.user | options),
            )
        self.servers.append(server)
        until = time.monotonic() + WAIT_S_MAX
        while time.monotonic() < until:
            if server.poll() is not None:
                raise Failed(f"{arguments[0]} ended: {last_words(pathlib.Path(log.name).read_text(errors='replace'))}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return server
            time.sleep(0.05)
        raise Failed(f"{arguments[0]} does not listen after {WAIT_S_MAX} s")

    def client(self, arguments, **options):
        """Runs a client, which must succeed; returns its output and its duration."""
        began = time.monotonic()
        client = subprocess.Popen(
            self.command(arguments),
            stdin=options.pop("stdin", subprocess.DEVNULL),
            stdout=options.pop("stdout", subprocess.PIPE),
            stderr=subprocess.STDOUT,
            env=self.environment | options.pop("environment", {}),
            start_new_session=True,
            **(self.user | options),
        )
        done = threading.Event()
        watcher = threading.Thread(target=self.watch, args=[done])
        watcher.start()
        try:
            output = (client.communicate(timeout=CLIENT_SECONDS)[0] or b"").decode(errors="replace")
        except subprocess.TimeoutExpired:
            raise Failed(f"{arguments[0]} was not done after {CLIENT_SECONDS} s") from None
        finally:
            done.set()
            watcher.join()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(client.pid, signal.SIGKILL)
        if client.returncode != 0:
            raise Failed(f"{arguments[0]} ended with {client.returncode}: {last_words(output)}")
        return output, time.monotonic() - began

    def watch(self, done):
        """Reads the counters of all programs while a client runs, because those of a process vanish when it ends."""
        while self.by_lane and not done.wait(LOOK_EVERY_SECONDS):
            self.note_paths()

    def note_paths(self):
        """Notes the counters that `crosslane stat` reports for all programs of the rack."""
        said = subprocess.run([self.crosslane, "stat", "--json"], env=self.environment, capture_output=True)
        if said.returncode != 0:
            return
        totals = [process["totals"] for process in json.loads(said.stdout)["processes"]]
        for path, most in self.most.items():
            names = f"{path}_bytes_sent", f"{path}_bytes_received"
            self.most[path] = max(most, sum(total[name] for total in totals for name in names))

    def path(self):
        lanes, kernel = self.most["lane"], self.most["kernel"]
        if lanes == 0:
            return "kernel TCP"
        return "lane" if kernel <= lanes / 100 else f"lane {100 * lanes // (lanes + kernel)}%"

    def end(self):
        for server in self.servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
        for server in self.servers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        # A process may start another one while the list is read.
        while left := list(self.daemons()):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def daemons(self):
        """Processes that left their server's group, recognized by the folder in their command line or open files."""
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                names = [os.fsdecode((process / "cmdline").read_bytes())]
                names += [os.readlink(file) for file in (process / "fd").iterdir()]
                if int(process.name) != os.getpid() and any(str(self.folder) in name for name in names):
                    yield int(process.name)


def make_certificate(trial):
    """Creates a key and a self-signed certificate; returns their paths."""
    key, certificate = str(trial.folder / "key"), str(trial.folder / "certificate")
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=localhost"]
    trial.prepare([program("openssl"), "req", "-x509", *kind, "-keyout", key, "-out", certificate])
    return key, certificate


def number(pattern, text):
    found = re.findall(pattern, text)
    if not found:
        raise Failed(f"no figure in: {last_words(text)}")
    return float(found[-1])


def curl_many(trial, url, count, *options):
    """Sends requests one after the other over one connection; checks the length of each answer."""
    config = trial.folder / "curl.txt"
    request = f'url = "{url}"\noutput = "/dev/null"\nwrite-out = "%{{http_code}} %{{size_download}}\\n"\n'
    config.write_text(request * count)
    output, seconds = trial.client([program("curl"), "--silent", "--show-error", *options, "--config", str(config)])
    answers = set(output.strip().split("\n"))
    if len(answers) != 1 or not answers.pop().startswith("200 "):
        raise Failed(f"curl got different answers: {sorted(set(output.split(chr(10))))[:3]}")
    return count / seconds
