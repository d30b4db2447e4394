"""Sandboxes: system calls that fail in this process and its children, as container runtimes make them."""

import ctypes
import platform
import struct

# asm/unistd_64.h of x86-64, asm-generic/unistd.h of arm64.
_NUMBERS = {
    "x86_64": {
        "fcntl": 72,
        "fallocate": 285,
        "io_setup": 206,
        "io_uring_setup": 425,
        "io_uring_enter": 426,
        "io_uring_register": 427,
        "link": 86,
        "linkat": 265,
        "openat2": 437,
        "renameat2": 316,
        "statx": 332,
        "sync_file_range": 277,
    },
    "aarch64": {
        "fcntl": 25,
        "fallocate": 47,
        "io_setup": 0,
        "io_uring_setup": 425,
        "io_uring_enter": 426,
        "io_uring_register": 427,
        "link": 37,  # as linkat, which is all that there is
        "linkat": 37,
        "openat2": 437,
        "renameat2": 276,
        "statx": 291,
        "sync_file_range": 84,
    },
}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_RETURN_ERRNO, _RETURN_ALLOW = 0x00050000, 0x7FFF0000
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _SECOND_ARGUMENT_AT = 0, 24  # in struct seccomp_data


def forbid(calls: dict[str, int], fcntl: dict[int, int] | None = None) -> None:
    """Let system calls fail with an errno, and with `fcntl` its commands; an errno of 0 does nothing, well.

    Permanently, in this thread and those that it starts: call it first.
    """
    numbers = _NUMBERS[platform.machine()]
    rules = [_instruction(_LOAD_WORD, _NUMBER_AT)]
    for name, code in calls.items():
        rules += _answer(numbers[name], code)
    if fcntl:
        commands = [_instruction(_LOAD_WORD, _SECOND_ARGUMENT_AT)]
        for command, code in fcntl.items():
            commands += _answer(command, code)
        rules += [_instruction(_JUMP_IF_EQUAL, numbers["fcntl"], 0, len(commands)), *commands]
    rules.append(_instruction(_RETURN, _RETURN_ALLOW))
    program = ctypes.create_string_buffer(b"".join(rules))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_SECCOMP")


def _answer(value: int, code: int) -> list[bytes]:
    return [_instruction(_JUMP_IF_EQUAL, value, 0, 1), _instruction(_RETURN, _RETURN_ERRNO | code)]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
