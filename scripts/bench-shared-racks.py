#!/usr/bin/env python3
"""Redis and streams between users and network namespaces, over lanes and over kernel TCP.

usage: scripts/bench-shared-racks.py [--rounds N] [--target DIR]

Root runs it on an idle machine, after ./x build, with redis, haproxy, iproute2 and a C compiler. It makes three
network namespaces in a row (clients, HAProxy, servers), a shared rack whose rules allow redis and haproxy, and prints
medians of alternating rounds and 95% intervals of the ratios. Everything that it makes is removed again.
"""
import argparse, collections, os, pathlib, random, shutil, statistics, subprocess, tempfile, time

CLIENT, PROXY, SERVER = 61001, 61004, 61002
STREAM = r"""
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }
/* stream serve PORT: reads, and answers 8 bytes; stream write IP PORT BYTES: MB/s; stream connect IP PORT COUNT: us */
int main(int count, char **words) {
    static char buffer[1 << 20];
    struct sockaddr_in address = {.sin_family = AF_INET};
    int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    if (count < 3) return 2;
    if (!strcmp(words[1], "serve")) {
        address.sin_port = htons(atoi(words[2]));
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(fd, (void *)&address, sizeof address) || listen(fd, 100)) return 1;
        for (;;) {
            int client = accept(fd, 0, 0);
            for (ssize_t got; (got = read(client, buffer, 65536)) > 0;)
                if (got == 8 && write(client, buffer, 8) != 8) break;
            close(client);
        }
    }
    inet_pton(AF_INET, words[2], &address.sin_addr);
    address.sin_port = htons(atoi(words[3]));
    int number = atoi(words[4]);
    if (!strcmp(words[1], "connect")) {
        close(fd);
        double begin = now();
        for (int i = 0; i < number; i++) {
            struct linger reset = {1, 0};
            fd = socket(AF_INET, SOCK_STREAM, 0);
            if (connect(fd, (void *)&address, sizeof address)) return 1;
            if (write(fd, "request.", 8) != 8 || read(fd, buffer, 8) != 8) return 1;
            setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
            close(fd);
        }
        printf("%f\n", (now() - begin) / number * 1e6);
        return 0;
    }
    if (connect(fd, (void *)&address, sizeof address)) return 1;
    double begin = now(), bytes = 0;
    for (int is_warm = 0; now() - begin < (is_warm ? 1.5 : 0.3) || !is_warm;) {
        if (!is_warm && now() - begin >= 0.3) { is_warm = 1; begin = now(); bytes = 0; }
        for (int i = 0; i < 64; i++) bytes += write(fd, buffer, number);
    }
    printf("%f\n", bytes / (now() - begin) / 1e6);
    return 0;
}
"""


class Rig:
    def __init__(self, release):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="srb-", dir="/tmp"))
        self.folder.chmod(0o755)
        for name in ("crosslane", "libcrosslane.so"):
            shutil.copy(release / name, self.folder)
        self.rack, self.processes = self.folder / "rack", []
        self.names = [f"srb{os.getpid()}-{number}" for number in range(3)]
        (self.folder / "private").mkdir(mode=0o700)
        os.chown(self.folder / "private", SERVER, SERVER)
        (self.folder / "jail").mkdir()
        (self.folder / "stream.c").write_text(STREAM)
        run("cc", "-O2", "-o", self.folder / "stream", self.folder / "stream.c")
        command = self.folder / "crosslane"
        run(command, "rack-dir", "create", self.rack, "--group", "61000")
        for one, other in ((CLIENT, SERVER), (CLIENT, PROXY), (PROXY, SERVER)):
            run(command, "rack-dir", "allow", self.rack, "--from", str(one), "--to", str(other))
        for name in self.names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        for number, (one, other) in enumerate(zip(self.names, self.names[1:])):
            cable = f"cable{number}"
            run("ip", "-n", one, "link", "add", cable, "type", "veth", "peer", "name", cable, "netns", other)
            for name, host in ((one, 1), (other, 2)):
                run("ip", "-n", name, "address", "add", f"10.129.{number}.{host}/24", "dev", cable)
                run("ip", "-n", name, "link", "set", cable, "up")

    def command(self, node, uid, rack, *words):
        """A program in a namespace (None: this one) as a user (None: root), with a rack or bare."""
        parts = ["ip", "netns", "exec", self.names[node]] if node is not None else []
        if uid is not None:
            parts += ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        if rack:
            parts += ["env", f"CROSSLANE_RACK={rack}", f"LD_PRELOAD={self.folder / 'libcrosslane.so'}"]
        return [str(part) for part in [*parts, *words]]

    def start(self, *arguments):
        null = subprocess.DEVNULL
        self.processes.append(subprocess.Popen(self.command(*arguments), stdout=null, stderr=null, cwd=self.folder))

    def redis(self, node, uid, rack, ip, port):
        options = ["--protected-mode", "no", "--save", "", "--dir", "/tmp", "--bind", ip, "--port", port]
        self.start(node, uid, rack, "redis-server", *options)

    def haproxy(self, rack, port, target):
        file = self.folder / f"haproxy-{port}.cfg"
        file.write_text(
            f"global\n chroot {self.folder}/jail\n uid {PROXY}\n gid {PROXY}\n nbthread 1\n"
            "defaults\n mode tcp\n timeout connect 5s\n timeout client 1m\n timeout server 1m\n"
            f"frontend in\n bind 10.129.0.2:{port}\n default_backend out\n"
            f"backend out\n server s 10.129.1.2:{target}\n")
        self.start(1, None, rack, "haproxy", "-db", "-f", file)

    def benchmark(self, node, uid, rack, ip, port, clients, requests):
        words = ["redis-benchmark", "-h", ip, "-p", port, "-c", clients, "-n", requests, "-d", 8, "-t", "get", "--csv"]
        line = run(*self.command(node, uid, rack, *words)).splitlines()[-1]
        return float(line.replace('"', "").split(",")[1])

    def stream(self, node, rack, what, ip, port, number):
        return float(run(*self.command(node, CLIENT, rack, self.folder / "stream", what, ip, port, number)))

    def close(self):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(self.folder)


