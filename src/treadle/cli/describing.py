"""The `treadle env` command: facts about the installation for bug reports."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import __version__
from ..core.installation import describe, shortened
from ..core.keras_internals import missing_entries
from . import environment, output
from .commands import command
from .options import HOW, backend_option, flag, json_flag


@dataclass(frozen=True, kw_only=True)
class Env:
    """Options of `treadle env`."""

    devices: bool = flag(
        "List the devices that the backend uses, and what is switched off because the installed "
        "versions lack it. The framework is imported for this, which takes seconds.",
        HOW,
    )
    backend: str | None = backend_option()
    json: bool = json_flag()


@command("Exit codes: 0 done, 2 wrong usage.")
def env(options: Env) -> None:
    """Print what a bug report needs: versions, backend, machine, environment variables.

    The home directory is written as ~, and values of variables that may be secret are hidden.
    Read the output before you publish it.

    Examples:
      treadle env
      treadle env --devices --json
    """
    facts = {"treadle": __version__, **describe()}
    if options.devices or options.backend is not None:
        facts["devices"] = _devices(options.backend)
    if options.json:
        output.print_json(facts)
    else:
        output.print_line("\n".join(_lines(facts)))


def _devices(backend: str | None) -> dict[str, Any]:
    """Return the devices of a backend, or the error that its framework raised."""
    try:
        environment.prepare(environment.Setup(backend=backend, quiet=True))
        from ..backends.base import active

        found = active()
        lost = missing_entries(found.name)
        return {"backend": found.name, **found.computes_on(), "switched_off": lost, "error": None}
    except Exception as error:  # a broken installation may raise anything: that is what is asked
        return {"backend": backend, "error": shortened(f"{type(error).__name__}: {error}")}


def _lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the facts as lines of text, in columns."""
    machine, backend = facts["machine"], facts["backend"]
    memory = machine["memory_gib"]
    rows = [
        ("treadle", f"{facts['treadle']} ({facts['location']})"),
        ("python", facts["python"]),
        ("platform", facts["platform"]),
        ("processor", f"{machine['processor']}, {machine['cores']} cores available"),
        ("memory", "unknown" if memory is None else f"{memory} GiB"),
        ("NVIDIA GPUs", ", ".join(machine["nvidia_gpus"]) or "none found"),
        ("backend", _chosen(backend)),
    ]
    if "devices" in facts:
        rows.append(("devices", _used(facts["devices"])))
        rows += [("switched off", text) for text in facts["devices"].get("switched_off", ())]
    rows += [(name, version or "not installed") for name, version in facts["backends"].items()]
    rows += [(name, version or "not installed") for name, version in facts["packages"].items()]
    for extra, packages in facts["extras"].items():
        found = (f"{name} {version or 'not installed'}" for name, version in packages.items())
        rows.append((f"extra {extra}", ", ".join(found)))
    settings = facts["keras_configuration"].items()
    rows.append(("keras.json", ", ".join(f"{name} {value}" for name, value in settings) or "none"))
    rows.append(("compile cache", facts["compile_cache"] or "off"))
    variables = [(name, value or "(empty)") for name, value in facts["environment"].items()]
    rows += variables or [("environment", "no variable that matters")]
    width = max(len(name) for name, _ in rows) + 2
    return [f"{name.ljust(width)}{value}" for name, value in rows]


def _chosen(backend: Mapping[str, str | None]) -> str:
    if backend["name"] is None:
        return f"none: {backend['error']}"
    error = f"; {backend['error']}" if backend["error"] else ""
    return f"{backend['name']}, from {backend['origin']}{error}"


def _used(devices: Mapping[str, Any]) -> str:
    if devices["error"]:
        return devices["error"]
    return f"{devices['devices']}, {devices['threads']} threads ({devices['backend']})"
