"""Errors of functions, in the words of the command line that calls them."""

import pytest

from trunkline._cli_errors import in_options

OPTIONS = {
    "key": "--key",
    "step": "--step",
    "force": "--overwrite",
    "memory_budget": "--memory-budget",
    "from_folder": "--from",
    "host_memory, bus_bandwidth": "--host-memory, --bus-bandwidth",
}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("step: must be an integer", "--step: must be an integer"),
        ("host_memory, bus_bandwidth: only for a GPU", "--host-memory, --bus-bandwidth: only for a GPU"),
        ("replace it with force=True", "replace it with --overwrite"),
        ("export key=\"model\" or key='optimizer.state'", "export --key model or --key optimizer.state"),
        ("export another part of the state (key=)", "export another part of the state (--key)"),
        ("pass memory_budget= and key=", "pass --memory-budget and --key"),
        ('pass memory_budget="4294kB", or less', "pass --memory-budget 4294kB, or less"),
        ("memory_budget and from_folder are for folders", "--memory-budget and --from are for folders"),
        ('call huggingface_hub.snapshot_download("a/b") first', "call hf download a/b first"),
        ('huggingface_hub.snapshot_download("a", revision="v1")', "hf download a --revision v1"),
        (
            'huggingface_hub.snapshot_download("a", allow_patterns="config.json", revision="v1")',
            "hf download a config.json --revision v1",
        ),
    ],
)
def test_arguments_are_named_as_options(message: str, expected: str) -> None:
    assert in_options(message, OPTIONS) == expected


@pytest.mark.parametrize(
    "message",
    [
        "the key 'step' of a step is missing",
        "cannot open /data/key=model/step=3/force=True: no such file",
        "cannot open run/memory_budget/x: no such file",
        "cannot open ./from_folder.json: no such file",
        "cannot open memory_budget.json: no such file",
        "monkey=1 and from_folders stay",
    ],
)
def test_other_words_stay(message: str) -> None:
    assert in_options(message, OPTIONS) == message
