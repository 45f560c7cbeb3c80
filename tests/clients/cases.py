"""Runs a client's cases and says how each went."""

import sys
import traceback


def run(cases):
    failed = []
    for case in cases:
        try:
            case()
        except Exception:  # noqa: BLE001  a case fails in any way it can
            failed.append(case.__name__)
            traceback.print_exc()
    print(f"{len(cases)} cases, {len(failed)} failed {' '.join(failed)}".rstrip())
    sys.exit(1 if failed else 0)
