"""The commands in Python, for the completion scripts of `trunkline completion`."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from trunkline._help import described, sentence, value_of


def package_commands(
    top: argparse.ArgumentParser,
    workload: argparse.ArgumentParser,
    checkpoint: argparse.ArgumentParser,
    words: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Return the tree of commands that these parse, as src/cli/completion/command_tree.h reads it.

    words: what is offered for a value besides files, by the name that help texts have for the value.
    """
    commands: list[dict[str, Any]] = _described("", "", top, words)["commands"]
    commands.append(_described("workload", "", workload, words))
    commands.append({"name": "checkpoint", "commands": _described("", "", checkpoint, words)["commands"]})
    return {"name": "trunkline", "commands": commands}


def _described(
    name: str, summary: str, parser: argparse.ArgumentParser, words: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Describe a command: its options, arguments and subcommands."""
    command: dict[str, Any] = {"name": name, "description": sentence(summary)}
    command.update(options=[], arguments=[], commands=[])
    for action in parser._actions:
        value = value_of(action)
        value = "|".join([*words.get(value, ()), value])
        if isinstance(action, argparse._SubParsersAction):
            helps = {each.dest: each.help or "" for each in action._choices_actions}
            command["commands"] += [
                _described(each, helps.get(each, ""), below, words) for each, below in action.choices.items()
            ]
        elif action.option_strings:
            command["options"].append(
                {
                    "names": list(action.option_strings),
                    "value": value,
                    "description": described(parser, action),
                }
            )
        else:
            command["arguments"].append(value)
    return command
