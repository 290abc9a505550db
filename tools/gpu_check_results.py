#!/usr/bin/env python3
"""Writes results.json of a run of gpu_check.sh; with --say prints what failed or did not run.

  gpu_check_results.py PARTS OUTPUT SECONDS DRY_RUN [--say]

PARTS has lines of name, state, seconds, limit and a remark between tabs; the last one of a name counts. OUTPUT has what
it came to of tests.xml (JUnit, of ctest) and tests.log, benchmark.jsonl and benchmark_runs.jsonl.
"""
import json
import os
import pathlib
import re
import sys
import xml.etree.ElementTree

# What GoogleTest prints of one case; the reason of a skip stands in the lines before.
CASE = re.compile(r"^\[ +(OK|FAILED|SKIPPED) +\] ([^\s,]+)(?:, .*)? \((\d+) ms\)$")
BEGUN = re.compile(r"^\[ RUN +\] (\S+)$")
# What ctest --verbose prints: all tests of a list, a line of one test's output, and how one ended.
LISTED = re.compile(r"^ +Test +#\d+: (\S+)$")
STARTED = re.compile(r"^ +Start +(\d+): (\S+)$")
OUTPUT = re.compile(r"^(\d+): (.*)$")
ENDED = re.compile(r"^ *\d+/\d+ Test +#(\d+): \S+ \.+(?: +|\*\*\*)(\D+?) +([\d.]+) sec")


def read_parts(text):
    names = ("name", "state", "seconds", "limit", "remark")
    parts = {}
    for line in text.splitlines():
        part = dict(zip(names, line.split("\t")))
        parts[part["name"]] = {**part, "seconds": int(part["seconds"]), "limit": int(part["limit"])}
    return list(parts.values())


def cases_of(output):
    """Cases of one program, with the reason of each that was skipped. One without an end is cut off."""
    cases, reason, begun = [], "", None
    for line in output.splitlines():
        found = BEGUN.match(line.strip())
        if found:
            begun = found.group(1)
        found = CASE.match(line.strip())
        if found:
            begun = None
            state, name, milliseconds = found.groups()
            case = {"name": name, "state": {"OK": "passed"}.get(state, state.lower()), "ms": int(milliseconds)}
            if state == "SKIPPED":
                case["reason"] = reason
            cases.append(case)
            reason = ""
        elif line.strip() and not line.startswith("["):
            reason = line.strip()
    if begun:
        cases.append({"name": begun, "state": "cut off"})
    return cases


def read_log(text):
    """The programs that the log of ctest names, those first that it has begun: what there is before ctest has ended."""
    listed, names, outputs, ends = [], {}, {}, {}
    for line in text.splitlines():
        if found := LISTED.match(line):
            listed.append(found.group(1))
        elif found := STARTED.match(line):
            names[found.group(1)] = found.group(2)
        elif found := ENDED.match(line):
            ends[found.group(1)] = found.group(2, 3)
        elif (found := OUTPUT.match(line)) and found.group(1) in names:
            outputs.setdefault(found.group(1), []).append(found.group(2))
    tests = []
    for number, name in names.items():
        end, seconds = ends.get(number, ("cut off", 0))
        state = {"Passed": "passed", "Skipped": "skipped", "cut off": "cut off"}.get(end, "failed")
        cases = cases_of("\n".join(outputs.get(number, [])))
        tests.append({"name": name, "state": state, "seconds": float(seconds), "cases": cases})
    return tests + not_begun(listed, tests)


def not_begun(listed, tests):
    known = {test["name"] for test in tests}
    return [{"name": name, "state": "not run", "seconds": 0, "cases": []} for name in listed if name not in known]


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
    junit, log = output / "tests.xml", output / "tests.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    tests = read_tests(junit) if junit.exists() else read_log(text)
    tests += not_begun([line.group(1) for line in map(LISTED.match, text.splitlines()) if line], tests)
    if tests:
        found["tests"] = {
            "programs": count([test["state"] for test in tests]),
            "cases": count([case["state"] for test in tests for case in test["cases"]]),
            "each": tests,
        }
    found["benchmark"] = read_lines(output / "benchmark.jsonl")
    found["benchmark_runs"] = read_lines(output / "benchmark_runs.jsonl")
    return found


def read_lines(path):
    """JSON a line. Of whoever was ended while writing the last one may be a part."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            pass
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
        if test["state"] in ("not run", "cut off"):
            yield f"{test['name']}: {test['state']}"
        if test["state"] == "failed" and not any(case["state"] == "failed" for case in test["cases"]):
            yield f"{test['name']}: failed outside of its cases"
    if "tests" in found:
        yield f"cases: {found['tests']['cases']}"


def main():
    parts, output, seconds, dry_run, *say = sys.argv[1:]
    output = pathlib.Path(output)
    found = results(read_parts(pathlib.Path(parts).read_text(encoding="utf-8")), output, int(seconds), dry_run == "1")
    # Whole at any time, whoever ends this.
    written = output / "results.json.new"
    written.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    os.replace(written, output / "results.json")
    for line in summary(found) if say else ():
        print(f"[gpu_check] {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
