#!/usr/bin/env python3
"""Counts the lines of each crate as product, test and bench, and the files over 600 lines.

usage: scripts/count-lines.py [COMMIT]     the working tree's HEAD without an argument

Test lines are those of tests/ folders, of files called tests.rs, and of inline modules under #[cfg(test)]. Bench lines
are those of benches/ folders and of the crates that only measure. Blank lines and comments count.
"""

import re
import subprocess
import sys

BENCH_CRATES = {"bench", "pcie-bench", "router-bench"}
LONG_FILE_LINES = 600


def git(*arguments):
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def inline_test_lines(text):
    """Lines from the first inline test module to the end of the file, where such a module stands."""
    found = re.search(r"^#\[cfg\(test\)\]\n(?:pub(?:\(crate\))? )?mod \w+ \{", text, re.M)
    return text[found.start() :].count("\n") if found else 0


def kind_of(crate, path):
    if re.search(r"(^|/)(tests|fuzz_targets)/|(^|/)\w*tests\.rs$", path):
        return "test"
    return "bench" if crate in BENCH_CRATES or "/benches/" in path else "product"


def main():
    commit = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    crates, long_files = {}, []
    for path in git("ls-tree", "-r", "--name-only", commit).splitlines():
        if not re.match(r"(crates|tests|fuzz)/.*\.(rs|c|h)$", path):
            continue
        text = git("show", f"{commit}:{path}")
        lines = text.count("\n")
        parts = path.split("/")
        crate = parts[0]
        if crate == "crates":
            crate = parts[2] if parts[2] not in ("src", "tests", "benches", "examples", "include") else parts[1]
            crate = parts[1] if git("ls-tree", "--name-only", commit, f"crates/{parts[1]}/Cargo.toml") else crate
        of_crate = crates.setdefault(crate, {"product": 0, "test": 0, "bench": 0})
        kind = kind_of(crate, path)
        tests = inline_test_lines(text) if kind != "test" else 0
        of_crate[kind] += lines - tests
        of_crate["test"] += tests
        if kind != "test" and lines > LONG_FILE_LINES:
            long_files.append((lines, path))
    print("| crate | product | test | bench |\n|---|---|---|---|")
    for crate, counts in sorted(crates.items()):
        print(f"| {crate} | {counts['product']} | {counts['test']} | {counts['bench']} |")
    total = {kind: sum(counts[kind] for counts in crates.values()) for kind in ("product", "test", "bench")}
    print(f"| all | {total['product']} | {total['test']} | {total['bench']} |")
    print(f"\n{len(long_files)} files over {LONG_FILE_LINES} lines:")
    for lines, path in sorted(long_files, reverse=True):
        print(f"  {lines} {path}")


if __name__ == "__main__":
    main()
