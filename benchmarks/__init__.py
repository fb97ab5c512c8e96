"""Benchmarks, which `scripts/bench` runs by name."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter


def parser_of(name: str, description: str | None) -> ArgumentParser:
    """Return the parser of a benchmark's options; `--help` shows the description as it is."""
    return ArgumentParser(
        prog=f"scripts/bench {name}",
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
    )
