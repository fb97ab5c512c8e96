"""Settings of all tests."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for what runs beside it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config, items):
    """Leave out the long form of the fault tests, unless `-m` names it.

    Not by `-m` in the configuration: one on the command line would take its place.
    """
    if "faults_long" in config.option.markexpr:
        return
    long = [item for item in items if item.get_closest_marker("faults_long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]
