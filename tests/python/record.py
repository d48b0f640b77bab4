"""Runs tests of CPython's own suite and records the outcome of each in a line when it ends.

Usage: record.py OUTCOMES SKIP MODULE...
OUTCOMES is appended to: "start ID" before a test, "passed|failed|skipped ID" after it. SKIP contains IDs not to run,
one a line: their outcomes are already known. A test that makes no progress ends the process with exit code 1; the last
line of OUTCOMES names it. With "--only FILE" as MODULE, only the IDs in FILE are run.
"""

import faulthandler
import os
import sys
import tempfile
import unittest

from test import support

HANG_S = 60


class Recorder(unittest.TestResult):
    def __init__(self, outcomes):
        super().__init__()
        self.outcomes = outcomes
        self.verdict = None

    def write(self, word, test):
        self.outcomes.write(f"{word} {test.id()}\n")
        self.outcomes.flush()

    def startTest(self, test):
        super().startTest(test)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        self.verdict = "passed"
        self.write("start", test)

    def stopTest(self, test):
        faulthandler.cancel_dump_traceback_later()
        super().stopTest(test)
        self.write(self.verdict, test)

    def fail(self, test, error):
        self.verdict = "failed"
        if not isinstance(test, unittest.TestCase):
            self.write("failed", test)  # a fixture of a class or module
        print(f"=== {test.id()}\n{self._exc_info_to_string(error, test)}", file=sys.stderr, flush=True)

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.fail(test, error)

    def addError(self, test, error):
        super().addError(test, error)
        self.fail(test, error)

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.fail(test, error)

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.verdict = "failed"

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.verdict = "skipped"


def lines_of(path):
    with open(path, encoding="utf-8") as file:
        return {line.strip() for line in file if line.strip()}


def keep(suite, wanted):
    """Returns the suite with only the wanted tests; nested suites stay because they run the fixtures of classes."""
    kept = suite.__class__()
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            kept.addTest(keep(test, wanted))
        elif wanted(test.id()):
            kept.addTest(test)
    return kept


def load(names):
    if names[0] == "--only":
        only = lines_of(names[1])
        modules = sorted({".".join(name.split(".")[:2]) for name in only})
        return keep(unittest.defaultTestLoader.loadTestsFromNames(modules), only.__contains__)
    return unittest.defaultTestLoader.loadTestsFromNames(names)


def main():
    outcomes_path, skip_path, *names = sys.argv[1:]
    support.use_resources = []  # no tests that need the network or take long
    support.verbose = False
    skip = lines_of(skip_path)
    suite = keep(load(names), lambda name: name not in skip and "VSOCK" not in name.upper())
    with open(outcomes_path, "a", encoding="utf-8") as outcomes, tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        suite.run(Recorder(outcomes))
        outcomes.write("end\n")
        os.chdir("/")


if __name__ == "__main__":
    main()
