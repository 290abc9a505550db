#!/usr/bin/env python3
"""Writes results.json of a run of gpu_check.sh; with --say prints what failed or did not run.

  gpu_check_results.py PARTS OUTPUT SECONDS DRY_RUN [--say]

PARTS has a line a part: name, state, seconds and a remark between tabs. OUTPUT has tests.xml (JUnit, of ctest) and
benchmark.jsonl where it came to that.
"""
import json
import pathlib
import re
import sys
import xml.etree.ElementTree

# What GoogleTest prints of one case; the reason of a skip stands in the lines before.
CASE = re.compile(r"^\[ +(OK|FAILED|SKIPPED) +\] ([^\s,]+)(?:, .*)? \((\d+) ms\)$")


def read_parts(text):
    names = ("name", "state", "seconds", "remark")
    parts = [dict(zip(names, line.split("\t"))) for line in text.splitlines()]
    for part in parts:
        part["seconds"] = int(part["seconds"])
    return parts


def cases_of(output):
    """Cases of one program, with the reason of each that was skipped."""
    cases, reason = [], ""
    for line in output.splitlines():
        found = CASE.match(line.strip())
        if found:
            state, name, milliseconds = found.groups()
            case = {"name": name, "state": {"OK": "passed"}.get(state, state.lower()), "ms": int(milliseconds)}
            if state == "SKIPPED":
                case["reason"] = reason
            cases.append(case)
            reason = ""
        elif line.strip() and not line.startswith("["):
            reason = line.strip()
    return cases


def read_tests(path):
    """The programs of a JUnit file of ctest."""
    tests = []
    for case in xml.etree.ElementTree.parse(path).getroot().iter("testcase"):
        output = case.findtext("system-out") or ""
        state = {"run": "passed", "fail": "failed", "notrun": "skipped", "disabled": "skipped"}.get(
            case.get("status"), case.get("status"))
        tests.append({
            "name": case.get("name"),
            "state": state,
            "seconds": round(float(case.get("time") or 0), 1),
            "cases": cases_of(output),
        })
    return tests


def count(states):
    return {state: states.count(state) for state in sorted(set(states))}


def results(parts, output, seconds, dry_run):
    found = {"dry_run": dry_run, "seconds": seconds, "parts": parts}
    junit = output / "tests.xml"
    if junit.exists():
        tests = read_tests(junit)
        found["tests"] = {
            "programs": count([test["state"] for test in tests]),
            "cases": count([case["state"] for test in tests for case in test["cases"]]),
            "each": tests,
        }
    lines = (output / "benchmark.jsonl").read_text(encoding="utf-8").splitlines()
    found["benchmark"] = [json.loads(line) for line in lines if line]
    return found


def summary(found):
    """Lines for people."""
    for part in found["parts"]:
        if part["state"] != "passed":
            yield f"{part['name']}: {part['state']}, {part['remark']}"
    for test in found.get("tests", {}).get("each", []):
        for case in test["cases"]:
            if case["state"] != "passed":
                yield f"{test['name']}: {case['name']} {case['state']}{': ' * ('reason' in case)}{case.get('reason', '')}"
        if test["state"] == "failed" and not any(case["state"] == "failed" for case in test["cases"]):
            yield f"{test['name']}: failed outside of its cases"
    if "tests" in found:
        yield f"cases: {found['tests']['cases']}"


def main():
    parts, output, seconds, dry_run, *say = sys.argv[1:]
    output = pathlib.Path(output)
    found = results(read_parts(pathlib.Path(parts).read_text(encoding="utf-8")), output, int(seconds), dry_run == "1")
    (output / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for line in summary(found) if say else ():
        print(f"[gpu_check] {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
