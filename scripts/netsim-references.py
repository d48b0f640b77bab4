#!/usr/bin/env python3
"""Runs the packet simulator beside two others, and prints the tables of docs/results/netsim-references.md.

usage: scripts/netsim-references.py WORK CROSSLANE [FILTER]

WORK is a directory for sources, builds, inputs and outputs; CROSSLANE is the built command. The references are cloned
at fixed commits, edited as EDITS states (equal headers, no behaviour), and built once; results of references are kept
in WORK, so that a second call runs only ours. FILTER selects rows whose name contains it, and "held out", "seeds" and
"hashes" the other tables.

Needs Python 3.11, git, g++ and make. ns-3 is compiled without its own build system, which needs Python 2.7.
"""

import csv
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HPCC = ("https://github.com/alibaba-edu/High-Precision-Congestion-Control", "9f4be2a9ead8a90e8bf732c66bd758c00e58e5be")
HTSIM = ("https://github.com/Broadcom/csg-htsim", "841d9e7be46bb968eece766aa4b6c044c7799f67")

# A packet of 1000 bytes takes 1082 on our links: Ethernet with preamble and gap 38, IPv4 and UDP 28, BTH and ICRC 16.
# Files, and texts with their replacements. ns-3's Ethernet header grows from 14 to 48 bytes, so that the headers of
# data take 82 bytes instead of 48; an acknowledgement takes 86. htsim's RoCE headers and acknowledgements take 82.
EDITS = {
    "hpcc/simulation/src/point-to-point/model/ppp-header.cc": [
        ("return 14;", "return 48;"),
        ("start.WriteU32(0);", "start.WriteU32(0); start.WriteU8(0, 34);"),
    ],
    "hpcc/simulation/src/network/utils/custom-header.cc": [
        ("len += 14;", "len += 48;"),
        ("l2Size = 14;", "l2Size = 48;"),
        ("return 14 + 20", "return 48 + 20"),
        ("i.WriteU32(0); // 4 byets", "i.WriteU32(0); i.WriteU8(0, 34);"),
    ],
    # ns-3 counts picoseconds. In nanoseconds, which it cuts off, a packet takes 0.7% less at 100 Gb/s and 8% less at
    # 800 Gb/s, and an acknowledgement 13% less and nothing.
    "hpcc/simulation/src/core/model/time.cc": [("SetResolution (Time::NS,", "SetResolution (Time::PS,")],
    "hpcc/simulation/src/internet/model/seq-ts-header.cc": [
        ("ih.ts = Simulator::Now().GetTimeStep", "ih.ts = Simulator::Now().GetNanoSeconds"),
    ],
    "hpcc/simulation/src/point-to-point/model/rdma-hw.cc": [
        ("std::max(60-14-20-", "std::max(86-48-20-"),
        ("rtt = Simulator::Now().GetTimeStep", "rtt = Simulator::Now().GetNanoSeconds"),
    ],
    # HAS_WIN above 1 is the window in bytes.
    "hpcc/simulation/scratch/third.cc": [
        ("has_win?(global_t==1?maxBdp:", "has_win?(has_win>1?has_win:global_t==1?maxBdp:"),
        ("GetTimeStep", "GetNanoSeconds"),
    ],
    "htsim/sim/rocepacket.h": [("ACKSIZE=64", "ACKSIZE=82")],
    # Swift's segments are whole packets, so the flow's bytes grow by the headers instead (see Swift below).
    "htsim/sim/swiftpacket.h": [("ACKSIZE=40", "ACKSIZE=86")],
    # Random numbers that differ from second to second.
    "htsim/sim/roce.cpp": [("    srand(time(NULL));\n", "")],
    # The delay of pause frames where the topology comes from a file.
    "htsim/sim/datacenter/fat_tree_topology.cpp": [(", _hop_latency);\n", ", hop_latency);\n")],
    # Names that tell flows apart.
    "htsim/sim/datacenter/main_roce.cpp": [
        ('setName("Roce_" + ntoa(src) + "_" + ntoa(dest))', 'setName("Roce_" + ntoa(c))'),
    ],
    # The same; topology, sizes and starts (in picoseconds) from files.
    "htsim/sim/datacenter/main_swift.cpp": [
        ("= new FatTreeTopology(no_of_nodes, linkspeed, queuesize, \n" + 47 * " " +
         "NULL, &eventlist, NULL, RANDOM, SWIFT_SCHEDULER, 0);",
         "= FatTreeTopology::load(topo_file, NULL, eventlist, queuesize, RANDOM, SWIFT_SCHEDULER);"),
        ('setName("swift_" + ntoa(src) + "_" + ntoa(dest))', 'setName("swift_" + ntoa(c))'),
        ("if (flowsize){\n            swiftSrc->set_flowsize(flowsize*Packet::data_packet_size());",
         "{\n            swiftSrc->set_flowsize(crt->size);"),
        ("*swiftSnk, timeFromUs((uint32_t)crt->start));\n        }\n        swiftSrc->set_paths",
         "*swiftSnk, (simtime_picosec)crt->start);\n        }\n        swiftSrc->set_paths"),
    ],
}

