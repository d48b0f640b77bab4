"""Measures the cost of loading the library in a program that opens no socket, compared with the bare program.

Run:  python3 tests/python/load_time.py target/release/libcrosslane.so
"""
import os
import statistics
import sys
import time

RUNS = 300
ROUNDS = 3


def start_and_end_us(environment):
    taken = []
    for _ in range(RUNS):
        start = time.perf_counter()
        os.waitpid(os.posix_spawn("/bin/true", ["true"], environment), 0)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e6


def main():
    bare = dict(os.environ)
    loaded = bare | {"LD_PRELOAD": os.path.abspath(sys.argv[1])}
    for _ in range(ROUNDS):
        print(f"bare {start_and_end_us(bare):.0f} us, loaded {start_and_end_us(loaded):.0f} us")


main()
