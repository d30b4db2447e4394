"""The commands in Python, for the completion scripts of `trunkline completion`."""

import argparse
from typing import Any


def package_commands(
    top: argparse.ArgumentParser, workload: argparse.ArgumentParser, checkpoint: argparse.ArgumentParser
) -> dict[str, Any]:
    """Return the tree of commands that these parse, as src/cli/completion/command_tree.h reads it."""
    commands: list[dict[str, Any]] = _described("", "", top)["commands"]
    commands.append(_described("workload", "", workload))
    commands.append({"name": "checkpoint", "commands": _described("", "", checkpoint)["commands"]})
    return {"name": "trunkline", "commands": commands}


def _described(name: str, summary: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Describe a command: its options, arguments and subcommands."""
    described: dict[str, Any] = {"name": name, "description": _sentence(summary)}
    described.update(options=[], arguments=[], commands=[])
    for action in parser._actions:
        value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
        if isinstance(action, argparse._SubParsersAction):
            helps = {each.dest: each.help or "" for each in action._choices_actions}
            described["commands"] += [
                _described(each, helps.get(each, ""), below) for each, below in action.choices.items()
            ]
        elif action.option_strings:
            described["options"].append(
                {
                    "names": list(action.option_strings),
                    "value": value,
                    "description": _sentence(action.help or ""),
                }
            )
        else:
            described["arguments"].append(value)
    return described


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