# The modules of ns-3 that HPCC's program needs, and what its configuration finds on Linux.
NS3_MODULES = ("core", "network", "bridge", "mpi", "internet", "point-to-point", "applications", "tools", "stats")
NS3_HAS = ("STDINT_H", "INTTYPES_H", "SYS_TYPES_H", "SYS_STAT_H", "DIRENT_H", "STDLIB_H", "GETENV", "SIGNAL_H",
           "PTHREAD_H", "RT", "__UINT128_T")
# Sources of the modules' lists that are alternatives for other systems or need other libraries.
NS3_WITHOUT = re.compile("win32|cairo|nsc-|int64x64-double|sqlite")

PAYLOAD, HEADERS = 1000, 82
SEEDS = 10
HASH_SEEDS = 100
BASE_S = 2  # flows start here, as in the files of HPCC's authors
DISTRIBUTIONS = Path(__file__).resolve().parent.parent / "crates/rdma/netsim/distributions"

def run(command, **options):
    status = subprocess.run(command, check=False, **options).returncode
    if status != 0:
        sys.exit(f"'{' '.join(str(word) for word in command)}' ended with status {status}; its messages are above")


def ns3_program(work):
    return work / "hpcc/simulation/build/third"


def htsim_program(work, name):
    return work / "htsim/sim/datacenter" / name


# --- Networks: hosts, switches, and links (a, b, Gb/s) of 1 us; hosts come first.

def star(hosts):
    return {"hosts": hosts, "switches": 1, "links": [(host, hosts, 100) for host in range(hosts)],
            "topo": [(hosts, 1, 100), (1, 0, 100)]}


