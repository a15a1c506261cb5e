"""Settings of a run of `compress` in a file: TOML, or the compression.json of an earlier run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from lsrdecomp.cli.options import read_toml
from lsrdecomp.errors import CheckpointError, unknown
from lsrdecomp.fields import POSITIVE, Field, Settings, SettingsError, settings, whole_number
from lsrdecomp.gateway import TRUST, refuse_trust
from lsrdecomp.lora.files.file_checks import read_json
from lsrdecomp.lora.search.measured_settings import MeasuredSettings
from lsrdecomp.lora.search.plan import GOALS, SHARES_TO_KEEP, CompressionPlan

TABLE = "compress"
"""Table of a TOML file that holds the settings, also for ``fleet --plan``."""


@settings
class RunSettings(Settings):
    """What a run reads beside its plan and the settings of its measurement."""

    base: Annotated[str, "Base model to measure on."]
    data: Annotated[str, "Texts of the task."]
    statistics: Annotated[str, "Statistics that `calibrate` wrote."]
    workers: Annotated[int, whole_number(1), "Processes that solve."]
    name: Annotated[str, "Weight file to open, where the directory has several."]
    alpha: Annotated[float, POSITIVE, "LoRA alpha, for files that do not store it."]


FIELDS: Mapping[str, Field] = {
    **CompressionPlan.fields,
    **{name: field for name, field in MeasuredSettings.fields.items() if name != TRUST},
    **RunSettings.fields,
}
"""Settings that a file may hold, by the names of `lsrdecomp.compress`."""
OPENING = ("name", "alpha")
"""Options of how the adapter is opened, which repeat a run as much as its settings."""
PATHS = ("data", "statistics")


def read_table(path: Path) -> dict[str, Any]:
    """Return the table [compress] of a TOML file.

    Raises
    ------
    SettingsError
        If it is not TOML, or has no such table.
    """
    table = read_toml(path).get(TABLE)
    if not isinstance(table, dict):
        raise SettingsError(
            f"{path}: has no table [{TABLE}]: a line [{TABLE}], then options of compress, as "
            "ratio = 48"
        )
    return table


def read_run(path: Path) -> dict[str, Any]:
    """Return the settings in a file, by the names of `lsrdecomp.compress`.

    Of a compression.json base, texts and statistics are those of the run where they still lie,
    wherever it is read; else they are looked for under the names that were typed.

    Parameters
    ----------
    path : Path
        TOML with a table [compress], or a compression.json.

    Raises
    ------
    SettingsError
        For a file without settings, an unknown name or an impossible value.
    CheckpointError
        If texts or statistics that it names are not there.
    """
    resolved = None
    if path.suffix == ".json":
        record = read_json(path)
        table = record.get("settings")
        resolved = record.get("resolved")
        if not isinstance(table, dict):
            raise SettingsError(
                f"{path}: has no settings; name the compression.json of a run of this release"
            )
    else:
        table = read_table(path)
    refuse_trust(table, path)
    settings: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in FIELDS:
            raise SettingsError(f"{path}: no setting is called {unknown(key, FIELDS)}")
        if name in settings:
            raise SettingsError(f"{path}: {name} is given twice, with - and with _; give one")
        settings[name] = _validated(path, name, value)
    if isinstance(resolved, dict):
        settings |= _resolved(path, settings, resolved)
    for name in PATHS:
        if name in settings and not Path(settings[name]).expanduser().exists():
            raise CheckpointError(
                f"no such file or directory, named by {path}", path=settings[name]
            )
    return settings


def _resolved(
    path: Path, settings: Mapping[str, Any], resolved: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the paths of a record that still lie where they lay.

    The name of a base stays as it was typed: a short one opens without network.
    """
    found = {}
    for name in ("base", *PATHS):
        if name in settings and name in resolved:
            # A record in a directory has paths that start from there.
            location = path.absolute().parent / _validated(path, name, resolved[name])
            if location.exists():
                found[name] = os.path.normpath(location)
    return found


def merged(in_file: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file and of the command line, which wins.

    A goal on the command line takes the place of the goal in the file.
    """
    goals = {*SHARES_TO_KEEP, *GOALS}
    given = {name: value for name, value in typed.items() if value is not None}
    kept = dict(in_file)
    if goals & set(given):
        kept = {name: value for name, value in in_file.items() if name not in goals}
    return kept | given


def run_text(settings: Mapping[str, Any]) -> str:
    """Return settings as TOML that `read_run` reads.

    >>> print(run_text({"keep": 0.9, "data": "a.txt", "ratio": [96.0, 48.0]}), end="")
    [compress]
    keep = 0.9
    data = "a.txt"
    ratio = [96.0, 48.0]
    """
    lines = [f"{name} = {_toml(value)}" for name, value in settings.items() if name != TRUST]
    return "\n".join([f"[{TABLE}]", *lines]) + "\n"


def _validated(path: Path, name: str, value: Any) -> Any:
    """Return a value, checked; a list as a tuple."""
    field = FIELDS[name]
    try:
        if name == "ratio" and isinstance(value, list):
            if not value:
                raise SettingsError("ratio is an empty list; give one or more numbers")
            return [field.validate(ratio, SettingsError) for ratio in value]
        return field.validate(value, SettingsError)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error


def _toml(value: Any) -> str:
    """Return a number, a truth, a text or a list of them as TOML has it, which is as JSON has it.

    JSON leaves one control character as it is, which TOML does not.
    """
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
