"""Break the project in one place after the other, and see a test fail for each.

    python -m tests.mutants [--json] [--without-engine | --with-engine] [--jobs COUNT] [NAME ...]

Prints a table of which test noticed which mutant, or one JSON object. Ends with 1 if a mutant survives, if one cannot
be made any more, or if a test fails without any.
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.mutants.catalogue import MUTANTS
from tests.mutants.runs import run_all


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Break one place at a time.")
    parser.add_argument("names", nargs="*", help="only mutants whose names contain one of these")
    parser.add_argument("--json", action="store_true", help="print one JSON object, as the last line")
    parser.add_argument("--jobs", type=int, default=2, help="how many mutants without an engine to run at a time")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--without-engine", action="store_true", help="only those whose tests start no engine")
    which.add_argument("--with-engine", action="store_true", help="only those whose tests start one")
    options = parser.parse_args()
    mutants = [
        mutant
        for mutant in MUTANTS
        if (not options.names or any(name in mutant.name for name in options.names))
        and not (options.without_engine and mutant.engine)
        and not (options.with_engine and not mutant.engine)
    ]
    found, problems = run_all(mutants, jobs=options.jobs, said=lambda text: print(text, file=sys.stderr, flush=True))
    by = {name: outcome.killers for name, outcome in found.items()}
    killed = sum(map(bool, by.values()))
    if options.json:
        print(json.dumps({"mutants": len(mutants), "killed": killed, "by": by}), flush=True)
    else:
        width = max(map(len, by), default=0)
        for name, killers in by.items():
            print(f"{name:{width}}  {killers[0] if killers else 'SURVIVES'}")
            for killer in killers[1:]:
                print(f"{'':{width}}  {killer}")
        print(f"{killed} of {len(mutants)} mutants killed")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems or killed < len(mutants) else 0


if __name__ == "__main__":
    sys.exit(main())
