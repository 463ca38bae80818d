"""The file of ``--config-file``: options of kvhvdrun, one a line, in YAML."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from kvstore_hvd.errors import LaunchError, message

__all__ = ["arguments_of_file"]

_WORDS = {**dict.fromkeys(("true", "yes", "on"), True), **dict.fromkeys(("false", "no", "off"), False)}
_FIX = "give the path of a YAML file with lines such as num-proc: 4"


def arguments_of_file(path: str, known: Mapping[str, Any]) -> dict[str, list[str]]:
    """The options of a YAML file as arguments, by argparse's name; `known` has its actions by the option's name."""
    # `_` and `-` in the names of options are the same.
    try:
        import yaml
    except ModuleNotFoundError:
        fix = "python -m pip install 'kvstore-hvd[yaml]'"
        raise LaunchError(message("--config-file needs PyYAML, which is not installed.", fix=fix)) from None
    try:
        with open(path, encoding="utf-8") as file:
            given = yaml.load(file, Loader=yaml.BaseLoader) or {}  # which leaves texts as they stand there
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LaunchError(message(f"the configuration file '{path}' cannot be read: {error}.", fix=_FIX)) from None
    if not isinstance(given, dict):
        raise LaunchError(message(f"the configuration file '{path}' is no mapping.", fix="one line: num-proc: 4"))
    found: dict[str, list[str]] = {}
    for key, value in given.items():
        name, texts = str(key).replace("_", "-"), value if isinstance(value, list) else [value]
        action: Any = known.get(name)
        fact, fix = "", f"one line: {name}: VALUE"
        if action is None:
            fact, close = f"'{key}' is no option of kvhvdrun", difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean {close[0]}?" if close else f"one of {', '.join(sorted(known))}."
        elif action.dest in found:
            fact, fix = f"'{name}' is given twice", "leave one of them."
        elif not all(isinstance(text, str) and text for text in texts):
            fact = f"'{name}' has no value"
        elif action.nargs == 0 and str(value).lower() not in _WORDS:
            fact, fix = f"{name}: '{value}' is not true or false", f"one line: {name}: true"
        if fact:
            raise LaunchError(message(f"{path}: {fact}.", fix=fix))
        if action.nargs == 0:
            found[action.dest] = [f"--{name}"] if _WORDS[value.lower()] else []
        elif action.nargs is None:
            found[action.dest] = [f"--{name}={' '.join(texts)}"]
        else:
            found[action.dest] = [f"--{name}", *" ".join(texts).split()]
    return found
