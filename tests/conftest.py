"""Settings of all tests."""

import os
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for what runs beside it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    """Add `--all`."""
    parser.addoption("--all", action="store_true", help="run `any_backend` tests on each backend")


def pytest_collection_modifyitems(config, items):
    """Leave out long forms, and what need not run on this backend.

    Not by `-m` in the configuration: one on the command line would take its place.
    """
    left_out = set()
    if "faults_long" not in config.option.markexpr:
        left_out |= {"faults_long"}
    if os.environ.get("KERAS_BACKEND") != "torch" and not config.option.all:
        left_out |= {"any_backend"}
    out = [item for item in items if any(item.get_closest_marker(name) for name in left_out)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in set(out)]
