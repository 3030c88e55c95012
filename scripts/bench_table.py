"""Puts the table of a measurement into the pages that show it.

    python scripts/bench_table.py RESULTS.json [PAGE.md ...]

The table goes between the lines `<!-- bench: begin -->` and `<!-- bench: end -->` of each page,
with the machine and the command above it: whole into benchmarks/README.md, short into README.md.
"""

import argparse
import sys
from pathlib import Path

from prefetch_runtime.bench.report import load_json, machine_text, markdown

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
ROOT = Path(__file__).resolve().parent.parent


def put(page: str, table: str) -> str:
    """The page with the table between its marks. Raises ValueError without exactly one pair."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page needs one line {BEGIN!r} and, after it, one line {END!r}")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}{END}{after}"


def main() -> int:
    """Rewrite the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("pages", type=Path, nargs="*")
    arguments = parser.parse_args()
    results = load_json(arguments.results)
    whole = ROOT / "benchmarks" / "README.md"
    for page in arguments.pages or [whole, ROOT / "README.md"]:
        table = markdown(results, short=page.resolve() == ROOT / "README.md")
        page.write_text(put(page.read_text(), f"{machine_text(results)}\n\n{table}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
