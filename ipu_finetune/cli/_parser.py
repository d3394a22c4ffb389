# SPDX-License-Identifier: Apache-2.0
"""The argument parser that all verbs share, and the options that a recipe's fields declare."""

import argparse
import dataclasses
from typing import Any, Dict, List, NoReturn, Union

from ipu_finetune._fields import hints
from ipu_finetune._overrides import Override
from ipu_finetune.errors import UsageError, did_you_mean
from ipu_finetune.recipe import SECTIONS
from ipu_finetune.targets import TARGETS

__all__ = ["Parser", "add_recipe_options", "add_target_option", "overrides", "recipe_flags"]


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are `UsageError`, with the nearest option where one is unknown."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An abbreviation that works today is ambiguous once there is another option.
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing and leaving."""
        raise UsageError(f"{message}; see {self.prog} --help")

    def option_names(self) -> List[str]:
        """Return every long option of this parser."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]

    def parse_strictly(self, arguments: List[str]) -> argparse.Namespace:
        """Parse all of `arguments`; name what is left over."""
        # Intermixed: otherwise an optional positional is lost where an option stands before it.
        parsed, rest = self.parse_known_intermixed_args(arguments)
        unknown = [each for each in rest if each.startswith("-")]
        if unknown:
            name = unknown[0].split("=", 1)[0]
            self.error(f"unknown option {name}{did_you_mean(name, self.option_names())}")
        if rest:
            self.error(f"too many arguments: {' '.join(rest)}")
        return parsed


def recipe_flags() -> Dict[str, dataclasses.Field]:
    """Return the fields of a recipe that have a command-line flag, by `section.field`."""
    return {
        f"{section}.{each.name}": each
        for section, cls in SECTIONS.items()
        for each in dataclasses.fields(cls)
        if each.metadata.get("flag")
    }


def add_recipe_options(parser: argparse.ArgumentParser) -> None:
    """Add `--set` and each flag that a recipe's field declares."""
    group = parser.add_argument_group("recipe")
    group.add_argument(
        "--set",
        dest="settings",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="set any field of the recipe; repeatable; see `show` for the names",
    )
    for key, each in recipe_flags().items():
        section, name = key.split(".")
        options: Dict[str, Any] = {"dest": key, "help": f"{each.metadata['help']} ({key})"}
        if hints(SECTIONS[section])[name] is bool:
            options.update(action="store_const", const="true")
        else:
            options.update(metavar=_metavar(each.metadata["flag"]))
        group.add_argument(each.metadata["flag"], **options)


def _metavar(flag: str) -> str:
    return {"--model": "PATH_OR_ID", "--data": "PATH", "--pod": "POD"}.get(flag, "N")


def add_target_option(parser: argparse.ArgumentParser) -> None:
    """Add `--target`."""
    parser.add_argument(
        "--target", default="auto", metavar="|".join(TARGETS), help="where to run (auto: real IPUs, else the emulator)"
    )


def overrides(arguments: argparse.Namespace) -> List[Union[str, Override]]:
    """Return what `--set` and the recipe's flags set, as written: all of them are converted, and refused, together."""
    found: List[Union[str, Override]] = list(arguments.settings)
    for key, each in recipe_flags().items():
        text = getattr(arguments, key)
        if text is not None:
            flag = each.metadata["flag"]
            found.append(Override(key, text, flag if text == "true" else f"{flag} {text}"))
    return found