def leaf_spine(leaves, under, spines, trunk):
    hosts = leaves * under
    links = [(host, hosts + host // under, 100) for host in range(hosts)]
    links += [(hosts + leaf, hosts + leaves + spine, trunk) for leaf in range(leaves) for spine in range(spines)]
    return {"hosts": hosts, "switches": leaves + spines, "links": links,
            "topo": [(under, spines, 100), (leaves, 0, trunk)]}


# Networks without a choice of paths, because each simulator hashes flows differently. The names of the last ones are
# those of the page.
NETWORKS = {
    "oversubscribed": leaf_spine(4, 4, 1, 100),
    "fat-spine": leaf_spine(4, 4, 1, 400),
    "star": star(16),
    "64 hosts, 2:1": leaf_spine(4, 16, 1, 800),
    "64 hosts of 8 leaves, 2:1": leaf_spine(8, 8, 1, 400),
    "star of 32": star(32),
}
# Each host sends to the host of its number at the next leaf, and each leaf has eight paths for its sixteen flows.
HASHED = leaf_spine(8, 16, 8, 100)
HASHED_FLOWS = [(host, (host + 16) % 128, 2_000_000, 0) for host in range(128)]


# --- Flows: (from, to, bytes, start in picoseconds after BASE_S).

def sizes(name):
    """Returns the points of one of our distributions: sizes in bytes, and shares of flows that are not larger."""
    return tomllib.loads((DISTRIBUTIONS / f"{name}.toml").read_text())["points"]


def poisson(hosts, load, flows, seed, name="web-search"):
    rng, points = random.Random(seed), sizes(name)
    mean = sum((high[1] - low[1]) * (high[0] + low[0]) / 2 for low, high in zip(points, points[1:]))
    rate = load * hosts * 100e9 / 8 / mean
    at, result = 0.0, []
    for _ in range(flows):
        at += rng.expovariate(rate)
        source = rng.randrange(hosts)
        target = (source + 1 + rng.randrange(hosts - 1)) % hosts
        share = rng.random()
        low, high = next((low, high) for low, high in zip(points, points[1:]) if share <= high[1])
        size = low[0] + (high[0] - low[0]) * (share - low[1]) / (high[1] - low[1])
        result.append((source, target, max(1, int(size)), int(at * 1e12)))
    return result


WORKLOADS = {
    "incast 15:1, 2 MB": ("star", [(host, 15, 2_000_000, 0) for host in range(15)]),
    "incast 15:1, 64 KB": ("star", [(host, 15, 64_000, 0) for host in range(15)]),
    "4:1, 10 MB": ("star", [(host, 15, 10_000_000, 0) for host in range(4)]),
    "permutation, 2 MB": ("oversubscribed", [(host, (host + 4) % 16, 2_000_000, 0) for host in range(16)]),
    "web search, load 0.3": ("fat-spine", poisson(16, 0.3, 1000, 1)),
    "web search, load 0.5": ("fat-spine", poisson(16, 0.5, 1000, 2)),
    "web search, load 0.7": ("fat-spine", poisson(16, 0.7, 1000, 3)),
    "star, web search, load 0.5": ("star", poisson(16, 0.5, 1000, 4)),
    "FB-Hadoop, 64 hosts, load 0.3": ("64 hosts, 2:1", poisson(64, 0.3, 5000, 11, "hadoop")),
}

# Sets that nothing was adjusted to: other seeds, loads, sizes and networks.
HELD_OUT = {
    "FB-Hadoop, load 0.3": ("64 hosts, 2:1", poisson(64, 0.3, 5000, 21, "hadoop")),
    "FB-Hadoop, load 0.5": ("64 hosts, 2:1", poisson(64, 0.5, 5000, 22, "hadoop")),
    "FB-Hadoop, load 0.15": ("64 hosts, 2:1", poisson(64, 0.15, 5000, 23, "hadoop")),
    "FB-Hadoop, 8 leaves, load 0.4": ("64 hosts of 8 leaves, 2:1", poisson(64, 0.4, 5000, 24, "hadoop")),
    "FB-Hadoop, star of 32, load 0.6": ("star of 32", poisson(32, 0.6, 5000, 25, "hadoop")),
    "web search, load 0.3": ("64 hosts, 2:1", poisson(64, 0.3, 1000, 26)),
    "storage 2019, load 0.4": ("64 hosts, 2:1", poisson(64, 0.4, 5000, 27, "storage-2019")),
    "cache follower, load 0.4": ("64 hosts, 2:1", poisson(64, 0.4, 2000, 28, "cache-follower")),
}
HELD_OUT_TRANSPORTS = ("DCQCN, ConnectX", "TIMELY", "DCTCP", "none, PFC")


# --- Transports.

# In ns-3, DCQCN's notifications are marks in acknowledgements. ACK_HIGH_PRIO lets these pass data at hosts only: in
# switches they wait behind data, because no key sets the switches' attribute (see ns3). So ours wait too.
# HPCC's run.py for 100 Gb/s: constants of its configuration; ECN thresholds in KB for 100 Gb/s, which it multiplies
# with the rate.
NS3_COMMON = dict(CLAMP_TARGET_RATE=0, FAST_RECOVERY_TIMES=1, RATE_AI="20Mb/s", RATE_HAI="200Mb/s", VAR_WIN=0,
                  HAS_WIN=0, FAST_REACT=0, ACK_HIGH_PRIO=1, EWMA_GAIN=0.00390625, ALPHA_RESUME_INTERVAL=1,
                  RATE_DECREASE_INTERVAL=4, RP_TIMER=300, DCTCP_RATE_AI="1000Mb/s", ENABLE_QCN=1)
NS3_RATES = (100, 400, 800)


def ns3_map(value, grows=True):
    pairs = (f"{gbps}000000000 {value * gbps // 100 if grows else value}" for gbps in NS3_RATES)
    return f"{len(NS3_RATES)} {' '.join(pairs)}"


NS3_ECN = dict(KMAX_MAP=ns3_map(1600), KMIN_MAP=ns3_map(400), PMAX_MAP=ns3_map("0.20", False))
NS3_STEP = dict(KMAX_MAP=ns3_map(300), KMIN_MAP=ns3_map(300), PMAX_MAP=ns3_map("1.00", False))
NS3 = {
    "DCQCN, ConnectX": dict(NS3_COMMON, **NS3_ECN, CC_MODE=1),
    "DCQCN, paper": dict(NS3_COMMON, **NS3_ECN, CC_MODE=1, ALPHA_RESUME_INTERVAL=50, RATE_DECREASE_INTERVAL=50,
                         RP_TIMER=55),
    "TIMELY": dict(NS3_COMMON, **NS3_ECN, CC_MODE=7, RATE_AI="100Mb/s", RATE_HAI="500Mb/s"),
    "DCTCP": dict(NS3_COMMON, **NS3_STEP, CC_MODE=8, EWMA_GAIN=0.0625, DCTCP_RATE_AI="615Mb/s", HAS_WIN=1, VAR_WIN=1,
                  ACK_HIGH_PRIO=0),
    # Mode 0 has no congestion control: line rate, and PFC.
    "none, PFC": dict(NS3_COMMON, **NS3_ECN, CC_MODE=0, ENABLE_QCN=0),
}
# The same with at most 512 packets of a queue pair in flight, the limit of our NICs unless it is raised.
LIMIT = ", 512 packets"
NS3 |= {name + LIMIT: dict(NS3[name], HAS_WIN=512 * PAYLOAD)
        for name in ("DCQCN, ConnectX", "DCQCN, paper", "TIMELY", "none, PFC")}

# As in the references, each packet is acknowledged, flows begin afresh, and NICs take no time.
NIC = "ack_packets = 1\nnew_queue_pairs = true\nnic_latency = false\n"
STEP = "ecn_kmin_bytes = 300000\necn_kmax_bytes = 300001\necn_pmax = 1.0\n"
OURS = {
    "DCQCN, ConnectX": ("", 'congestion = "dcqcn"\n[transport.dcqcn]\nmin_mbps = 1000\n'),
    "DCQCN, paper": ("", 'congestion = "dcqcn"\n[transport.dcqcn]\nmin_mbps = 1000\nalpha_interval = "50 us"\n'
                     'decrease_interval = "50 us"\nincrease_interval = "55 us"\n'),
    "TIMELY": ("", 'congestion = "timely"\n[transport.timely]\nmin_mbps = 1000\n'),
    "DCTCP": (STEP, 'congestion = "dctcp"\n'),
    "none, PFC": ("ecn = false\n", 'congestion = "none"\n'),
    "none, PFC (htsim)": ("ecn = false\n", 'congestion = "none"\n'),
    "Swift (htsim)": ("ecn = false\n", 'congestion = "swift"\n'),
}
OURS |= {name: OURS[name.removesuffix(LIMIT)] for name in NS3}


def missing_tools(work):
    """Returns what the references' builds need and this machine lacks, with the remedy, or None."""
    if not (not ns3_program(work).exists() or not htsim_program(work, "htsim_swift").exists()):
        return None
    for tool in ("git", "g++", "make"):
        if not shutil.which(tool):
            return f"{tool} is missing; install it, because it builds the references"
    return None


def clone(work, name, source):
    """Clones and edits a reference, unless it is there. An interrupted call leaves nothing under its name."""
    path, part = work / name, work / f"{name}.part"
    if path.exists():
        return
    shutil.rmtree(part, ignore_errors=True)
    url, commit = source
    run(["git", "clone", "--quiet", "--no-checkout", url, part])
    run(["git", "-C", part, "checkout", "--quiet", commit])
    edit(part, name)
    part.rename(path)


def edit(source, of):
    for name, replacements in EDITS.items():
        prefix, _, rest = name.partition("/")
        if prefix != of:
            continue
        path = source / rest
        text = path.read_text()
        for old, new in replacements:
            if old not in text:
                sys.exit(f"{path}: '{old}' is not there; the commit is another")
            text = text.replace(old, new)
        path.write_text(text)


def ns3_files(source, module, suffix):
    """Returns the files with this suffix that a module's build file lists."""
    text = re.sub("#.*", "", (source / module / "wscript").read_text())
    names = set(re.findall(rf"'((?:model|helper|utils)/[\w./-]+\.{suffix})'", text))
    return [source / module / name for name in sorted(names) if not NS3_WITHOUT.search(name)]


def write_ns3_makefile(at):
    """Lays out ns-3's headers and writes a makefile for HPCC's program. Its objects are linked without a library,
    which would leave out those that only register their types."""
    source, build_at = at / "src", at / "build"
    headers = build_at / "ns3"
    headers.mkdir(parents=True, exist_ok=True)
    objects = {build_at / "third.o": at / "scratch/third.cc"}
    for module in NS3_MODULES:
        files = ns3_files(source, module, "h")
        for file in files:
            shutil.copyfile(file, headers / file.name)
        (headers / f"{module}-module.h").write_text("".join(f'#include "ns3/{file.name}"\n' for file in files))
        objects |= {build_at / f"{module}-{file.stem}.o": file for file in ns3_files(source, module, "cc")}
    config = ["#define INT64X64_USE_128 1\n"] + [f"#define HAVE_{name} 1\n" for name in NS3_HAS]
    (headers / "core-config.h").write_text("".join(config))
    rules = [f"third: {' '.join(str(file) for file in objects)}\n\tg++ -pthread -o $@ $^ -lrt\n"]
    rules += [f"{file}: {of}\n\tg++ -w -std=gnu++11 -O2 -I{build_at} -c -o $@ $<\n" for file, of in objects.items()]
    (build_at / "Makefile").write_text("".join(rules))


def build(work):
    clone(work, "hpcc", HPCC)
    if not ns3_program(work).exists():
        write_ns3_makefile(work / "hpcc/simulation")
        run(["make", f"-j{os.cpu_count()}", "third"], cwd=work / "hpcc/simulation/build", stdout=subprocess.DEVNULL)
    clone(work, "htsim", HTSIM)
    if not htsim_program(work, "htsim_swift").exists():
        at = work / "htsim/sim"
        run(["make", "libhtsim.a", "CFLAGS=-w -std=c++11 -O3"], cwd=at)
        run(["make", "-C", "datacenter", "htsim_roce", "htsim_swift"], cwd=at)


def folder_of(work, name, network):
    """Returns the directory of a workload; the network is part of its name, because results are kept."""
    return work / "".join(letter if letter.isalnum() else "-" for letter in f"{name} {network}")


def write_inputs(folder, network, flows):
    """Writes topology and flows in the formats of both references; ours reads those of ns-3."""
    folder.mkdir(parents=True, exist_ok=True)
    hosts, switches, links = network["hosts"], network["switches"], network["links"]
    lines = [f"{hosts + switches} {switches} {len(links)}", " ".join(str(hosts + index) for index in range(switches))]
    lines += [f"{a} {b} {gbps}Gbps 1000ns 0" for a, b, gbps in links]
    (folder / "topology.txt").write_text("\n".join(lines) + "\n")
    lines = [str(len(flows))]
    lines += [f"{source} {target} 3 100 {size} {BASE_S + at / 1e12:.12f}" for source, target, size, at in flows]
    (folder / "flow.txt").write_text("\n".join(lines) + "\n")
    (folder / "trace.txt").write_text("0\n")
    lines = [f"Nodes {hosts}", "Tiers 2", f"Podsize {hosts}"]
    for tier, (down, up, gbps) in enumerate(network["topo"]):
        lines += [f"Tier {tier}", f"Downlink_speed_Gbps {gbps}", f"Radix_Down {down}", "Downlink_Latency_ns 1000"]
        lines += [f"Radix_Up {up}", f"Oversubscribed {down // up}"] if tier == 0 else []
    (folder / "a.topo").write_text("\n".join(lines) + "\n")


def write_matrix(path, hosts, flows, size_of):
    lines = [f"Nodes {hosts}", f"Connections {len(flows)}"]
    lines += [f"{source}->{target} id {index + 1} start {at} size {size_of(size)}"
              for index, (source, target, size, at) in enumerate(flows)]
    path.write_text("\n".join(lines) + "\n")


def ns3(work, folder, transport, has_priority=False, seed=1):
    """Returns the completion times in microseconds of HPCC's ns-3. With `has_priority`, its switches forward
    acknowledgements before data."""
    name = transport.replace(", ", "-").replace(" ", "-") + ("-priority" if has_priority else "")
    name += f"-seed-{seed}" if seed > 1 else ""
    out = folder / f"ns3-{name}.fct"
    if not out.exists():
        keys = dict(NS3[transport], USE_DYNAMIC_PFC_THRESHOLD=1, PACKET_PAYLOAD_SIZE=PAYLOAD,
                    TOPOLOGY_FILE=folder / "topology.txt", FLOW_FILE=folder / "flow.txt",
                    TRACE_FILE=folder / "trace.txt",
                    TRACE_OUTPUT_FILE="/dev/null", FCT_OUTPUT_FILE=folder / f"{out.name}.tmp",
                    PFC_OUTPUT_FILE="/dev/null",
                    SIMULATOR_STOP_TIME=BASE_S + 1, MIN_RATE="1000Mb/s", ERROR_RATE_PER_LINK="0.0000",
                    L2_CHUNK_SIZE=4000, L2_ACK_INTERVAL=1, L2_BACK_TO_ZERO=0, GLOBAL_T=1, U_TARGET=0.95,
                    MI_THRESH=0, INT_MULTI=1,
                    MULTI_RATE=0, SAMPLE_FEEDBACK=0, PINT_LOG_BASE=1.01, PINT_PROB="1.0", RATE_BOUND=1,
                    LINK_DOWN="0 0 0", ENABLE_TRACE=0, BUFFER_SIZE=32, QLEN_MON_FILE="/dev/null",
                    QLEN_MON_START=9_000_000_000, QLEN_MON_END=9_000_000_001)
        config = folder / f"ns3-{name}.txt"
        config.write_text("".join(f"{key} {value}\n" for key, value in keys.items()))
        environment = dict(os.environ, LD_LIBRARY_PATH=str(work / "hpcc/simulation/build"))
        environment |= {"NS_GLOBAL_VALUE": f"RngRun={seed}",
                        "NS_ATTRIBUTE_DEFAULT": f"ns3::SwitchNode::AckHighPrio={int(has_priority)}"}
        run([ns3_program(work), config], env=environment, stdout=subprocess.DEVNULL, cwd=folder)
        (folder / f"{out.name}.tmp").rename(out)
    return [int(line.split()[6]) / 1000 for line in out.read_text().splitlines()]


def htsim(work, folder, network, flows, transport, seed=0):
    """Returns the completion times in microseconds of htsim's RoCE or Swift. With `seed`, RoCE's hashes have it."""
    is_swift = transport.startswith("Swift")
    out = folder / ("htsim-swift.log" if is_swift else f"htsim-roce-{seed}.log" if seed else "htsim-roce.log")
    packet = PAYLOAD + HEADERS if is_swift else PAYLOAD
    # Whole packets. Swift's packets have no headers of their own: its bytes are those on the wire.
    size_of = lambda size: math.ceil(size / PAYLOAD) * packet
    if not out.exists():
        write_matrix(folder / "a.cm", network["hosts"], flows, size_of)
        program = htsim_program(work, "htsim_swift" if is_swift else "htsim_roce")
        command = [program, "-tm", folder / "a.cm", "-topo", folder / "a.topo", "-nodes", str(network["hosts"]),
                   "-mtu", str(packet), "-linkspeed", "100000", "-end", "400000", "-o", folder / "htsim.dat"]
        command += ["-q", "30000"]
        command += ["-cwnd", "100"] if is_swift else ["-strat", "ecmp_host", "-paths", "64"]
        command += ["-seed", str(seed)] if seed else []
        with (folder / "htsim.tmp").open("w") as log:
            run(command, stdout=log, cwd=folder)
        (folder / "htsim.tmp").rename(out)
    result = []
    for line in out.read_text(errors="replace").splitlines():
        words = line.split()
        if line.startswith("Flow ") and "finished" in words:
            start = flows[int(words[1].split("_")[1])][3] / 1e6
            result.append(float(words[words.index("at") + 1]) - start)
    return result


def ours(crosslane, folder, transport, has_priority=False, seed=1):
    """Returns our completion times in microseconds. With `has_priority`, DCQCN's notifications pass data."""
    switches, endpoints = OURS[transport]
    if transport.startswith("DCQCN") and not has_priority:
        endpoints += "cnp_priority = false\n"
    window_packets = 512 if transport.endswith(LIMIT) else 1_000_000
    (folder / "ours.toml").write_text(
        f'version = 1\nseed = {seed}\n[topology]\nkind = "ns3"\nfile = "{folder}/topology.txt"\n'
        f'[switches]\npfc = true\nbuffer_bytes = "32 MiB"\n{switches}'
        f'[workload]\nkind = "ns3"\nfile = "{folder}/flow.txt"\n'
        f'[transport]\npolicy = "go-back-n"\nmtu_bytes = {PAYLOAD}\n{NIC}'
        f'window_packets = {window_packets}\n{endpoints}')
    out = folder / "ours.csv"
    command = [crosslane, "rnic", "sim", "run", folder / "ours.toml", "--json", "--flows", out]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode not in (0, 1) or not answer.stdout:
        print(f"{transport}: {answer.stderr.strip()}", file=sys.stderr)
        return []
    return [float(row["fct_us"]) for row in csv.DictReader(out.open()) if row["fct_us"]]


def rank(values, share):
    """Returns the value at the nearest rank."""
    values = sorted(values)
    return values[max(0, math.ceil(share * len(values)) - 1)]


def is_near(reference, measured):
    """Returns whether median and p99 are within 10%."""
    return bool(reference and measured) and all(
        abs(rank(measured, share) / rank(reference, share) - 1) <= 0.1 for share in (0.5, 0.99))


def row(name, transport, of, values, reference, measured):
    head = f"| {name} | {transport} | {of} | {len(reference)} | {len(measured)} of {values} | "
    if not reference or not measured:
        return head + " | ".join(6 * ["-"]) + " |"
    cells = []
    for share in (0.5, 0.99):
        theirs, us = rank(reference, share), rank(measured, share)
        cells += [f"{theirs:.1f}", f"{us:.1f}", f"{us / theirs:.2f}"]
    return head + " | ".join(cells) + " |"


def print_seeds(work, crosslane):
    """Prints how far DCQCN's permutation depends on the seed of the switches' marks, and on the priority of what
    carries them back."""
    name = "permutation, 2 MB"
    network, flows = WORKLOADS[name]
    folder = folder_of(work, name, network)
    write_inputs(folder, NETWORKS[network], flows)
    print(f"\nDCQCN, {name}, seeds 1 to {SEEDS}: lowest and highest median and p99 in us.\n")
    print("| transport | simulator | p50 | p99 |")
    print("|---|---|---|---|", flush=True)
    for transport in ("DCQCN, ConnectX", "DCQCN, paper"):
        for simulator, times in (
            ("ns-3, marks wait behind data", lambda seed: ns3(work, folder, transport, False, seed)),
            ("ours, notifications wait behind data", lambda seed: ours(crosslane, folder, transport, False, seed)),
            ("ns-3, marks pass data", lambda seed: ns3(work, folder, transport, True, seed)),
            ("ours, notifications pass data (default)", lambda seed: ours(crosslane, folder, transport, True, seed)),
        ):
            runs = [times(seed) for seed in range(1, SEEDS + 1)]
            cells = []
            for share in (0.5, 0.99):
                ranks = [rank(values, share) for values in runs]
                cells.append(f"{min(ranks):.0f} to {max(ranks):.0f}")
            print(f"| {transport} | {simulator} | {' | '.join(cells)} |", flush=True)


def print_held_out(work, crosslane):
    """Prints the ratios of ours to ns-3 in median and p99 for the sets that nothing was adjusted to."""
    inputs = []
    for name, (network, flows) in HELD_OUT.items():
        folder = folder_of(work, f"held out {name}", network)
        write_inputs(folder, NETWORKS[network], flows)
        inputs += [(name, folder, len(flows), transport) for transport in HELD_OUT_TRANSPORTS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reference = list(pool.map(lambda of: ns3(work, of[1], of[3]), inputs))
    print("\nHeld-out sets: ours divided by ns-3, median and p99.\n")
    print(f"| set | flows | {' | '.join(HELD_OUT_TRANSPORTS)} |")
    print(f"|---|--:|{len(HELD_OUT_TRANSPORTS) * '---|'}", flush=True)
    near, cells = 0, []
    for (name, folder, flows, transport), theirs in zip(inputs, reference):
        measured = ours(crosslane, folder, transport)
        near += is_near(theirs, measured)
        ratios = [rank(measured, share) / rank(theirs, share) for share in (0.5, 0.99)] if measured else []
        cells.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
        if len(cells) == len(HELD_OUT_TRANSPORTS):
            print(f"| {name} | {flows} | {' | '.join(cells)} |", flush=True)
            cells = []
    print(f"\nWithin 10% in median and p99: {near} of {len(inputs)}.")


def print_hashes(work, crosslane):
    """Prints how the tail of a permutation over several paths depends on the hash's seed, in htsim and ours."""
    transport, folder = "none, PFC (htsim)", work / "hashes"
    write_inputs(folder, HASHED, HASHED_FLOWS)
    simulators = (("htsim", lambda seed: htsim(work, folder, HASHED, HASHED_FLOWS, transport, seed)),
                  ("ours", lambda seed: ours(crosslane, folder, transport, seed=seed)))
    print(f"\nPermutation of 128 hosts, 2:1, ECMP, none, PFC; seeds 1 to {HASH_SEEDS} of hashes; p50 and p99 in us.\n")
    print("| simulator | p50: lowest, median, highest | p99: lowest, quartiles, highest | mean of the p99s |")
    print("|---|---|---|--:|", flush=True)
    for simulator, times in simulators:
        runs = [times(seed) for seed in range(1, HASH_SEEDS + 1)]
        medians, tails = ([rank(values, share) for values in runs] for share in (0.5, 0.99))
        of = lambda ranks, shares: ", ".join(f"{rank(ranks, share):.0f}" for share in shares)
        print(f"| {simulator} | {of(medians, (0, 0.5, 1))} | {of(tails, (0, 0.25, 0.5, 0.75, 1))} | "
              f"{sum(tails) / len(tails):.0f} |", flush=True)


def rows(chosen):
    """Returns workload, transport and whether the reference is htsim, for each row of the table."""
    for name, (network, flows) in WORKLOADS.items():
        for transport in OURS:
            of_htsim = transport.endswith("(htsim)")
            # htsim has no trunks of another rate, and its RoCE starts every flow at once.
            starts_at_once = all(at == 0 for *_, at in flows)
            has_one_rate = network in ("oversubscribed", "star")
            is_possible = has_one_rate and (starts_at_once or transport.startswith("Swift"))
            if chosen in f"{name} / {transport}" and (is_possible or not of_htsim):
                yield name, transport, of_htsim


def print_table(work, crosslane, chosen):
    """Prints the table of workloads, and how many of its rows are near."""
    for name, (network, flows) in WORKLOADS.items():
        write_inputs(folder_of(work, name, network), NETWORKS[network], flows)
    of_name = lambda name: folder_of(work, name, WORKLOADS[name][0])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [(name, transport) for name, transport, of_htsim in rows(chosen) if not of_htsim]
        list(pool.map(lambda of: ns3(work, of_name(of[0]), of[1]), runs))
    print("| workload | transport | reference | its flows | ours | p50 us | ours | ratio | p99 us | ours | ratio |")
    print("|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    near = {False: [], True: []}
    for name, transport, of_htsim in rows(chosen):
        (network, flows), folder = WORKLOADS[name], of_name(name)
        theirs = htsim(work, folder, NETWORKS[network], flows, transport) if of_htsim else ns3(work, folder, transport)
        measured = ours(crosslane, folder, transport)
        of = "htsim" if of_htsim else "ns-3"
        print(row(name, transport.replace(" (htsim)", ""), of, len(flows), theirs, measured), flush=True)
        near[transport.endswith(LIMIT)].append(is_near(theirs, measured))
    for kind, of_kind in (("others", near[False]), (LIMIT[2:], near[True])):
        print(f"\nWithin 10% in median and p99: {sum(of_kind)} of {len(of_kind)} rows ({kind}).")


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    work, crosslane = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    chosen = sys.argv[3] if len(sys.argv) == 4 else ""
    if (lack := missing_tools(work)) is not None:
        sys.exit(lack)
    if not crosslane.is_file():
        sys.exit(f"there is no program {crosslane}; build it with cargo build --release")
    work.mkdir(parents=True, exist_ok=True)
    build(work)
    if any(rows(chosen)):
        print_table(work, crosslane, chosen)
    for name, print_it in (("held out", print_held_out), ("seeds", print_seeds), ("hashes", print_hashes)):
        if chosen in name:
            print_it(work, crosslane)


if __name__ == "__main__":
    main()
