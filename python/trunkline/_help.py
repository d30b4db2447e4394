"""Help texts of the commands in Python, in the layout of src/cli/help_formatter.cpp for the program."""

import argparse
import shutil
import textwrap
from collections.abc import Iterable, Sequence

_NAME_COLUMN = 30
_LEAST_WIDTH, _MOST_WIDTH = 60, 100


def help_text(parser: argparse.ArgumentParser) -> str:
    """Return what `--help` prints."""
    width = min(max(shutil.get_terminal_size().columns, _LEAST_WIDTH), _MOST_WIDTH)
    shown = [each for each in parser._actions if each.help != argparse.SUPPRESS]
    commands = [each for each in shown if isinstance(each, argparse._SubParsersAction)]
    options = [each for each in shown if each.option_strings]
    arguments = [each for each in shown if not each.option_strings and each not in commands]
    summaries = [each for group in commands for each in group._choices_actions]
    parts = [
        _wrapped(parser.description or "", width),
        f"Usage: {' '.join(_usage(parser.prog, arguments, options, commands))}",
        _section("Arguments", [(_name_of(each), described(parser, each)) for each in arguments], width),
        _section("Options", [(_name_of(each), described(parser, each)) for each in options], width),
        _section("Subcommands", [(each.dest, sentence(each.help or "")) for each in summaries], width),
        _wrapped(parser.epilog or "", width),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def sentence(text: str) -> str:
    """Return a text with a capital at its beginning."""
    return text[:1].upper() + text[1:]


def described(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the help of an option or argument, with what it cannot be combined with."""
    if isinstance(action, argparse._HelpAction):
        return "Print this help message and exit"
    text = sentence(action.help or "")
    for group in parser._mutually_exclusive_groups:
        if action in group._group_actions:
            others = [each.option_strings[0] for each in group._group_actions if each is not action]
            text += f" (not with {', '.join(others)})"
    return text


def value_of(action: argparse.Action) -> str:
    """Return what stands for the value of an option or argument: FILE; empty for a flag."""
    return "" if action.nargs == 0 else str(action.metavar or action.dest.upper())


def _usage(
    program: str,
    arguments: Iterable[argparse.Action],
    options: Iterable[argparse.Action],
    commands: Sequence[argparse.Action],
) -> list[str]:
    words = [program, "[OPTIONS]"]
    for each in arguments:
        name = value_of(each) + _several(each)
        words.append(f"[{name}]" if each.nargs in ("?", "*") else name)
    # Last, because an option with several values would take the arguments.
    required = [each for each in options if each.required]
    words += [f"{each.option_strings[0]} {value_of(each)}{_several(each)}" for each in required]
    return [*words, "SUBCOMMAND"] if commands else words


def _several(action: argparse.Action) -> str:
    return "..." if action.nargs in ("*", "+") else ""


def _name_of(action: argparse.Action) -> str:
    return " ".join(filter(None, [", ".join(action.option_strings), value_of(action), _several(action)]))


def _section(title: str, rows: Iterable[tuple[str, str]], width: int) -> str:
    lines = [_entry(name, text, width) for name, text in rows]
    return "\n".join([f"{title}:", *lines]) if lines else ""


def _entry(name: str, text: str, width: int) -> str:
    """Return a name and its text in two columns; a long name gets a separate line."""
    start = f"  {name}"
    if not text:
        return start
    indent = " " * _NAME_COLUMN
    start = f"{start}\n{indent}" if len(start) + 2 > _NAME_COLUMN else start.ljust(_NAME_COLUMN)
    return start + _wrapped(text, width - _NAME_COLUMN).replace("\n", f"\n{indent}")


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
