#!/usr/bin/env python3
"""Prints the licences of the crates that packages of this workspace are built from: name, version, licence, texts.

usage: third-party-licences.py PACKAGE..."""

import json
import pathlib
import subprocess
import sys

COMMAND = ["cargo", "metadata", "--format-version=1", "--locked", "--filter-platform=x86_64-unknown-linux-gnu"]
PATTERNS = ("LICEN[CS]E*", "COPYING*", "NOTICE*", "UNLICENSE*", "license*", "licence*")


def linked(metadata, roots):
    """Returns the IDs of all packages that are linked into the roots: no build or development dependencies."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    ids = {package["name"]: package["id"] for package in metadata["packages"] if package["source"] is None}
    todo, found = [ids[root] for root in roots], set()
    while todo:
        node = nodes[todo.pop()]
        if node["id"] not in found:
            found.add(node["id"])
            todo += [dep["pkg"] for dep in node["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])]
    return found


def main():
    roots = sys.argv[1:] or sys.exit(__doc__)
    metadata = json.loads(subprocess.run(COMMAND, check=True, capture_output=True).stdout)
    used = linked(metadata, roots)
    others = [package for package in metadata["packages"] if package["id"] in used and package["source"]]
    texts = {}
    print("Crosslane contains these Rust crates. The numbers are those of the texts below.\n")
    for package in sorted(others, key=lambda package: (package["name"], package["version"])):
        folder = pathlib.Path(package["manifest_path"]).parent
        files = sorted({file for pattern in PATTERNS for file in folder.glob(pattern) if file.is_file()})
        numbers = [texts.setdefault(file.read_text(errors="replace").strip(), len(texts) + 1) for file in files]
        shown = ", ".join(map(str, numbers)) or "none in the crate"
        print(f"{package['name']} {package['version']}: {package['license'] or 'see the texts'} ({shown})")
    for text, number in texts.items():
        print(f"\n{'-' * 40} {number} {'-' * 40}\n\n{text}")


if __name__ == "__main__":
    main()
