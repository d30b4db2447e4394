"""Imports where the package cannot work, and imports that come again."""

from collections.abc import Callable

import pytest

RunScript = Callable[..., str]

# What the standard library calls sub-interpreters differs from version to version.
SUB_INTERPRETER = """
import sys

def run_in_sub_interpreter(code, isolated):
    if sys.version_info >= (3, 13):
        import _interpreters as interpreters
        made = interpreters.create("isolated" if isolated else "legacy")
        failure = interpreters.run_string(made, code)
        assert failure is None, failure
    else:
        import _xxsubinterpreters as interpreters
        made = interpreters.create(isolated=isolated)
        interpreters.run_string(made, code)
    interpreters.destroy(made)
"""


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize("imported", ["before", "after", "never"])
def test_a_sub_interpreter_is_refused_and_harms_nobody(
    run_script: RunScript, isolated: bool, imported: str
) -> None:
    printed = run_script(
        SUB_INTERPRETER
        + f"""
if {imported!r} == "before":
    import trunkline as tl
for _ in range(2):
    run_in_sub_interpreter('''
try:
    import trunkline
    print("imported")
except ImportError as error:
    print(error, flush=True)
''', {isolated})
if {imported!r} != "never":
    import trunkline as tl
    with tl.open("file", "w") as file:
        print(file.async_pwrite(b"main").result(), file.pread(bytearray(4)))
"""
    )
    lines = printed.splitlines()
    assert len(lines) == 2 + (imported != "never")
    for line in lines[:2]:
        assert "sub-interpreter" in line
        assert "multiprocessing" in line
    if imported != "never":
        assert lines[2] == "4 4"


def test_an_import_may_come_again(run_script: RunScript) -> None:
    printed = run_script("""
        import sys
        import trunkline as first
        with first.open("file", "w") as file:
            file.pwrite(b"first")
            for name in [name for name in sys.modules if name.split(".")[0] == "trunkline"]:
                del sys.modules[name]
            import trunkline as tl
            assert tl is not first and tl.Engine is first.Engine
            assert tl.open("file").pread(bytearray(5)) == file.pread(bytearray(5)) == 5
        try:
            tl.open("absent")
        except tl.Error as error:
            print(error.filename)
    """)
    assert printed == "absent\n"
