"""Reads the JUnit files that ctest and pytest write."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from results import Outcome

# GoogleTest prints "FILE:LINE: Skipped", then the reason on the next line.
GTEST_SKIP = re.compile(r": Skipped\n(?P<reason>[^\n]+)")


def read_junit(path: Path) -> Outcome:
    """Counts, with reasons for skips. A missing or unreadable file is one failure."""
    outcome = Outcome()
    try:
        cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError) as error:
        outcome.fail(f"no results in {path}: {error}")
        return outcome
    for case in cases:
        name = f"{case.get('classname', '')}.{case.get('name', '')}".strip(".")
        skipped = case.find("skipped")
        if skipped is not None:
            outcome.skip(name, skip_reason(case, skipped))
        elif case.find("failure") is not None or case.find("error") is not None:
            outcome.fail(name)
        elif case.get("status") in ("disabled", "notrun"):
            outcome.skip(name, case.get("status") or "")
        else:
            outcome.passed += 1
    return outcome


def skip_reason(case: ElementTree.Element, skipped: ElementTree.Element) -> str:
    output = case.findtext("system-out") or ""
    match = GTEST_SKIP.search(output)
    if match:
        return match["reason"].strip()
    return (skipped.get("message") or "no reason given").strip()
