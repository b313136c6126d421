"""Ask the vulnerability service about every pinned package, and say clearly where there was no answer.

    python packaging/audit.py constraints.txt

Exit code 0: every package was audited, and no vulnerability is known. 1: some are known. 3: packages were not audited,
because the service did not answer or does not know them. (pip-audit itself reports success where it knows nothing.)
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def audit_pins(constraints: str) -> int:
    """Audit the pins of a file, without installing anything; the exit code."""
    options = ("--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json", "-r", constraints)
    done = subprocess.run([sys.executable, "-m", "pip_audit", *options], capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except ValueError:
        reason = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        print(f"{constraints} was not audited: pip-audit failed: {reason}", file=sys.stderr)
        return 3
    return report_findings(constraints, packages)


def report_findings(constraints: str, packages: list[dict[str, Any]]) -> int:
    """Print what is known of the packages; the exit code."""
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    vulnerable = [package for package in packages if package.get("vulns")]
    for package in vulnerable:
        for known in package["vulns"]:
            fixed = ", ".join(known["fix_versions"]) or "no version yet"
            print(f"{package['name']} {package['version']}: {known['id']}, fixed in {fixed}")
    audited = f"{len(packages) - len(skipped)} of {len(packages)} packages audited"
    print(f"{constraints}: {audited}, {len(vulnerable)} vulnerable")
    if skipped:
        print(f"not audited, as the service has no answer for them: {', '.join(skipped)}", file=sys.stderr)
    return 1 if vulnerable else 3 if skipped else 0


if __name__ == "__main__":
    sys.exit(max(map(audit_pins, sys.argv[1:])))
