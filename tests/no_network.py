"""Runs a script in a process that the kernel kills when it opens a socket of the internet.

python tests/no_network.py SCRIPT ARGUMENTS...
"""

import ctypes
import platform
import runpy
import socket
import struct
import sys

SOCKET_CALL = {"x86_64": 41, "aarch64": 198}
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # BPF
ALLOW, KILL_PROCESS = 0x7FFF0000, 0x80000000
CALL_NUMBER, FIRST_ARGUMENT = 0, 16  # offsets in struct seccomp_data


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def forbid_internet() -> None:
    """Has the kernel end this process when it opens such a socket. Raises OSError without such filters."""
    steps = [
        (LOAD_WORD, 0, 0, CALL_NUMBER),
        (JUMP_IF_EQUAL, 0, 3, SOCKET_CALL[platform.machine()]),
        (LOAD_WORD, 0, 0, FIRST_ARGUMENT),
        (JUMP_IF_EQUAL, 2, 0, socket.AF_INET),
        (JUMP_IF_EQUAL, 1, 0, socket.AF_INET6),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, KILL_PROCESS),
    ]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    program = _Program(len(steps), code)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)),
    ):
        if prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    try:
        forbid_internet()
    except (OSError, KeyError) as error:
        print(f"no filter: {error!r}", file=sys.stderr)
        sys.exit(77)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