def run(*words):
    finished = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: exit code {finished.returncode}: {finished.stderr.strip()}")
    return finished.stdout


def ratio(results, one, other):
    """The median of the rounds' ratios, with a 95% interval by resampling."""
    ratios = [a / b for a, b in zip(results[one], results[other])]
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(4000))
    return f"{one} / {other}: {statistics.median(ratios):.2f} [{medians[100]:.2f}, {medians[3900]:.2f}]"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--target", type=pathlib.Path, default=os.environ.get("CARGO_TARGET_DIR", "target"))
    options = parser.parse_args()
    rig = Rig(pathlib.Path(options.target).absolute() / "release")
    results = collections.defaultdict(list)
    try:
        measure(rig, results, options.rounds)
    finally:
        rig.close()
    for name, values in results.items():
        print(f"{name}: {statistics.median(values):.0f}")
    for pair in (("two users, 1", "one user, 1"), ("veth, 1", "one user, 1"), ("veth, 1", "TCP over veth, 1"),
                 ("veth, 50", "TCP over veth, 50"), ("HAProxy, 1", "HAProxy over TCP, 1"),
                 ("HAProxy, 50", "HAProxy over TCP, 50"), ("4 KiB writes", "4 KiB writes by TCP"),
                 ("64 KiB writes", "64 KiB writes by TCP"), ("one request", "one request by TCP")):
        print(ratio(results, *pair))


def measure(rig, results, rounds):
    rack, private, near, far = rig.rack, rig.folder / "private", "10.129.0.2", "10.129.1.2"
    rig.redis(None, SERVER, private, "127.0.0.1", 7731)
    rig.redis(None, SERVER, rack, "127.0.0.1", 7732)
    rig.redis(2, SERVER, rack, far, 7733)
    rig.redis(2, SERVER, None, far, 7734)
    rig.haproxy(rack, 7743, 7733)
    rig.haproxy(None, 7744, 7734)
    rig.start(1, SERVER, rack, rig.folder / "stream", "serve", 7753)
    rig.start(1, SERVER, None, rig.folder / "stream", "serve", 7754)
    time.sleep(1.5)
    cases = [
        ("one user, 1", lambda: rig.benchmark(None, SERVER, private, "127.0.0.1", 7731, 1, 100_000)),
        ("two users, 1", lambda: rig.benchmark(None, CLIENT, rack, "127.0.0.1", 7732, 1, 100_000)),
        ("veth, 1", lambda: rig.benchmark(1, CLIENT, rack, far, 7733, 1, 100_000)),
        ("TCP over veth, 1", lambda: rig.benchmark(1, CLIENT, None, far, 7734, 1, 20_000)),
        ("veth, 50", lambda: rig.benchmark(1, CLIENT, rack, far, 7733, 50, 300_000)),
        ("TCP over veth, 50", lambda: rig.benchmark(1, CLIENT, None, far, 7734, 50, 80_000)),
        ("HAProxy, 1", lambda: rig.benchmark(0, CLIENT, rack, near, 7743, 1, 50_000)),
        ("HAProxy over TCP, 1", lambda: rig.benchmark(0, CLIENT, None, near, 7744, 1, 10_000)),
        ("HAProxy, 50", lambda: rig.benchmark(0, CLIENT, rack, near, 7743, 50, 200_000)),
        ("HAProxy over TCP, 50", lambda: rig.benchmark(0, CLIENT, None, near, 7744, 50, 50_000)),
        ("4 KiB writes", lambda: rig.stream(0, rack, "write", near, 7753, 4096)),
        ("4 KiB writes by TCP", lambda: rig.stream(0, None, "write", near, 7754, 4096)),
        ("64 KiB writes", lambda: rig.stream(0, rack, "write", near, 7753, 65536)),
        ("64 KiB writes by TCP", lambda: rig.stream(0, None, "write", near, 7754, 65536)),
        ("one request", lambda: rig.stream(0, rack, "connect", near, 7753, 3000)),
        ("one request by TCP", lambda: rig.stream(0, None, "connect", near, 7754, 3000)),
    ]
    for number in range(rounds):
        # In turns, so that no case is always behind the same one.
        for name, case in cases if number % 2 == 0 else reversed(cases):
            results[name].append(case())


if __name__ == "__main__":
    main()
