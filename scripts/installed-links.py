#!/usr/bin/env python3
"""Makes links of installed documents lead to installed files.

usage: installed-links.py FOLDER [OLD=NEW...]

FOLDER has README.md and others as the root of the repository has them, but not all of them. A link to a file OLD leads
to NEW; one to a file that is not installed becomes text, which names the file in the source.
"""

import os
import re
import sys

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]*)\)")


def rewritten(folder, document, renamed):
    """Returns the text of a document with its links rewritten."""

    def replace(match):
        image, text, target = match.groups()
        path, hash_sign, anchor = target.partition("#")
        if not path or "://" in target:
            return match.group(0)
        source = os.path.normpath(os.path.join(os.path.dirname(document), path))
        present = renamed.get(source, source)
        if os.path.exists(os.path.join(folder, present)):
            link = os.path.relpath(present, os.path.dirname(document) or ".")
            return f"{image}[{text}]({link}{hash_sign}{anchor})"
        is_path = source.endswith(text.strip("`/"))
        return f"`{source}` in the source" if is_path else f"{text} (`{source}` in the source)"

    with open(os.path.join(folder, document), encoding="utf-8") as file:
        return LINK.sub(replace, file.read())


def main():
    folder = sys.argv[1]
    renamed = dict(argument.split("=", 1) for argument in sys.argv[2:])
    for place, _, names in os.walk(folder):
        for name in sorted(names):
            if name.endswith(".md"):
                document = os.path.relpath(os.path.join(place, name), folder)
                text = rewritten(folder, document, renamed)
                with open(os.path.join(folder, document), "w", encoding="utf-8") as file:
                    file.write(text)


main()
